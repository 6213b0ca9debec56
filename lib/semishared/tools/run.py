# SPDX-License-Identifier: Apache-2.0
"""The one way to run a program: argv lists, closed stdin, a constructed environment, a limit.

An error contains the program's stderr. Programs die with their parent (PR_SET_PDEATHSIG through setpriv): a
killed driver leaves none at work.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Callable, Generator, Iterator

from ..errors import NoSpace, SemisharedError, ToolFailed, ToolMissing, ToolTimeout, here
from . import progress
from .ending import ended_within

if TYPE_CHECKING:  # an eighth of the start of an action that starts no program
    import subprocess

LONGEST_S = 86_400.0
"""poll(2) takes milliseconds as an int."""
NONE = -1


def wait_to_read(fd: int, within_s: float) -> bool:
    """Return True if a file can be read, or is at its end, within `within_s` seconds.

    By poll(2): select(2) takes no descriptor above 1023, which a session with 250 hosts has.
    """
    return wait_to_read_or_write(fd, NONE, within_s)[0]


def wait_to_write(fd: int, within_s: float) -> bool:
    """Return True if a file becomes writable within `within_s` seconds."""
    return wait_to_read_or_write(NONE, fd, within_s)[1]


def wait_to_read_or_write(read: int, write: int, within_s: float) -> tuple[bool, bool]:
    """Return whether `read` is readable and `write` is writable, as soon as one of them is.

    An end of file or an error counts too; the next read or write reports it.
    """
    poll = select.poll()
    for fd, events in ((read, select.POLLIN), (write, select.POLLOUT)):
        if fd != NONE:
            poll.register(fd, events)
    # Rounded up: rounding down would poll again and again at the end.
    found = dict(poll.poll(math.ceil(min(max(within_s, 0.0), LONGEST_S) * 1000)))
    return read in found, write in found


HOLDS = 1 << 20
"""Bytes: the most that an unprivileged user may request (pipe(7))."""
_SET_SIZE, _GET_SIZE = 1031, 1032
"""F_SETPIPE_SZ and F_GETPIPE_SZ of fcntl(2), which Python has from 3.10 on."""


def widen(fd: int) -> None:
    """Enlarge a pipe to HOLDS bytes, if it is one and the user's quota allows it."""
    _let_hold(fd, HOLDS)


def as_wide(fd: int, other: int) -> None:
    """Make a pipe as large as the `other`."""
    _let_hold(fd, fcntl.fcntl(other, _GET_SIZE))


def _let_hold(fd: int, size: int) -> None:
    try:
        fcntl.fcntl(fd, _SET_SIZE, size)
    except OSError:
        pass  # it stays small


PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]
KEPT = (
    "HOME",
    "USER",
    "SSH_AUTH_SOCK",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
)
"""The proxies are for downloads: DATASTORE_MAD's --proxy arrives as http_proxy."""
ENDS_ITS_GROUP = 'trap "kill -KILL -$$" TERM; exec 8<&0; "$@" <&8 8<&- & wait $!'
GROUP_DIES_WITH_US = ["setpriv", "--pdeathsig", "TERM", "--", "sh", "-c", ENDS_ITS_GROUP, "sh"]
"""The same for a program with children, in a session of its own; a background job needs stdin passed on."""
QUICK_S = 120
"""Seconds for a program that reads or writes metadata only."""
SILENT_S = 600
"""Seconds of silence of a program that produces data: a repository may merge a chain of increments first."""
FIRST, LAST = 500, 900
"""Bytes of stderr that an error contains, from the beginning and the end; errors.py limits the sum."""
kept: list[int] = []
"""Files that child programs keep open: the lock is free when the last one has ended (guest/job_lock.py)."""


def environment(keep: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the environment of child programs: KEPT and `keep` of ours, system directories, C locale."""
    env = {key: os.environ[key] for key in (*KEPT, *keep) if key in os.environ}
    env["PATH"] = f"{os.environ['PATH']}:{PATH}" if os.environ.get("PATH") else PATH
    env["LC_ALL"] = "C.UTF-8"
    return env


def run(
    argv: list[str],
    *,
    timeout_s: float = QUICK_S,
    ok: tuple[int, ...] = (0,),
    cwd: str | None = None,
    stdin: int | None = None,
    both: bool = False,
    keep: tuple[str, ...] = (),
) -> str:
    """Run `argv` and return its stdout, with stderr if `both`; pass on the environment variables `keep`.

    Raise ToolMissing, ToolTimeout (after `timeout_s` seconds), NoSpace, or ToolFailed for an exit code not in
    `ok`.
    """

    def wait(process: subprocess.Popen[bytes]) -> int:
        code = end_of(process, timeout_s)
        if code is None:
            raise ToolTimeout(f"{argv[0]} did not end within {timeout_s:.0f} s: {line_of(argv)}")
        return code

    return _run(argv, wait, ok, cwd, stdin, both, keep)


def work(argv: list[str], *, stdin: int | None = None) -> str:
    """Run a program that copies, removes or writes out data: as `run`, limited only by a standstill."""
    return _run(argv, lambda process: _worked(process, argv), (0,), None, stdin)


def _worked(process: subprocess.Popen[bytes], argv: list[str]) -> int:
    """Return the exit code of a program without time limit; raise ToolTimeout if it stands still."""
    with progress.watched(process.pid) as watched:
        while (code := _ended(process, min(1.0, progress.limit_s / 4))) is None:
            idle_s = watched.idle_s()
            if idle_s < progress.limit_s or idle_s < progress.patience_s():
                continue
            _end(process)
            what = f"has done nothing for {idle_s:.0f} s on {os.uname().nodename}: is its storage hung?"
            raise ToolTimeout(f"{argv[0]} {what} {line_of(argv)}")
        return code


def unheard(argv: list[str]) -> subprocess.Popen[bytes]:
    """Start a program of which only the end counts; it has no file of ours, and may hang for ever."""
    import subprocess

    null = subprocess.DEVNULL
    return subprocess.Popen(
        [*DIES_WITH_US, *argv], stdin=null, stdout=null, stderr=null, env=environment(), cwd="/"
    )


def line_of(argv: list[str]) -> str:
    """Return the shell command for `argv`."""
    import shlex

    return shlex.join(argv)


def _require(program: str, path: str) -> None:
    """Raise ToolMissing unless a program exists; shutil.which would load three compression libraries."""
    for folder in path.split(":") if "/" not in program else [""]:
        found = os.path.join(folder, program)
        if os.access(found, os.X_OK) and not os.path.isdir(found):
            return
    raise ToolMissing(f"{program} is not installed on {os.uname().nodename}")


def _start(
    argv: list[str],
    stdin: int | None,
    stdout: int,
    stderr: int,
    cwd: str | None = None,
    keep: tuple[str, ...] = (),
) -> subprocess.Popen[bytes]:
    """Start a program that dies with this process, without a stdin if that is None; raise ToolMissing."""
    import subprocess

    stdin = subprocess.DEVNULL if stdin is None else stdin
    env = environment(keep)
    _require(argv[0], env["PATH"])
    return subprocess.Popen(
        [*DIES_WITH_US, *argv], stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd, pass_fds=kept
    )


def start_piped(argv: list[str], err: int, *, feed: bool) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    """Start a program that dies with this process; return it and its stdin (if `feed`, else its stdout).

    Raise ToolMissing.
    """
    import subprocess

    stdin, stdout = (subprocess.PIPE, subprocess.DEVNULL) if feed else (subprocess.DEVNULL, subprocess.PIPE)
    process = _start(argv, stdin, stdout, err)
    pipe = process.stdin if feed else process.stdout
    assert pipe
    return process, pipe


def start_filter(argv: list[str], err: int) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Start a program that dies with this process; return it, its stdin and its stdout. Raise ToolMissing."""
    import subprocess

    process = _start(argv, subprocess.PIPE, subprocess.PIPE, err)
    assert process.stdin and process.stdout
    return process, process.stdin, process.stdout


def _run(
    argv: list[str],
    wait: Callable[[subprocess.Popen[bytes]], int],
    ok: tuple[int, ...],
    cwd: str | None,
    stdin: int | None,
    both: bool = False,
    keep: tuple[str, ...] = (),
) -> str:
    # Not pipes: a child that outlives the program (virsh's ssh) would hold them open, and output could block.
    with memory() as out, memory() as own:
        err = out if both else own
        with progress.waiting():
            code = wait(_start(argv, stdin, out, err, cwd, keep))
        stdout = read_back(out)
        stderr = read_ends(err)
    if code not in ok:
        raise failure(argv, code, stderr)
    return stdout.decode("utf-8", "replace")


def end_of(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the exit code, None if the program had to be killed after `timeout_s` seconds."""
    code = _ended(process, timeout_s)
    if code is None:
        _end(process)
    return code


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """Return the exit code, None if the program still runs; kill it if this process is interrupted."""
    try:
        return ended_within(process, limit_s)
    except BaseException:
        _kill(process)
        raise


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill a program; return False for one of root, which this user cannot kill (share/rights.py)."""
    try:
        process.kill()
    except PermissionError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    import subprocess

    if _kill(process):
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass


@contextmanager
def memory() -> Iterator[int]:
    """Yield a memory file for a program's output, which never blocks it."""
    fd = os.memfd_create("said")
    try:
        yield fd
    finally:
        os.close(fd)


def read_ends(fd: int) -> bytes:
    """Return the content of a memory file; of a long one the beginning and the end.

    Some programs print the reason first; others, and ssh after a banner, last.
    """
    size = os.fstat(fd).st_size
    if size <= FIRST + LAST:
        return read_back(fd)
    return os.pread(fd, FIRST, 0) + b" ... " + read_back(fd, LAST)


def read_back(fd: int, last: int = 0) -> bytes:
    """Return the content of a memory file, or only its `last` bytes."""
    size = os.fstat(fd).st_size
    start = max(size - last, 0) if last else 0
    parts = []
    while start < size:
        part = os.pread(fd, size - start, start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def stream(
    argv: list[str], *, stdin: bytes = b"", silence_s: float = SILENT_S
) -> Generator[bytes, None, None]:
    """Run `argv` and yield its stdout in chunks; raise as `run`.

    Raise ToolTimeout after `silence_s` seconds without output.
    """
    import signal
    import subprocess

    # It runs OpenNebula's own scripts, which get oned's whole environment.
    env = {**os.environ, "PATH": environment()["PATH"]}
    _require(argv[0], env["PATH"])
    with memory() as asked, memory() as err:
        os.pwrite(asked, stdin, 0)
        # In a process group of its own, as such scripts have children that must not outlive them.
        with subprocess.Popen(
            [*GROUP_DIES_WITH_US, *argv],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=err,
            env=env,
            start_new_session=True,
        ) as process:
            assert process.stdout
            try:
                while True:
                    if not wait_to_read(process.stdout.fileno(), silence_s):
                        raise ToolTimeout(f"{argv[0]} has said nothing for {silence_s:.0f} s")
                    chunk = os.read(process.stdout.fileno(), 1 << 20)
                    if not chunk:
                        break
                    yield chunk
                code = process.wait(60)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if code:
            raise failure(argv[:1], code, read_ends(err))


@contextmanager
def piped(argv: list[str], *, feed: bool) -> Iterator[IO[bytes]]:
    """Run `argv` and yield its stdin (if `feed`, else its stdout); when the block ends, wait for its end.

    Raise as `run`. A program that stops reading early is judged by its exit code.
    """
    with memory() as err:
        process, stream = start_piped(argv, err, feed=feed)
        try:
            # It may search a disk of terabytes before its first output.
            with progress.watched(process.pid):
                yield stream
            stream.close()
        except BrokenPipeError:
            pass
        except BaseException:
            _end(process)
            raise
        finally:
            try:
                stream.close()
            except OSError:
                pass
        with progress.waiting():
            code = _worked(process, argv)
        if code:
            raise failure(argv, code, read_ends(err))


def filtered(argv: list[str], data: bytes | memoryview) -> bytes:
    """Return the output of `argv` for the input `data`; raise as `run`."""
    with memory() as given, memory() as out, memory() as err:
        os.pwrite(given, data, 0)
        code = end_of(_start(argv, given, out, err), QUICK_S)
        if code is None:
            raise ToolTimeout(f"{argv[0]} did not end within {QUICK_S} s")
        if code:
            raise failure(argv, code, read_ends(err))
        return read_back(out)


@contextmanager
def beside(argv: list[str]) -> Iterator[None]:
    """Run `argv` beside the block; its stdin ends with the block or this process. It may outlive both."""
    import subprocess

    pipe, null, env = subprocess.PIPE, subprocess.DEVNULL, environment()
    # Not in this process group, which is killed with this process.
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=null, stderr=null, env=env, cwd="/", start_new_session=True
    )
    assert process.stdin
    try:
        yield
    finally:
        process.stdin.close()
        process.poll()


def apart(argv: list[str], keep: int) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; it may outlive us, and inherits our stderr and `keep`."""
    import subprocess

    null = subprocess.DEVNULL
    return subprocess.Popen(
        argv, stdin=null, stdout=null, env=environment(), cwd="/", start_new_session=True, pass_fds=[keep]
    )


def failure(argv: list[str], code: int, stderr: bytes) -> SemisharedError:
    """Return the error for a program that ended with `code` and printed `stderr`."""
    from .beneath import readable

    argv = [readable(word) for word in argv]
    said = readable(" ".join(stderr.decode("utf-8", "replace").split())) or "said nothing"
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return NoSpace(f"{here(argv[0])}: {said}")
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return ToolFailed(f"{line_of(argv)}: {how}: {said}")
