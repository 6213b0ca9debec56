# SPDX-License-Identifier: Apache-2.0
"""The holder of a lock on this machine and its progress, and QEMU's locks on images.

A stopped holder would keep its lock for ever. The kernel runs a living process now and then, even on a slow
disk: the host side reports every few seconds that it is alive. A waiter kills a process that did not run for
SILENT_S seconds of the waiter's own time (SIGSTOP, a frozen cgroup, a hung disk). A holder that does not die,
because of a hung disk or another owner, loses its lock (locks.py). The waiter counts looks and compares no
clocks; a late look counts as one in time.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
from typing import Callable, Dict, Iterator, Optional

from ..named import NamedTuple
from . import owner, progress


class Lock(NamedTuple):
    """One lock of an open file."""

    fd: str
    kind: str
    """FLOCK, POSIX, OFDLCK."""
    device: str
    """MAJOR:MINOR of the file system, in hexadecimal; on btrfs stat(2) reports another one."""
    inode: int
    first: int
    last: str
    """The last byte, or EOF."""

    def is_on(self, pid: int, found: os.stat_result) -> bool:
        """Return True if the lock is on the file with this status."""
        if self.inode != found.st_ino:
            return False
        if self.device == f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}":
            return True
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/fd/{self.fd}"), found)
        except OSError:
            return False


def locks_of_process(pid: int) -> Iterator[Lock]:
    """Yield the locks of a process; raise OSError if this user may not inspect it.

    The kernel's list (proc(5), fdinfo) needs no access to a file: on a hung store even stat(2) does not
    return.
    """
    for fd in os.listdir(f"/proc/{pid}/fdinfo"):
        try:
            with open(f"/proc/{pid}/fdinfo/{fd}", encoding="utf-8", errors="replace") as file:
                rows = [line.split() for line in file if line.startswith("lock:")]
        except OSError:
            continue
        for row in rows:
            # lock: N: OFDLCK ADVISORY WRITE PID MAJOR:MINOR:INODE FIRST LAST
            if len(row) == 9 and row[7].isdigit():
                device, _, inode = row[6].rpartition(":")
                yield Lock(fd, row[2], device, int(inode), int(row[7]), row[8])


FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


def is_image_open(path: str) -> bool:
    """Return True if a QEMU, or a caller of `hold_image`, has an image open; raise OSError as open(2).

    QEMU locks bytes of every image that it has open, read-only ones too (its block/file-posix.c). Only locks
    of this machine are seen.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # F_OFD_GETLK takes no lock.
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def hold_image(path: str) -> None:
    """Make an image look open while this process lives, and the program that it becomes by exec."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    os.set_inheritable(fd, True)


SILENT_S = 120.0
"""Seconds (or the standstill limit, if less) without any run after which a holder is killed."""
DYING_S = 10.0
"""Seconds that a killed holder may take to end."""
STIRRED_S = 10.0
"""Seconds without a run after which a waiter does not give up any more, as it soon takes the lock over."""
LOOK_S = 1.0


class Holder(NamedTuple):
    """The process that has taken a lock on this machine."""

    pid: int
    started: str
    """'' if it has ended, and a child of it has the lock."""


class _Watch:
    """The looks at the holder of one lock."""

    def __init__(self, holder: Optional[Holder], turns: int, now: float) -> None:
        self.holder, self.turns, self.looked, self.silent_s, self.is_told = holder, turns, now, 0.0, False

    @property
    def can_be_ended(self) -> bool:
        """Return True if a living process of this machine holds the lock itself, not only its children."""
        return self.holder is not None and self.holder.started != ""


_watched: Dict[str, _Watch] = {}


def look(path: str, found: os.stat_result, say: Callable[[str], None]) -> bool:
    """Look at the holder of the lock `found`, kill it when due; return True if its lock may be taken."""
    watch, now = _watched.get(path), time.monotonic()
    if watch and now - watch.looked < LOOK_S:
        return False
    holder = _of(found)
    turns = _turns(holder.pid) if holder else 0
    if watch is None or watch.holder != holder or (watch.turns != turns and not watch.is_told):
        _watched[path] = _Watch(holder, turns, now)
        return False
    watch.silent_s += min(now - watch.looked, 2 * LOOK_S)
    watch.looked = now
    limit_s = min(SILENT_S, progress.limit_s)
    if watch.silent_s >= limit_s and not watch.is_told:
        watch.is_told = True
        say(_told(holder, path, limit_s))
        if holder:
            _kill(holder)
    return watch.can_be_ended and watch.silent_s >= limit_s + DYING_S


def _told(holder: Optional[Holder], path: str, limit_s: float) -> str:
    here, held = os.uname().nodename, f"{path} is held, since {limit_s:.0f} s, by"
    if holder is None:
        return f"{held} a process that {here} does not see: of another machine, or in a container"
    process = f"process {holder.pid} on {here}"
    if not holder.started:
        return f"{held} what {process} has started, and left: it is waited for"
    return f"{process} has {path}, and has shown no life for {limit_s:.0f} s: it is killed"


def is_silent(path: str) -> bool:
    """Return True if a lock's holder has not run for some time, and will lose it unless it runs."""
    return path in _watched and _watched[path].can_be_ended and _watched[path].silent_s > STIRRED_S


def is_stopped(path: str) -> bool:
    """Return True if a lock's holder is stopped right now."""
    try:
        holder = _of(os.stat(path))
    except FileNotFoundError:
        return False
    return holder is not None and owner.state(holder.pid) in ("T", "t")


def _of(found: os.stat_result) -> Optional[Holder]:
    """Return the process that has taken the flock on a file; None if no process of this machine has."""
    try:
        with open("/proc/locks", encoding="ascii", errors="replace") as file:
            rows = [line.split() for line in file]
    except OSError:
        return None
    for words in rows:
        # N: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        is_flock = len(words) >= 6 and words[1] == "FLOCK" and words[4].isdigit()
        if is_flock and words[5].rpartition(":")[2] == str(found.st_ino):
            pid = int(words[4])
            if _has(pid, found, words[5]):
                return Holder(pid, owner.waiting(pid))
    return None


def _has(pid: int, found: os.stat_result, device: str) -> bool:
    """Return True if a process has a flock on the file; by the device number if it cannot be inspected."""
    try:
        return any(lock.kind == "FLOCK" and lock.is_on(pid, found) for lock in locks_of_process(pid))
    except OSError:
        return device.rpartition(":")[0] == f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"


def _turns(pid: int) -> int:
    """Return the number of context switches of all threads of a process."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return 0
    return sum(progress.switches(f"{pid}/task/{thread}") for thread in threads)


def _kill(holder: Holder) -> None:
    """Kill a process, if it is still the same one, with its group if it leads that, as a host side does."""
    try:
        group = os.getpgid(holder.pid)
        if owner.started(holder.pid) != holder.started or holder.pid == os.getpid():
            return
        if group == holder.pid:
            os.killpg(group, signal.SIGKILL)
        else:
            os.kill(holder.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
