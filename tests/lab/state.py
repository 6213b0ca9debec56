# SPDX-License-Identifier: Apache-2.0
"""Know what belongs to a lab from its state directory alone, and take all of it away again."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import cgroups

BASE = Path(os.environ.get("SEMISHARED_LAB_DIR", "/var/tmp/semishared-lab"))
MEMORY = Path("/dev/shm/semishared-lab")
MEMORY_NEEDED = 2 << 30
"""Labs have their many small files in memory where so many bytes are free. An ext4 on which much was just
removed looks at each such inode for each new file: some thousands of them cost a second of processor.
"""
RECORD = "lab.json"
YOUNG = 60.0  # seconds a directory without a record may be one that is just being made
GET_FLAGS, SET_FLAGS, TOP = 0x80086601, 0x40086602, 0x20000
"""FS_IOC_GETFLAGS, FS_IOC_SETFLAGS and FS_TOPDIR_FL of Linux."""


def started(pid: int) -> str:
    """Return the start time of a process, which with its pid names it for good; empty when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int, start: str) -> bool:
    """Tell whether exactly this process still runs."""
    return bool(start) and started(pid) == start


def kill(pid: int, start: str, patience: float = 20.0) -> bool:
    """End exactly this process with SIGKILL and wait until it is gone (an init: with all it contains)."""
    deadline = time.monotonic() + patience
    while alive(pid, start):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def read(folder: Path) -> dict[str, Any]:
    """Read a lab's record; empty when there is none."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record


def write(folder: Path, record: dict[str, Any]) -> None:
    """Replace a lab's record in one step."""
    new = folder / (RECORD + ".new")
    new.write_text(json.dumps(record, indent=1))
    os.replace(new, folder / RECORD)


def spread(folder: Path) -> None:
    """Have ext4 put each directory that is made in this one elsewhere on its disk, as it does with those of a
    root.

    It takes no inode that was given back less than some minutes ago, and looks at all of them, for each file
    that is made: where tests have just removed thousands of files, to make thousands takes it five times as
    long.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        flags = struct.unpack("l", fcntl.ioctl(handle, GET_FLAGS, bytes(8)))[0]
        fcntl.ioctl(handle, SET_FLAGS, struct.pack("l", flags | TOP))
    except OSError:
        pass  # another file system
    finally:
        os.close(handle)


@contextmanager
def _locked() -> Iterator[None]:
    # The lock is on the directory that holds BASE, so that BASE itself can go away with the last lab.
    handle = os.open(BASE.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def create(record: dict[str, Any]) -> Path:
    """Make a state directory under a new id, with a subnet no other lab uses."""
    with _locked():
        BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
        spread(BASE)
        taken = {str(read(other).get("subnet")) for other in folders()}
        lab_id = secrets.token_hex(3)
        while True:
            subnet = f"10.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}"
            if subnet not in taken:
                break
        folder = BASE / f".new-{lab_id}"
        folder.mkdir(mode=0o755)
        write(folder, {"id": lab_id, "subnet": subnet, **record})
        _make_memory(lab_id)
        final = BASE / lab_id
        folder.rename(final)
    return final


def _make_memory(lab_id: str) -> None:
    """Make a directory in memory for a lab, if this machine has enough of it, and files that can be executed
    there.
    """
    try:
        found = os.statvfs(MEMORY.parent)
    except OSError:
        return
    if found.f_bavail * found.f_frsize >= MEMORY_NEEDED and not found.f_flag & os.ST_NOEXEC:
        (MEMORY / lab_id).mkdir(mode=0o755, parents=True)


def folders() -> list[Path]:
    """List the state directories of all labs on this machine."""
    return sorted(folder for folder in BASE.iterdir() if folder.is_dir()) if BASE.exists() else []


def abandoned(folder: Path) -> bool:
    """Tell whether a lab's owner is gone without having taken it down."""
    record = read(folder)
    if not record:
        try:
            return time.time() - folder.stat().st_mtime > YOUNG
        except OSError:
            return False
    if alive(record.get("guard", 0), record.get("guard_start", "")):
        return False  # it stands, or its guard is taking it down right now
    return "keeper" in record or not alive(record["owner"], record["owner_start"])


def sweep() -> None:
    """Take away the labs whose owner is gone."""
    for folder in folders():
        if abandoned(folder):
            remove(folder)


def remove(folder: Path) -> None:
    """Take a lab away: its processes, with them its namespaces and mounts, then its groups and its files."""
    record = read(folder)
    if "keeper" in record:
        kill(record["keeper"], record["keeper_start"])
    cgroups.remove(folder.name)
    deadline = time.monotonic() + 10.0
    places = [place for place in (MEMORY / folder.name, folder) if place.exists()]
    while places:
        # Files may be immutable to nobody here; what can delay is only a mount namespace that is still going
        # away.
        subprocess.run(
            ["rm", "-rf", "--one-file-system", "--", *map(str, places)], check=False, capture_output=True
        )
        places = [place for place in places if place.exists()]
        if not places or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with _locked():
        for place in (MEMORY, BASE):
            try:
                place.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise


def namespaces_of(pid: int) -> set[str]:
    """List the namespaces of a process, as the kernel names them."""
    found = set()
    for name in ("net", "mnt", "pid", "uts", "ipc", "cgroup"):
        try:
            found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
        except OSError:
            continue
    return found


def _of_other_labs(lab_id: str) -> set[str]:
    # The kernel gives the number of a namespace that is gone to the next one made.
    found: set[str] = set()
    for folder in folders():
        if folder.name == lab_id:
            continue
        identities = [(read(folder).get("keeper", 0), read(folder).get("keeper_start", ""))]
        for path in folder.glob("nodes/*/init"):
            try:
                pid, start = path.read_text().split()
            except (OSError, ValueError):
                continue
            identities.append((int(pid), start))
        for number, begun in identities:
            if alive(number, begun):
                found |= namespaces_of(number)
    return found


def leftovers(lab_id: str, namespaces: set[str]) -> list[str]:
    """List what is left of a lab: processes in its namespaces, open namespaces, mounts, groups, files."""
    found = _leftovers(lab_id, namespaces)
    if found:
        time.sleep(0.2)  # another lab that is just starting may have looked like ours
        found = [line for line in _leftovers(lab_id, namespaces) if line in found]
    return found


def _leftovers(lab_id: str, namespaces: set[str]) -> list[str]:
    folder, memory = BASE / lab_id, MEMORY / lab_id
    namespaces = namespaces - _of_other_labs(lab_id)
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        if not started(pid):
            continue  # dead, and only waiting for the machine's pid 1 to notice
        # Whatever a lab starts is in one of its pid or net namespaces, from outside by nsenter too. A mount
        # namespace that another test has made for itself may have the number of one of ours that is gone.
        inside = {name for name in namespaces_of(pid) & namespaces if name.startswith(("pid:", "net:"))}
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            mounts = (entry / "mountinfo").read_text()
            handles = {os.readlink(handle.path) for handle in os.scandir(entry / "fd")}
        except OSError:
            words, mounts, handles = "", "", set()
        if inside or str(folder) in words:
            found.append(f"process {pid}: {words or '?'}")
        found += [
            f"mount of {place} seen by process {pid}" for place in (folder, memory) if str(place) in mounts
        ]
        found += [f"{name} held open by process {pid}" for name in sorted(handles & namespaces)]
    found += [f"cgroup {group}" for group in cgroups.leftovers(lab_id)]
    found += [f"directory {place}" for place in (folder, memory) if place.exists()]
    return found


def copy_tree(source: Path, target: Path, leave_out: set[str]) -> None:
    """Copy a directory with its links as they are, without the top-level entries to leave out."""
    target.mkdir(parents=True, exist_ok=True)
    entries = [str(entry) for entry in source.iterdir() if entry.name not in leave_out]
    # By cp, which takes a tenth of the processor that shutil takes for some thousand small files.
    words = ["cp", "-R", "--no-dereference", "--preserve=mode,timestamps", "--", *entries, str(target)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
