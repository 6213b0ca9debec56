# SPDX-License-Identifier: Apache-2.0
"""Which came first, a deletion or a step that would publish into the VM: told by counters, by no clock.

oned may give up a clone and delete the same VM while the clone's script still runs: OpenNebula's
ActionManager.rb kills the waiting thread, not the script. The VM's lock file on the host counts the deletions
of the VM and of each disk. A plan notes the counters when it arrives; its results are published only while
they are unchanged. Each deletion also notes oned's own counter, the SEQ of the VM's last history record: a
plan of an older SEQ is late, whenever it arrives.

    locks/vm-N          {"epochs": {"": 3, "1": 1}, "seqs": {"": 7}, "move": "9f..."}
                        '' is the whole VM, else a disk
                         "at": "BOOT 81.5"      time of the last count, in seconds of that boot: setting the
                                                clock does not change it
                         "made": {"1": 4}       sum of both counts when the disk was last made, if there had
                                                been a deletion
    locks/vm-N-disks    {"ended": 4, ...}      what guest/job_lock.py has ended

Lock files of 0.1.0 hold times, which are dropped.
"""

from __future__ import annotations

import os
import time
from typing import IO, Any, Iterable

from ..errors import LateAction, VmGone
from ..model.disk import names as disk_names
from ..named import NamedTuple
from ..tools import locks, owner
from .history import UNKNOWN

ALL = ""
"""Key of a whole VM; a disk's key is its id."""
Noted = dict[str, Any]


class Planned(NamedTuple):
    """The counters of this machine when a plan arrived."""

    seq: int = UNKNOWN
    """SEQ of the VM's last history record when the front-end planned."""
    known: dict[str, Noted] = {}
    """Content of each lock file, by path."""

    def counted(self, path: str, name: str, key: str) -> int:
        """Return a counter at that time."""
        return _number(self.known.get(path, {}), name, key)


def _number(noted: Noted, name: str, key: str, default: int = 0) -> int:
    numbers = noted.get(name)
    found = numbers.get(key) if isinstance(numbers, dict) else None
    return found if isinstance(found, int) else default


def _read(path: str) -> Noted:
    try:
        with open(path, encoding="utf-8") as file:
            return locks.noted(file)
    except OSError:
        return {}


def places(steps: Iterable[object]) -> set[tuple[int, str]]:
    """Return (VM, directory) of all disks and VMs that `steps` name."""
    found = set()
    for step in steps:
        disk = getattr(step, "disk", step)
        vm, directory = getattr(disk, "vm", None), getattr(disk, "vm_dir", None)
        if directory is None and isinstance(vm, int) and hasattr(step, "path"):
            directory = os.path.dirname(step.path)
        if isinstance(vm, int) and isinstance(directory, str):
            found.add((vm, directory))
    return found


def arrived(seq: int, steps: Iterable[object], known: dict[str, Noted]) -> Planned:
    """Return a plan's Planned; `known` holds the counters read for earlier plans of the same session."""
    for vm, directory in places(steps):
        root = disk_names.base_store_of(directory)
        for name in (disk_names.vm_lock(root, vm), disk_names.disks_lock(root, vm)):
            if name not in known:
                known[name] = _read(name)
    return Planned(seq, known)


def lock_path(vm: int, vm_dir: str) -> str:
    """Return the lock file of a VM, from its directory."""
    return disk_names.vm_lock(disk_names.base_store_of(vm_dir), vm)


def note_deletion(file: IO[str], path: str, key: str, planned: Planned) -> None:
    """Count a deletion in the VM's lock file: plans that arrived before it publish nothing more."""
    noted = locks.noted(file)
    epochs, seqs = (
        {k: _number(noted, name, k) for k in noted.get(name) or {}} for name in ("epochs", "seqs")
    )
    # It starts at a random number: a lock file that is removed and made again repeats no count.
    epochs[key] = (epochs.get(key) or int.from_bytes(os.urandom(4), "big")) + 1
    if planned.seq >= 0:
        seqs[key] = max(seqs.get(key, 0), planned.seq)
    locks.note(file, {**_counters(noted), "epochs": epochs, "seqs": seqs, "at": _now()})
    # The plan that deletes may still publish.
    planned.known.setdefault(path, {}).setdefault("epochs", {})[key] = epochs[key]


def _now() -> str:
    return f"{owner.boot()} {time.clock_gettime(time.CLOCK_BOOTTIME):.1f}"


def is_recent(path: str, keep_s: float) -> bool:
    """Return True if the lock file counted something in the last `keep_s` seconds, at any clock setting."""
    boot, _, at = str(_read(path).get("at", "")).partition(" ")
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    try:
        # Counts of an earlier boot are older than this boot.
        return boot != "" and now - (float(at) if boot == owner.boot() else 0.0) < keep_s
    except ValueError:
        return False


def _counters(noted: Noted) -> Noted:
    """Return the present entries of a lock file, without those of 0.1.0."""
    return {
        name: noted[name] for name in ("epochs", "seqs", "move", "made", "generation", "at") if name in noted
    }


def _count(noted: Noted, disk: str) -> int:
    return _number(noted, "epochs", ALL) + _number(noted, "epochs", disk)


def note_made(file: IO[str], disk: str) -> None:
    """Note the deletions before a disk was made: a removal planned before them is not for this disk."""
    noted = locks.noted(file)
    made = {key: _number(noted, "made", key) for key in noted.get("made") or {}}
    if _count(noted, disk) != made.get(disk, 0):
        locks.note(file, {**_counters(noted), "made": {**made, disk: _count(noted, disk)}})


def check_removal(file: IO[str], path: str, vm: int, disk: str, planned: Planned) -> None:
    """Raise LateAction if a disk was deleted and made anew since its removal was planned."""
    noted = locks.noted(file)
    made = _number(noted, "made", disk)
    if made and made == _count(noted, disk) != planned.counted(path, "epochs", ALL) + planned.counted(
        path, "epochs", disk
    ):
        here = os.uname().nodename
        raise LateAction(
            f"disk {disk} of VM {vm} was removed on {here} since this was planned, and made anew: "
            f"it is left as it is"
        )


def check(file: IO[str], path: str, vm: int, keys: Iterable[str], planned: Planned) -> None:
    """Raise VmGone if one of `keys` was deleted since the plan arrived, LateAction if at a later SEQ."""
    noted = locks.noted(file)
    here = os.uname().nodename
    for key in keys:
        # 0: no deletion, or an old lock file was removed.
        if _number(noted, "epochs", key) not in (0, planned.counted(path, "epochs", key)):
            raise VmGone(f"VM {vm} was deleted on {here} while its disk was being made")
        seq = _number(noted, "seqs", key, UNKNOWN)
        if 0 <= planned.seq < seq:
            raise LateAction(
                f"VM {vm} was deleted on {here} at SEQ {seq} of its history, and this is of SEQ "
                f"{planned.seq} ({path})"
            )


def begin_move(file: IO[str]) -> str:
    """Note that another move of the VM to this machine begins; return its random name."""
    move = os.urandom(8).hex()
    locks.note(file, {**_counters(locks.noted(file)), "move": move, "at": _now()})
    return move


def is_latest_move(file: IO[str], move: str) -> bool:
    """Return True if no later move of the VM has begun, or its lock file was removed as old."""
    return bool(locks.noted(file).get("move", move) == move)
