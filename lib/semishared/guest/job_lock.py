# SPDX-License-Identifier: Apache-2.0
"""The turn: the lock by which one action at a time works on the disks of a VM that may be running.

oned starts one such action at a time per VM. An older one may still be at work: its driver was killed, or its
host cut off, and its host side has not noticed yet. It must not write a file, or begin a job in QEMU, beside
the new action. So the holder of the turn is alone, and so are the programs that it starts: they hold the
lock, too (run.kept). A holder that does not end by itself is killed.
"""

from __future__ import annotations

import os
import signal
import time
from typing import IO, Callable, Mapping

from ..errors import Overtaken, ToolTimeout, VmBusy
from ..model.disk import names as disk_names
from ..tools import locks, owner, progress, run

GRACE_S = 2.0
"""Seconds that the host side of a dead driver has to end: unless it is cut off, its stdin ends at once."""
LIMIT_S = 60
action = ""
"""The action of this process, for the error of another process that finds the turn taken."""
_mine: dict[str, IO[str]] = {}


def lock_path(vm: int, vm_dir: str) -> str:
    """Return the lock file of a VM's turn."""
    return disk_names.disks_lock(disk_names.base_store_of(vm_dir), vm)


def take(vm: int, vm_dir: str) -> None:
    """Take the turn until this process ends; kill another holder after GRACE_S seconds."""
    path = lock_path(vm, vm_dir)
    if path not in _mine:
        _keep(path, _opened(path, _end_holder))


def take_unless_busy(vm: int, vm_dir: str) -> None:
    """Take the turn as `take` does, but kill no holder: raise VmBusy, which names it."""

    def refuse(path: str) -> None:
        raise VmBusy(f"{_holder(path)} is at work on the disks of VM {vm} on {os.uname().nodename}")

    path = lock_path(vm, vm_dir)
    if path not in _mine:
        _keep(path, _opened(path, refuse))


def take_if_free(vm: int, vm_dir: str) -> bool:
    """Take the turn until `leave`; return False if another action has it. No holder is killed."""
    path = lock_path(vm, vm_dir)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = locks.attempt(path)
    if file:
        _keep(path, file)
    return file is not None


def leave(vm: int, vm_dir: str) -> None:
    """Free the turn that this process has."""
    file = _mine.pop(lock_path(vm, vm_dir))
    run.kept.remove(file.fileno())
    file.close()


def _keep(path: str, file: IO[str]) -> None:
    _mine[path] = file
    run.kept.append(file.fileno())
    own = {"pid": os.getpid(), "start": owner.started(os.getpid()), "action": action}
    locks.note(file, {**locks.noted(file), **own})


def note_end(vm: int, vm_dir: str) -> None:
    """Note that plans which arrived until now are ended; the caller has the turn."""
    file = _mine[lock_path(vm, vm_dir)]
    noted = locks.noted(file)
    locks.note(file, {**noted, "ended": _ended(noted) + 1})


def check_not_ended(vm: int, vm_dir: str, known: Mapping[str, dict[str, object]]) -> None:
    """Raise Overtaken if another action has ended this plan since it arrived, with lock files as `known`.

    The caller has the turn.
    """
    path = lock_path(vm, vm_dir)
    if _ended(locks.noted(_mine[path])) != _ended(known.get(path, {})):
        raise Overtaken(f"what was to be done for VM {vm} on {os.uname().nodename} was ended before it began")


def _ended(noted: dict[str, object]) -> int:
    """Return how often plans were ended; 0.1.0 noted a time there."""
    count = noted.get("ended")
    return count if isinstance(count, int) else 0


def _opened(path: str, if_held: Callable[[str], None]) -> IO[str]:
    """Return the held lock file; while another process holds it, call `if_held` repeatedly with its path."""
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
            if_held(path)
        time.sleep(0.02)
        progress.touch()


def _noted(path: str) -> dict[str, object]:
    try:
        with open(path, encoding="utf-8") as file:
            return locks.noted(file)
    except OSError:
        return {}


def _holder(path: str) -> str:
    """Return the holder of the lock, for a message."""
    noted = _noted(path)
    pid, said = noted.get("pid"), noted.get("action")
    word = (
        said
        if isinstance(said, str) and said.replace("_", "").isalnum() and said.isascii()
        else "another action"
    )
    return f"{word} (process {pid})" if isinstance(pid, int) else word


def _end_holder(path: str) -> None:
    """Kill the process group of the lock's holder, if the noted process still is that one."""
    noted = _noted(path)
    pid, start = noted.get("pid"), noted.get("start")
    if (
        isinstance(pid, int)
        and pid != os.getpid()
        and start
        and start == owner.started(pid)
        and os.getpgid(pid) == pid
    ):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
