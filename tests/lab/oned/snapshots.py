# SPDX-License-Identifier: Apache-2.0
"""Snapshots of single disks."""

from __future__ import annotations

from .drivers import ActionFailed, Refused
from .images import ImageOps, activate, revise_snapshots
from .life import LifeOps
from .objects import Vm, now
from .states import Act, Lcm
from .states import Vm as State
from .template import Vector, scalar, vectors
from .transfer import is_volatile


class SnapshotOps(LifeOps, ImageOps):
    """Create, revert and delete disk snapshots."""

    def disk_snapshot_create(self, vm_id: int, disk_id: int, name: str) -> int:
        """Snapshot a disk; return the snapshot id."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE, State.POWEROFF, State.SUSPENDED)
            disk = self._disk(vm, disk_id)
            if is_volatile(disk):
                raise Refused(f"Cannot make snapshots on disks of type: {disk['TYPE']}")
            running, suspended = vm.state == State.ACTIVE, vm.state == State.SUSPENDED
            with self.data:
                number = self._add_snapshot(vm, disk, name)
            words = self._lines(vm).disk_action("SNAP_CREATE", disk, str(number))
            lcm = Lcm.SNAPSHOT_SUSPENDED if suspended else Lcm.SNAPSHOT_POWEROFF
            try:
                with self._snapshot_step(
                    vm, disk, number, Act.SNAPSHOT_CREATE, Lcm.SNAPSHOT if running else lcm
                ):
                    if running:
                        self._snapshot_live(vm, disk, words)
                    else:
                        self._transfer(vm, "disk_snapshot", [words])
            except ActionFailed:
                with self.data:
                    revise_snapshots(vm.snapshots[disk_id], "snap_delete", number)
                    self._total(vm, disk)
                raise
            with self.data:
                activate(vectors(vm.snapshots[disk_id], "SNAPSHOT"), number)
                self._note_snapshots(vm, disk)
            return number

    def disk_snapshot_revert(self, vm_id: int, disk_id: int, number: int) -> None:
        """Go back to a snapshot of a powered-off VM's disk."""
        self._snapshot_change(vm_id, disk_id, number, "revert")

    def disk_snapshot_delete(self, vm_id: int, disk_id: int, number: int) -> None:
        """Delete a snapshot; a running VM too is served by the transfer driver."""
        self._snapshot_change(vm_id, disk_id, number, "delete")

    # -- parts ----------------------------------------------------------------------------------

    def _disk(self, vm: Vm, disk_id: int) -> Vector:
        disk = vm.disk(disk_id)
        if disk is None:
            raise Refused(f"VM {vm.id} has no disk {disk_id}")
        return disk

    def _add_snapshot(self, vm: Vm, disk: Vector, name: str) -> int:
        rows = vm.snapshots.setdefault(
            int(disk["DISK_ID"]),
            {"ALLOW_ORPHANS": disk.get("ALLOW_ORPHANS", "NO"), "CURRENT_BASE": "-1", "NEXT_SNAPSHOT": "0"},
        )
        number = int(scalar(rows, "NEXT_SNAPSHOT"))
        row = {"DATE": str(now()), "ID": str(number), "NAME": name, "PARENT": "-1", "SIZE": disk["SIZE"]}
        rows["SNAPSHOT"] = [*vectors(rows, "SNAPSHOT"), row]
        rows["NEXT_SNAPSHOT"] = str(number + 1)
        self._total(vm, disk)
        return number

    def _note_snapshots(self, vm: Vm, disk: Vector) -> None:
        image = self._persistent_image(disk)
        if image is not None:
            image.snapshots = dict(vm.snapshots[int(disk["DISK_ID"])])

    @staticmethod
    def _total(vm: Vm, disk: Vector) -> None:
        rows = vectors(vm.snapshots.get(int(disk["DISK_ID"]), {}), "SNAPSHOT")
        disk["DISK_SNAPSHOT_TOTAL_SIZE"] = str(sum(int(row["SIZE"]) for row in rows))

    def _snapshot_step(self, vm: Vm, disk: Vector, number: int, action: int, lcm: int) -> _Marked:
        return _Marked(self, vm, disk, number, action, lcm)

    def _snapshot_live(self, vm: Vm, disk: Vector, line: str) -> None:
        verb, rest = line.split(" ", 1)
        live = verb.replace(".", "_LIVE.", 1) if "." in verb else f"{verb}_LIVE"
        try:
            if f"{vm.last.host.vm_mad}-{disk['TM_MAD']}" not in self.settings.live_disk_snapshots:
                raise ActionFailed("Cannot perform a live DISKSNAPSHOTCREATE operation")
            self.drivers.tm(f"{live} {rest}".split(), any_driver=True)
        except ActionFailed as failure:
            self._fail(vm, "DISKSNAPSHOTCREATE", failure)
            raise

    def _snapshot_change(self, vm_id: int, disk_id: int, number: int, what: str) -> None:
        with self._operate(vm_id) as vm:
            allowed = (
                (State.POWEROFF,) if what == "revert" else (State.ACTIVE, State.POWEROFF, State.SUSPENDED)
            )
            self._need(vm, *allowed)
            disk = self._disk(vm, disk_id)
            rows = vm.snapshots.get(disk_id, {})
            if str(number) not in [row["ID"] for row in vectors(rows, "SNAPSHOT")]:
                raise Refused(f"Disk {disk_id} has no snapshot {number}")
            if what == "revert":
                lcm, action = Lcm.SNAPSHOT_REVERT_POWEROFF, Act.SNAPSHOT_REVERT
            else:
                action = Act.SNAPSHOT_DELETE
                lcm = {
                    State.ACTIVE: Lcm.SNAPSHOT_DELETE,
                    State.SUSPENDED: Lcm.SNAPSHOT_DELETE_SUSPENDED,
                }.get(vm.state, Lcm.SNAPSHOT_DELETE_POWEROFF)
            with self._snapshot_step(vm, disk, number, action, lcm):
                line = self._lines(vm).disk_action(f"SNAP_{what.upper()}", disk, str(number))
                self._transfer(vm, "disk_snapshot", [line])
            with self.data:
                revise_snapshots(rows, f"snap_{what}", number)
                self._total(vm, disk)
                self._note_snapshots(vm, disk)


class _Marked:
    """Mark a disk and its VM for the time of one snapshot action."""

    def __init__(self, oned: SnapshotOps, vm: Vm, disk: Vector, number: int, action: int, lcm: int) -> None:
        self.oned, self.vm, self.disk = oned, vm, disk
        self.number, self.action, self.lcm = number, action, lcm
        self.back = (vm.lcm, vm.state)

    def __enter__(self) -> None:
        with self.oned.data:
            self.disk.update(DISK_SNAPSHOT_ACTIVE="YES", DISK_SNAPSHOT_ID=str(self.number))
            self.oned._close_history(self.vm, self.action)
            self.oned._enter(self.vm, self.lcm)

    def __exit__(self, *_: object) -> None:
        with self.oned.data:
            self.disk.pop("DISK_SNAPSHOT_ACTIVE", None)
            self.disk.pop("DISK_SNAPSHOT_ID", None)
            self.oned._enter(self.vm, *self.back)
