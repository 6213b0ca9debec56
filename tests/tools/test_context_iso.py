# SPDX-License-Identifier: Apache-2.0
"""The context ISO on this machine: what of it lies where other programs read, and what a process that dies
leaves of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semishared.errors import NoSpace, ReadOnly, SemisharedError, UnexpectedLink, of_system
from semishared.tools import context_iso, owner

SECRET = "SEMISHARED_SHARE_1_KEY='AQBY0pretended=='"
BUILD = """
import sys
from semishared.tools import context_iso
with context_iso.built((sys.argv[1],), sys.argv[2].encode()) as path:
    open(sys.argv[3], 'wb').write(open(path, 'rb').read())
"""


@pytest.fixture()
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "tmp"
    directory.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    return directory


def build(tmp_path: Path, at: int) -> int:
    """Build an ISO in a process that is killed at a point; return its exit code."""
    (tmp_path / "context.sh").write_text("A='1'\n")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "TMPDIR": str(tmp_path / "tmp"),
        "SEMISHARED_KILL_AT": str(at),
    }
    words = [sys.executable, "-c", BUILD, str(tmp_path / "context.sh"), SECRET, str(tmp_path / "out.iso")]
    return subprocess.run(words, env=env, check=False, timeout=60).returncode


def has_secret(directory: Path) -> bool:
    return any(SECRET.encode() in path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_while_the_iso_is_handed_over_nothing_of_it_has_a_name(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "context.sh").write_text("A='1'\n")
    with context_iso.built((str(tmp_path / "context.sh"),), SECRET.encode()) as path:
        assert list(temporary.iterdir()) == []
        # As often as it is asked for, each time from its beginning.
        first, second = Path(path).read_bytes(), Path(path).read_bytes()
    assert first == second and SECRET.encode() in first and b"CONTEXT" in first
    assert (tmp_path / "context.sh").read_text() == "A='1'\n"


@pytest.mark.fault(33, "a link in a files datastore gets nothing of the front-end's into a guest")
@pytest.mark.parametrize("place", ["datastores/2/file", "datastores//2/file", "datastores/2/folder/file"])
def test_a_link_in_a_datastore_is_not_followed(temporary: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "store/folder").mkdir(parents=True)
    (tmp_path / "datastores").mkdir()
    (tmp_path / "datastores/2").symlink_to(tmp_path / "store")  # where a datastore is, its administrator says
    (tmp_path / "one_auth").write_text(SECRET)
    path = tmp_path / place
    path.write_text("of the datastore")
    words = (f"{tmp_path}/{place}:name",)
    with context_iso.built(words, b"", str(tmp_path / "datastores")) as iso:
        assert b"of the datastore" in Path(iso).read_bytes()
    path.unlink()
    path.symlink_to(tmp_path / "one_auth")
    with pytest.raises(UnexpectedLink), context_iso.built(words, b"", str(tmp_path / "datastores")):
        pass
    assert list(temporary.iterdir()) == []


def test_what_a_killed_writer_leaves_goes_when_the_next_iso_is_written(
    temporary: Path, tmp_path: Path
) -> None:
    points = 0
    while build(tmp_path, points + 1):
        points += 1
        left = has_secret(temporary)
        assert left == (points == 1)
        with context_iso.built((str(tmp_path / "context.sh"),)):
            assert list(temporary.iterdir()) == []
    assert (
        points == 2
        and SECRET.encode() in (tmp_path / "out.iso").read_bytes()
        and list(temporary.iterdir()) == []
    )


def test_only_what_nobody_writes_any_more_is_removed(temporary: Path, tmp_path: Path) -> None:
    mine = owner.suffix()
    machine, boot, dead = mine[:8], mine[8:16], "1-1-0123456789ab"
    prefix = context_iso.PREFIX
    kept = {
        f"{prefix}a.{mine}",
        f"{prefix}b.{'0' * 16}-{dead}",
        f"{prefix}c",
        f"other.{machine}{boot}-{dead}",
    }
    # Of this boot, and of one before.
    for name in (
        *kept,
        f"{prefix}d.{machine}{boot}-{dead}",
        f"{context_iso.PREFIX}e.{machine}{'0' * 8}-{dead}",
    ):
        (temporary / name).mkdir()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").write_text("")
    (temporary / f"{prefix}f.{machine}{boot}-{dead}").symlink_to(tmp_path / "theirs")
    context_iso.remove_stale()
    # Elsewhere a name of before the boot may be another machine's of this name.
    assert not owner.is_gone(f"x.{machine}{'0' * 8}-{dead}") and owner.is_gone(f"x.{machine}{boot}-{dead}")
    assert (
        set(os.listdir(temporary)) == {*kept, f"{prefix}f.{machine}{boot}-{dead}"}
        and (tmp_path / "theirs/file").exists()
    )


@pytest.mark.fault(
    49, "what fails since /tmp is full, or read-only, says that and not that the file is missing"
)
@pytest.mark.parametrize(("options", "error"), [("size=64k", NoSpace), ("ro", ReadOnly)])
def test_no_room_for_an_iso_is_no_missing_file(
    temporary: Path, tmp_path: Path, options: str, error: type[SemisharedError]
) -> None:
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(temporary)], check=True)
    try:
        with pytest.raises((error, OSError)) as caught, context_iso.built((str(tmp_path / "file"),)):
            pass
    finally:
        subprocess.run(["umount", str(temporary)], check=True)
    said = (
        caught.value
        if isinstance(caught.value, SemisharedError)
        else of_system(caught.value, str(caught.value))  # type: ignore[arg-type]
    )
    assert type(said) is error and str(temporary) in said.detail
