# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is to act on the disks of a VM that may be running.

oned lets one such action at a time act on a VM. An older one may be at work all the same: its driver was killed, or its
host cut off, and its part here has not noticed yet. What it would still do (a file beside ours, a job that begins in
QEMU after we have looked) must not happen under our hands: whoever has the turn is alone, and so is every program that
the one before had started. So they hold the lock too (run.kept), and a holder that does not end by itself is ended.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import IO

from ..errors import Overtaken, ToolTimeout
from . import bases, locks, progress, run

GRACE_S = 2.0
"""How long the host side of a dead driver may take to notice: it sees the end of its stdin at once, if nobody is cut off."""
LIMIT_S = 60
_mine: dict[str, IO[str]] = {}


def lock_path(vm: int, vm_dir: str) -> str:
    """Return the lock file of a VM's turn."""
    return f"{bases.root_of(vm_dir)}/locks/vm-{vm}-disks"


def take(vm: int, vm_dir: str) -> None:
    """Have the turn from now to the end of this process, as the only one at work on the VM's disks."""
    path = lock_path(vm, vm_dir)
    if path in _mine:
        return
    file = _opened(path)
    _mine[path] = file
    run.kept.append(file.fileno())
    _write(file, {**_read(file), "pid": os.getpid(), "start": _started(os.getpid())})


def note_end(vm: int, vm_dir: str, planned: float) -> None:
    """Note that what was begun before `planned` is ended; the caller has the turn."""
    file = _mine[lock_path(vm, vm_dir)]
    _write(file, {**_read(file), "ended": planned})


def check_not_ended(vm: int, vm_dir: str, planned: float) -> None:
    """Raise Overtaken if what was planned at `planned` was ended before it could begin; the caller has the turn."""
    ended = _read(_mine[lock_path(vm, vm_dir)]).get("ended", 0.0)
    if isinstance(ended, float) and ended >= planned:
        raise Overtaken(f"what was to be done for VM {vm} on {os.uname().nodename} was ended before it began")


def _opened(path: str) -> IO[str]:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    began = time.monotonic()
    while True:
        file = locks.attempt(path)
        if file:
            return file
        waited = time.monotonic() - began
        if waited > LIMIT_S:
            raise ToolTimeout(f"lock {path} is held by another action for over {LIMIT_S} s")
        if waited > GRACE_S:
            _end_holder(path)
        time.sleep(0.02)
        progress.touch()


def _end_holder(path: str) -> None:
    """Kill the process group of the host side that holds the lock, if it is still the one that took it."""
    try:
        with open(path, encoding="utf-8") as file:
            noted = _read(file)
    except OSError:
        return
    pid, start = noted.get("pid"), noted.get("start")
    if isinstance(pid, int) and pid != os.getpid() and start and start == _started(pid) and os.getpgid(pid) == pid:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _started(pid: int) -> str:
    """Return when a process began, '' if there is none: no other process ever has both the id and the time."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _read(file: IO[str]) -> dict[str, object]:
    file.seek(0)
    try:
        data = json.loads(file.read(1000) or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _write(file: IO[str], data: dict[str, object]) -> None:
    file.seek(0)
    file.truncate()
    file.write(json.dumps(data))
    file.flush()
