# SPDX-License-Identifier: Apache-2.0
"""The one way to run a program, with real programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semishared.errors import NoSpace, ToolFailed, ToolMissing, ToolTimeout
from semishared.tools import progress
from semishared.tools.run import run, stream, work

LIB = Path(__file__).resolve().parents[2] / "lib"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pid: int, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_stdout_is_returned_and_stdin_is_empty() -> None:
    assert run(["cat"]) == ""
    assert run(["printf", "%s|", "a b", "$(x)", "'\""]) == "a b|$(x)|'\"|"


def test_environment_is_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PATH", "/nowhere")
    lines = dict(line.split("=", 1) for line in run(["env"]).splitlines())
    assert lines["LC_ALL"] == "C.UTF-8"
    assert "SECRET" not in lines
    assert lines["PATH"].startswith("/nowhere:/usr/sbin:/usr/bin")


def test_failure_says_command_code_and_stderr() -> None:
    with pytest.raises(ToolFailed) as caught:
        run(["sh", "-c", "echo it broke >&2; exit 7"])
    assert "exit code 7: it broke" in caught.value.detail
    assert "sh -c 'echo it broke" in caught.value.detail


@pytest.mark.fault(
    50, "of much that a program says the first words and the last are in its error, and in the user's line"
)
@pytest.mark.parametrize("said", ["echo THE REASON; seq 2000", "seq 2000; echo THE REASON"])
def test_neither_a_first_nor_a_last_reason_is_lost(said: str) -> None:
    with pytest.raises(ToolFailed) as caught:
        run(["sh", "-c", f"({said}) >&2; exit 7"])
    assert caught.value.detail.count("THE REASON") == 2 and caught.value.line().count("THE REASON") == 2, (
        "once in the command"
    )
    assert len(caught.value.line()) < 2000


def test_permitted_exit_codes_are_no_failure() -> None:
    assert run(["sh", "-c", "echo x; exit 1"], ok=(0, 1)) == "x\n"


def test_killed_program_is_told_from_a_failed_one() -> None:
    with pytest.raises(ToolFailed, match="killed by signal 9"):
        run(["sh", "-c", "kill -9 $$"])


def test_more_stderr_than_a_pipe_holds_does_not_hang_and_its_end_is_told() -> None:
    with pytest.raises(ToolFailed, match="the end$") as caught:
        run(
            [
                "sh",
                "-c",
                "head -c 300000 /dev/zero | tr '\\0' x >&2; head -c 300000 /dev/zero; echo the "
                "end >&2; exit 1",
            ],
            timeout_s=20,
        )
    assert len(caught.value.detail) < 2500


def test_missing_program_is_told_by_name() -> None:
    with pytest.raises(ToolMissing, match="no-such-program is not installed on"):
        run(["no-such-program", "x"])


@pytest.mark.parametrize("text", ["write failed: No space left on device", "qemu-img: Disk quota exceeded"])
def test_full_disk_is_recognised(text: str) -> None:
    with pytest.raises(NoSpace, match="sh on"):
        run(["sh", "-c", 'echo "$1" >&2; exit 1', "sh", text])


def test_real_full_disk_is_recognised() -> None:
    with pytest.raises(NoSpace):
        run(["dd", "if=/dev/zero", "of=/dev/full", "bs=4k", "count=1"])


def test_timeout_ends_the_program() -> None:
    start = time.monotonic()
    with pytest.raises(ToolTimeout, match=r"sleep did not end within 0 s: sleep 60"):
        run(["sleep", "60"], timeout_s=0.3)
    assert time.monotonic() - start < 30


def test_timeout_does_not_wait_for_grandchildren_that_hold_the_pipes(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ToolTimeout):
        # So long that the shell has written it by then, also on a busy machine.
        run(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/pid; wait"], timeout_s=3)
    assert time.monotonic() - start < 30
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_of_a_streamed_program_die_with_us(tmp_path: Path, how: signal.Signals) -> None:
    """OpenNebula's downloader is a pipe of programs: none of them may go on writing."""
    script = f"exec 1>/dev/null; sleep 60 & echo $! >{tmp_path}/pid; wait"
    code = f"import sys; sys.path.insert(0, {str(LIB)!r}); from semishared.tools.run import stream; "
    code += f"list(stream(['sh', '-c', {f'sh -c {script!r} & echo started; wait'!r}]))"
    assert wait_until_gone(killed_once_it_told(code, tmp_path / "pid", how))


def test_streamed_program_reads_what_it_is_given_and_its_exit_code_counts() -> None:
    assert b"".join(stream(["sh", "-c", "cat; cat </dev/null"], stdin=b"x" * 300_000)) == b"x" * 300_000
    with pytest.raises(ToolFailed, match="exit code 7: why"):
        list(stream(["sh", "-c", "echo why >&2; exit 7"]))
    with pytest.raises(ToolFailed):
        list(stream(["sh", "-c", "kill -KILL $$"]))


def killed_once_it_told(code: str, told: Path, how: signal.Signals) -> int:
    """Run python code until it has written a pid, then kill it; return that pid."""
    with subprocess.Popen([sys.executable, "-I", "-c", code]) as parent:
        deadline = time.monotonic() + 60
        while not (told.exists() and told.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child = int(told.read_text())
        assert is_alive(child)
        os.kill(parent.pid, how)
        parent.wait(30)
    return child


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_program_dies_with_us(tmp_path: Path, how: signal.Signals) -> None:
    code = f"import sys; sys.path.insert(0, {str(LIB)!r}); from semishared.tools.run import run; "
    code += f"run(['sh', '-c', 'echo $$ >{tmp_path}/pid; exec sleep 60'])"
    assert wait_until_gone(killed_once_it_told(code, tmp_path / "pid", how))


WRITES = (
    "import sys, time\nfor i in range(int(sys.argv[1])):\n    open('/dev/null', 'wb').write(b'x' * "
    "9000)\n    time.sleep(0.1)\n"
)


def test_who_works_may_take_as_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "limit_s", 2.0)
    began = time.monotonic()
    work(["/usr/bin/python3", "-c", WRITES, "40"])
    assert time.monotonic() - began > 4


def test_who_only_computes_works_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "limit_s", 1.0)
    work(
        [
            "/usr/bin/python3",
            "-c",
            "import time\nend = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass",
        ]
    )


def test_who_stands_still_is_ended_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "limit_s", 0.5)
    monkeypatch.setattr(progress, "FLOOR", 1 << 40)
    with pytest.raises(ToolTimeout, match="sleep has done nothing for . s on .*: is its storage hung"):
        work(["sleep", "60"])


def test_what_is_still_to_be_written_out_gives_longer_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "FLOOR", 1)
    Path("/var/tmp").joinpath(f"semishared-dirty-{os.getpid()}").write_bytes(b"x" * (1 << 20))
    try:
        assert progress.limit_s <= progress.patience_s() <= progress.LONGEST * progress.limit_s
        monkeypatch.setattr(progress, "limit_s", 1.0)
        assert progress.patience_s() == progress.LONGEST
    finally:
        Path("/var/tmp").joinpath(f"semishared-dirty-{os.getpid()}").unlink()
