# SPDX-License-Identifier: Apache-2.0
"""Locks of one machine: flock on files we own, released by the kernel when the holder dies.

A lock file may be removed by its holder, and by nobody else however old it is: an action that holds a removed lock is
alone no more. Whoever waited on the removed file notices and takes the new one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from contextlib import contextmanager
from typing import IO, Any, Iterator

from ..errors import TooLarge, ToolTimeout, UnexpectedFile
from . import beneath, progress

LIMIT_S = 2 * 86400.0
"""Limit of waiting for who stages an image: it works, or it has come to its own limit (standstill.py)."""
VM_LIMIT_S = 1800.0
"""Limit of waiting for a VM: its holder may be removing a directory of large disks."""
LONGEST_NOTE = 1 << 16
"""Characters of what is noted in a lock file."""


def attempt(path: str) -> IO[str] | None:
    """Take the lock `path` and return its open file, None if somebody has it."""
    while True:
        beneath.refuse_link(os.path.dirname(path))
        # Not to append: what is noted in it is written over what was (disk/epochs.py).
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError:
            beneath.refuse_link(path)
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise UnexpectedFile(f"{beneath.readable(path)} on {os.uname().nodename} is no lock file")
        file = os.fdopen(fd, "r+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), os.lstat(path)):
                return file
        except BlockingIOError:
            file.close()
            return None
        except FileNotFoundError:
            pass
        file.close()


def noted(file: IO[str]) -> dict[str, Any]:
    """Return the JSON object that a lock file holds, {} if it holds none."""
    file.seek(0)
    try:
        data = json.loads(file.read(LONGEST_NOTE) or "{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def note(file: IO[str], data: dict[str, Any]) -> None:
    """Write a JSON object into a lock file, never shorter than it was: who reads without the lock finds one state or the other."""
    text = json.dumps(data)
    if len(text) > LONGEST_NOTE:
        raise TooLarge(f"{file.name} would have {len(text)} bytes, and what reads it takes {LONGEST_NOTE}")
    os.pwrite(file.fileno(), text.ljust(os.fstat(file.fileno()).st_size).encode(), 0)


def forget(path: str) -> bool:
    """Remove the lock file `path` unless somebody holds it; tell whether it was removed."""
    file = attempt(path)
    if not file:
        return False
    with file:
        os.unlink(path)
    return True


def is_held(path: str) -> bool:
    """Tell whether somebody holds the lock `path`, or that cannot be asked, without making it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as e:
        return e.errno != errno.ELOOP  # a link is no lock of ours
    return False


@contextmanager
def exclusive(path: str, timeout_s: float = LIMIT_S) -> Iterator[IO[str]]:
    """Hold the lock `path` and yield its open file; raise ToolTimeout after `timeout_s` seconds of waiting."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    deadline = time.monotonic() + timeout_s
    pause = 0.002
    while True:
        file = attempt(path)
        if file:
            break
        if time.monotonic() > deadline:
            raise ToolTimeout(f"lock {path} is held by another action for over {timeout_s:.0f} s")
        time.sleep(pause)
        pause = min(pause * 2, 0.1)
        progress.touch()
    try:
        yield file
    finally:
        file.close()
