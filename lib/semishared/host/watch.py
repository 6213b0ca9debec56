# SPDX-License-Identifier: Apache-2.0
"""Watch overcommitted memory: `semishared-ram watch` starts this as the drivers' user.

    host/watch.py LOCATION RATE           until the memory is gone; 0 at once if another one runs on this host
    host/watch.py LOCATION RATE round     once: 0 if something was done, 1 if nothing was due or possible, 2
                                          after a failure

LOCATION: DATASTORE_LOCATION of OpenNebula; RATE: bytes per second at which disks are copied, 0 for no limit.

When memory is about to be full, the watcher moves a disk to another device under its guest
(disk/device_move.py), the disk that will take most of it. It resumes guests that full memory has paused when
there is room again (guest/domain.py), and no other guest.

Each round is a process of its own, with the drivers as installed then. It acts as any other action: it takes
the turn, from which an action of oned ends it (guest/job_lock.py), and notes what it begins, so that the next
round can resume. So the watcher may be killed anywhere, and libvirtd may be away.
"""

import os
import signal
import sys
import time
from typing import IO

if __package__ in (None, ""):
    sys.path[0:0] = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]

from semishared.device import devices, ledger, memory, offline, systems
from semishared.disk import device_move, records, recovery
from semishared.errors import SemisharedError
from semishared.guest import active_layer, domain, go_over, job_lock
from semishared.model.device import names as device_names
from semishared.model.device.classes import MEMORY
from semishared.model.device.steps import HeldItem, ListHeld, MoveLayers
from semishared.model.disk import names as disk_names
from semishared.model.steps import DiskRef
from semishared.tools import jobs, locks, progress, run
from semishared.tools.ending import ended, ended_within
from semishared.units import human

LOOK_S = 1.0
"""Seconds between two looks at whether memory is about to be full."""
IDLE_S = 10.0
"""Seconds between rounds without need, for guests that wait, and after a round that could do nothing."""
GROWTH_S = 0.5
"""Seconds over which the growth of disks is measured."""
LONG_S = 60.0
"""Seconds after which a round is copying a disk; its progress then counts as a sign of life."""


class Round:
    """One round over all memory of a host; `rate` in bytes per second, 0 for no limit."""

    def __init__(self, root: str, rate: int) -> None:
        self._root, self._rate = root, rate

    def carry_out(self) -> bool:
        """Move and resume what is due; return True if anything was."""
        offline.look(self._root)
        moved = False
        for device in memory.memory(self._root):
            if memory.is_due(device):
                moved = self._spill(device.uuid) or moved
            elif device.is_overcommitted:
                ledger.keep_spare(device_names.device(self._root, device.uuid))
        # With full memory a killed round is resumed: to undo it would take room there.
        return (
            any([self._settled(vm, directory, undo=not moved) for vm, directory in self._in_memory()])
            or moved
        )

    def _spill(self, uuid: str) -> bool:
        """Move one disk off a device; return False if none could be."""
        before = {item.name: item.bytes for item in self._held(uuid)}
        time.sleep(GROWTH_S)
        held = {item.name: item for item in self._held(uuid)}
        growth = {
            name: (item.bytes - before[name]) / GROWTH_S for name, item in held.items() if name in before
        }
        moves = memory.leaving(self._root, uuid, held.values(), growth)
        for move in sorted(moves, key=lambda move: not go_over.moves(held[move.item.name].vm_dir)):
            item = held[move.item.name]
            disk = DiskRef(item.vm, item.disk, item.vm_dir)
            if domain.state(_name(disk.vm)) not in ("running", "paused"):
                continue
            step = MoveLayers(disk, _name(disk.vm), move.item.name, move.target, self._rate)
            with jobs.noted("watch", "move", vm=disk.vm, disk=disk.disk, asked_by="the watcher of memory"):
                answer = device_move.spill(step, lambda **_: None)
            said = f"failed: {answer.error}" if answer.error else f"moved in {answer.seconds} s"
            where = devices.mount(self._root, move.target)
            print(
                f"VM {disk.vm} disk {disk.disk}, {human(move.item.size)} -> {where}: {said}",
                file=sys.stderr,
                flush=True,
            )
            if not answer.error:
                return True
        return False

    def _held(self, uuid: str) -> list[HeldItem]:
        """Return the layers on a device, of VM directories proper (not kept or set aside)."""
        found = [item for item in device_move.held(ListHeld(self._root)) if item.device == uuid]
        return [item for item in found if disk_names.is_number(os.path.basename(item.vm_dir))]

    def _in_memory(self) -> list[tuple[int, str]]:
        """Return the VMs with disks whose records name memory, with their directories."""
        location, found = os.path.dirname(self._root), []
        for system in systems.systems(location):
            for name in filter(disk_names.is_number, os.listdir(f"{location}/{system}")):
                directory = f"{location}/{system}/{name}"
                try:
                    if any(MEMORY in record.classes for record in records.records(directory)):
                        found.append((int(name), directory))
                except (SemisharedError, OSError):
                    continue  # the next action on its disks reports it
        return found

    def _settled(self, vm: int, directory: str, undo: bool) -> bool:
        """End a killed round in a VM (with `undo`); resume its guest if possible, and return True then."""
        name = _name(vm)
        try:
            is_left = undo and go_over.moves(directory)
            if not (
                is_left or self._may_go_on(directory, name) or _runs_on(directory, name)
            ) or not job_lock.take_if_free(vm, directory):
                return False
            try:
                if is_left:
                    recovery.recover(directory, name)
                # An unfinished action has the guest rest, or is about to.
                if recovery.left(directory):
                    return False
                goes_on = self._may_go_on(directory, name)
                if goes_on:
                    domain.resume_after_error(name)
                for disk in _left(directory) if goes_on or _runs_on(directory, name) else ():
                    device_move.forget_left(directory, disk)
                if not goes_on:
                    return False
            finally:
                job_lock.leave(vm, directory)
        except (SemisharedError, OSError) as e:
            print(f"VM {vm}: {e}", file=sys.stderr, flush=True)
            return False
        print(f"VM {vm} goes on", file=sys.stderr, flush=True)
        return True

    def _may_go_on(self, directory: str, name: str) -> bool:
        failed = domain.failed_disks(name) if domain.state(name) == "paused" else {}
        opened = (
            {target: path for path, target in active_layer.opened(directory, name).items()} if failed else {}
        )
        if not failed or set(failed) - set(opened):
            return False
        own = {
            os.path.realpath(disk_names.disk(directory, record.disk)): record
            for record in records.records(directory)
        }
        waits = []
        for target, is_full in failed.items():
            record = own.get(opened[target])
            wait = memory.wait(self._root, opened[target], record.classes if record else (), is_full)
            # QEMU repeats a write that zram refused, on the disk's present device.
            has_left = record is not None and device_move.has_left(directory, record.disk)
            waits.append(wait._replace(was_in_memory=wait.was_in_memory or has_left))
        return memory.may_go_on(waits)


def _left(directory: str) -> list[int]:
    """Return the disks of a VM that are noted as having left memory."""
    return [
        record.disk
        for record in records.records(directory)
        if os.path.exists(device_names.left_note(directory, record.disk))
    ]


def _runs_on(directory: str, name: str) -> bool:
    """Return True if a VM with such disks runs: its guest does not wait any more."""
    return bool(_left(directory)) and domain.state(name) == "running"


def _name(vm: int) -> str:
    """Return OpenNebula's name for a VM's domain."""
    return f"one-{vm}"


def watch(root: str, rate: int) -> int:
    """Watch memory until there is none any more; wait for it at first."""
    os.makedirs(disk_names.locks(root), exist_ok=True)
    lock = locks.unless_busy(device_names.watch_lock(root))
    if lock is None:
        return 0
    tried, code, was_there = -IDLE_S, 0, False
    while True:
        if code in (0, 1):
            memory.note_watch(lock)
        try:
            found = memory.memory(root)
        except OSError:
            found = []  # the memory is being unmounted
        if was_there and not found:
            return 0
        was_there, is_due = bool(found), any(map(memory.is_due, found))
        if found and time.monotonic() - tried >= (0 if is_due and code == 0 else IDLE_S):
            code = _beside(root, rate, lock)
            tried = time.monotonic()
        time.sleep(LOOK_S)


def _beside(root: str, rate: int, lock: IO[str]) -> int:
    """Run a round as a process and return its exit code; it holds the lock, too, and so outlives the watcher.

    It may take as long as it makes progress, as a disk may be large; one that stands still is killed. No
    other round starts before it has gone.
    """
    argv = [sys.executable, "-IS", os.path.abspath(__file__), os.path.dirname(root), str(rate), "round"]
    # A session of its own: an action that kills the round (guest/job_lock.py) must not kill the watcher.
    process = run.apart(argv, lock.fileno())
    began, limit_s = time.monotonic(), progress.limit_s
    with progress.watched(process.pid) as work:
        while True:
            code = ended_within(process, LOOK_S)
            if code is not None:
                return code
            idle_s = work.idle_s()
            if idle_s > limit_s:
                print(
                    f"a round has done nothing for {idle_s:.0f} s, and is ended", file=sys.stderr, flush=True
                )
                os.killpg(process.pid, signal.SIGKILL)
                limit_s += progress.limit_s
            elif idle_s < LONG_S < time.monotonic() - began:
                memory.note_watch(lock)


def once(root: str, rate: int) -> int:
    """Make one round; return the exit code."""
    job_lock.action = "watch"
    try:
        return int(not Round(root, rate).carry_out())
    except (SemisharedError, OSError) as e:
        print(e.line() if isinstance(e, SemisharedError) else e, file=sys.stderr, flush=True)
        return 2


def main(argv: list[str]) -> int:
    """Make one round, or watch."""
    root, rate = disk_names.base_store(os.path.normpath(argv[0])), int(argv[1])
    os.umask(0o027)
    return once(root, rate) if argv[2:] == ["round"] else watch(root, rate)


if __name__ == "__main__":
    sys.exit(ended(main(sys.argv[1:])))
