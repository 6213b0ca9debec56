# SPDX-License-Identifier: Apache-2.0
"""Locks of one machine: flock on files of semishared, released by the kernel when the holder dies.

Only the holder may remove a lock file, however old: an action that holds a removed lock is no longer alone. A
process that waited on the removed file notices and takes the new one.

A waiter kills a stopped holder (tools/lock_holders.py). If that fails it takes the lock over: the lock gets
its next generation, a new file with the notes of the old one, and the old holder can publish nothing any
more.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import IO, Any, Callable, Iterator

from ..errors import PassedBy, TooLarge, ToolTimeout, UnexpectedFile, here
from . import beneath, files, progress

LIMIT_S = 2 * 86400.0
"""Limit of waiting for the stage of an image: its holder works, or reaches its limit (tools/progress.py)."""
VM_LIMIT_S = 1800.0
"""Limit of waiting for a VM: the holder may be removing a directory of large disks."""
LONGEST_NOTE = 1 << 16
"""Most characters of the notes in a lock file."""
LONG_S = 5.0
"""Seconds of waiting after which a waiter looks at the holder."""
say: Callable[[str], None] = partial(print, file=sys.stderr)
"""Prints messages about a holder that lost its lock."""
_wanted: dict[str, float] = {}
"""When this process began to wait for a lock, by path."""
_held: dict[int, tuple[str, os.stat_result]] = {}
"""The locks that this process has taken, by file descriptor: path and status."""


def attempt(path: str) -> IO[str] | None:
    """Take the lock `path` and return its open file, None if another process holds it."""
    while True:
        beneath.refuse_link(os.path.dirname(path))
        # Not append mode: notes overwrite earlier ones (disk/epochs.py).
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError:
            beneath.refuse_link(path)
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UnexpectedFile(f"{here(beneath.readable(path))} is no lock file")
        file = os.fdopen(fd, "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(file.fileno())
            if os.path.samestat(found, os.lstat(path)):
                _wanted.pop(path, None)
                _held[fd], files.refusals[:] = (path, found), [refuse_if_passed]
                return file
        except BlockingIOError:
            is_passed = _look(path, file)
            file.close()
            if is_passed:
                continue
            return None
        except FileNotFoundError:
            pass
        file.close()


def _look(path: str, file: IO[str]) -> bool:
    """Look at the holder of a lock that has been awaited for long; return True if the lock was taken over."""
    if time.monotonic() - _wanted.setdefault(path, time.monotonic()) < LONG_S:
        return False
    from . import lock_holders

    found = os.fstat(file.fileno())
    return lock_holders.look(path, found, say) and _pass(path, file, found)


def _pass(path: str, file: IO[str], found: os.stat_result) -> bool:
    """Give a held lock its next generation; return False if another process is doing so."""
    staged = f"{path}.next"
    with attempt(staged) or nullcontext() as new:
        if new is None:
            return False
        if os.path.samestat(os.lstat(path), found):
            note(new, {**noted(file), "generation": _generation(file) + 1})
            os.rename(staged, path)
            say(f"{here(path)} was taken over from who does not end: it can publish nothing any more")
            return True
        os.unlink(staged)
    return False


def _generation(file: IO[str]) -> int:
    known = noted(file).get("generation")
    return known if isinstance(known, int) else 0


def refuse_if_passed() -> None:
    """Raise PassedBy if another process has taken over a lock of this process, or removed it.

    Raise OSError if that cannot be determined. Other threads may release theirs meanwhile.
    """
    for fd, (path, found) in list(_held.items()):
        if not _has(fd, found):
            _forget(fd, found)  # released
        elif not files.is_at(path, found) and _knows(fd, found):
            raise PassedBy(
                f"process {os.getpid()} on {os.uname().nodename} had stopped, and lost {path} to another one"
            )


def _has(fd: int, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), found)
    except OSError:
        return False


def _knows(fd: int, found: os.stat_result) -> bool:
    """Tell whether a lock is still that of this number: another thread may have taken another one with it."""
    known = _held.get(fd)
    return known is not None and known[1] is found


def _forget(fd: int, found: os.stat_result) -> None:
    if _knows(fd, found):
        _held.pop(fd, None)


def remove(path: str) -> None:
    """Remove the lock file `path` of this process; a later generation of that name stays."""
    for fd, (name, found) in list(_held.items()):
        if name == path and _has(fd, found):
            _forget(fd, found)
            if files.is_at(path, found):
                files.unlink(path)


def unless_busy(path: str) -> IO[str] | None:
    """Take the lock `path` and return its open file, None if it is held; wait out a stopped holder."""
    file = attempt(path)
    while file is None and _may_lose(path):
        time.sleep(0.1)
        progress.touch()
        file = attempt(path)
    return file


def _may_lose(path: str) -> bool:
    """Return True if the holder of a lock is stopped, or about to be killed or to lose it."""
    from . import lock_holders

    return lock_holders.is_stopped(path) or lock_holders.is_silent(path)


def noted(file: IO[str]) -> dict[str, Any]:
    """Return the JSON object in a lock file, {} if it holds none."""
    file.seek(0)
    try:
        data = json.loads(file.read(LONGEST_NOTE) or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def note(file: IO[str], data: dict[str, Any]) -> None:
    """Write a JSON object into a lock file, which never shrinks: readers see either old or new notes."""
    text = json.dumps(data)
    if len(text) > LONGEST_NOTE:
        raise TooLarge(f"{file.name} would have {len(text)} bytes, and what reads it takes {LONGEST_NOTE}")
    os.pwrite(file.fileno(), text.ljust(os.fstat(file.fileno()).st_size).encode(), 0)


def forget(path: str) -> bool:
    """Remove the lock file `path` unless another process holds it; return True if it was removed."""
    file = attempt(path)
    if not file:
        return False
    with file:
        remove(path)
    return True


def is_held(path: str) -> bool:
    """Return True if a process holds the lock `path`, or that is unknown; do not make the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        return e.errno != errno.ELOOP  # a link is no lock of ours
    return False


def _is_silent(path: str) -> bool:
    """Return True if the holder of a lock is about to be killed, or to lose it."""
    from . import lock_holders

    return lock_holders.is_silent(path)


@contextmanager
def exclusive(path: str, timeout_s: float = LIMIT_S) -> Iterator[IO[str]]:
    """Hold the lock `path` and yield its open file; raise ToolTimeout after `timeout_s` seconds."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while True:
        file = attempt(path)
        if file:
            break
        if time.monotonic() > deadline and not _is_silent(path):
            raise ToolTimeout(f"lock {path} is held by another action for over {timeout_s:.0f} s")
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
        progress.touch()
    try:
        yield file
    finally:
        file.close()
