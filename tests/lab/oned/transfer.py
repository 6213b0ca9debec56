# SPDX-License-Identifier: Apache-2.0
"""The lines of transfer files, as TransferManager writes them."""

from __future__ import annotations

from typing import List

from .objects import History, Vm
from .settings import Settings
from .template import Vector


def is_volatile(disk: Vector) -> bool:
    """Tell a volatile disk (fs, swap) from an image disk."""
    return disk.get("TYPE", "").lower() in ("fs", "swap")


def is_directory(disk: Vector) -> bool:
    """Tell a directory for the guest, for which oned writes no line but one
    (VirtualMachineDisk::is_filesystem).
    """
    return disk.get("TYPE", "") == "FILESYSTEM"


class Lines:
    """Write transfer lines for one VM."""

    def __init__(self, settings: Settings, vm: Vm) -> None:
        self.settings = settings
        self.vm = vm

    def directory(self, record: History) -> str:
        """Return the VM directory of a history record."""
        return f"{self.settings.location}/{record.ds_id}/{self.vm.id}"

    def place(self, record: History, disk_id: str, front_end: bool = False) -> str:
        """Return host:path of a disk."""
        host = self.settings.front_end if front_end else record.host.name
        return f"{host}:{self.directory(record)}/disk.{disk_id}"

    def prolog_disk(self, disk: Vector) -> str:
        """Bring one disk to its host; volatile disks never carry the suffix."""
        record = self.vm.last
        target = self.place(record, disk["DISK_ID"])
        tail = f"{target} {self.vm.id}"
        kind = disk.get("TYPE", "").lower()
        if kind == "swap":
            return f"MKSWAP {record.tm_mad} {disk['SIZE']} {tail} {record.ds_id}"
        if kind == "fs":
            return f"MKIMAGE {record.tm_mad} {disk['SIZE']} {disk['FORMAT']} {tail} {record.ds_id}"
        verb = "CLONE" if disk["CLONE"] == "YES" else "LN"
        source = disk["SOURCE"]
        if ":" not in source:
            source = f"{self.settings.front_end}:{source}"
        return f"{verb}{suffix(disk)} {disk['TM_MAD']} {source} {tail} {disk['DATASTORE_ID']}"

    def prolog(self) -> List[str]:
        """Bring every disk to the host."""
        return [self.prolog_disk(disk) for disk in self._made]

    def context(self) -> str:
        """Make the context ISO; empty without CONTEXT."""
        context = self.vm.template.get("CONTEXT")
        if not isinstance(context, dict):
            return ""
        record = self.vm.last
        script = f"{self.settings.vms}/{self.vm.id}/context.sh"
        return (
            f"CONTEXT {record.tm_mad} {script} {self.place(record, context['DISK_ID'])} {self.vm.id} "
            f"{record.ds_id}"
        )

    def move(self, old: History, new: History, leaving: bool = False, returning: bool = False) -> List[str]:
        """Move every disk, then the directory; a side may be the front-end (stop, resume)."""
        lines = []
        tail = ""
        # A resume moves a directory, which nobody has made, as if it were volatile (TransferManager.cc:729).
        for disk in self.vm.disks if returning else self._made:
            driver, store = self._owner(disk, new)
            # oned never clears the suffix between disks here: what one disk has, all later ones get.
            tail = suffix(disk) or tail
            source = self.place(old, disk["DISK_ID"], front_end=returning)
            target = self.place(new, disk["DISK_ID"], front_end=leaving)
            lines.append(f"MV{tail} {driver} {source} {target} {self.vm.id} {store}")
        here = self.settings.front_end if returning else old.host.name
        there = self.settings.front_end if leaving else new.host.name
        lines.append(
            f"MV {new.tm_mad} {here}:{self.directory(old)} {there}:{self.directory(new)} "
            f"{self.vm.id} {new.ds_id}"
        )
        return lines

    def epilog_disk(self, disk: Vector, front_end: bool = False, save: bool = True) -> str:
        """Take one disk off its host."""
        record = self.vm.last
        driver, store = self._owner(disk, record)
        place = self.place(record, disk["DISK_ID"], front_end)
        if save and disk.get("SAVE") == "YES":
            return f"MVDS{suffix(disk)} {driver} {place} {disk['SOURCE']} {self.vm.id} {store}"
        return f"DELETE{suffix(disk)} {driver} {place} {self.vm.id} {store}"

    def epilog(self, front_end: bool = False) -> List[str]:
        """Take every disk off the host, saving what is to be saved, then the directory."""
        record = self.vm.last
        lines = [self.epilog_disk(disk, front_end) for disk in self._made]
        host = self.settings.front_end if front_end else record.host.name
        return [*lines, f"DELETE {record.tm_mad} {host}:{self.directory(record)} {self.vm.id} {record.ds_id}"]

    def delete(self, record: History) -> List[str]:
        """Remove every disk and the directory, saving nothing."""
        lines = []
        tail = ""
        for disk in self._made:
            driver, store = self._owner(disk, record)
            tail = suffix(disk) or tail
            lines.append(f"DELETE{tail} {driver} {self.place(record, disk['DISK_ID'])} {self.vm.id} {store}")
        directory = f"{record.host.name}:{self.directory(record)}"
        return [*lines, f"DELETE {record.tm_mad} {directory} {self.vm.id} {record.ds_id}"]

    def disk_action(self, verb: str, disk: Vector, argument: str, front_end: bool = False) -> str:
        """Write a snapshot or resize line."""
        record = self.vm.last
        driver, store = self._owner(disk, record)
        place = self.place(record, disk["DISK_ID"], front_end)
        return f"{verb}{suffix(disk)} {driver} {place} {argument} {self.vm.id} {store}"

    def save_as(self, disk: Vector, source: str, snapshot: int, front_end: bool) -> str:
        """Write the line that copies a disk to a reserved image."""
        place = self.place(self.vm.last, disk["DISK_ID"], front_end)
        store = f"{self.vm.id} {disk['DATASTORE_ID']}"
        return f"CPDS{suffix(disk)} {disk['TM_MAD']} {place} {source} {snapshot} {store}"

    def migrate(self, old: History, new: History) -> str:
        """Write the tail of PREMIGRATE, POSTMIGRATE and FAILMIGRATE."""
        hosts = f"{old.host.name} {new.host.name}"
        return f"MIGRATE {new.tm_mad} {hosts} {self.directory(new)} {self.vm.id} {new.ds_id}"

    @property
    def _made(self) -> List[Vector]:
        return [disk for disk in self.vm.disks if not is_directory(disk)]

    @staticmethod
    def _owner(disk: Vector, record: History) -> List[str]:
        if is_volatile(disk) or is_directory(disk):
            return [record.tm_mad, str(record.ds_id)]
        return [disk["TM_MAD"], disk["DATASTORE_ID"]]


def suffix(disk: Vector) -> str:
    """Return the mixed-mode suffix of a disk's actions."""
    system = disk.get("TM_MAD_SYSTEM", "")
    return f".{system.lower()}" if system else ""
