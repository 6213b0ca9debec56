# SPDX-License-Identifier: Apache-2.0
"""Disk sizes of every VM of a system datastore, for the monitoring probe (docs/explanation/contract.md).

Sizes are allocated MiB, on this host or on a store. This process opens no file and follows no link out of a
VM directory, so a dangling link, a hung shared mount or a hung device of the pool does not stop it; of disks
on stores others are asked (store_sizes.py).
"""

from __future__ import annotations

import base64
import os
from typing import Mapping, Optional, Tuple

from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..tools.files import allocated
from ..units import mib_ceil


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _target(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _active(path: str) -> str:
    """Return the active layer of the disk `path`, '' if it has none."""
    target = _target(path)
    layer = disk_names.layer_of(target)
    return layer if target == disk_names.layer(os.path.basename(path), layer) else ""


def _disk_line(disk: int, size: int) -> str:
    return f"DISK_SIZE = [ ID={disk}, SIZE={mib_ceil(size)} ]"


def _snapshot_line(disk: int, snapshot: object, size: int) -> str:
    return f"SNAPSHOT_SIZE = [ ID={snapshot}, DISK_ID={disk}, SIZE={mib_ceil(size)} ]"


class _Vm:
    """What is known of the disks of one VM directory, and which of them others have to be asked of."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self.links: dict[int, str] = {}
        """Disks whose link leads to a store, by number."""
        self.networks: list[int] = []
        """Disks that have a record and no file here."""
        here = set()
        for name in _names(directory):
            disk = disk_names.disk_named(disk_names.disk_of(name))
            if disk is not None:
                here.add(disk)
                self._of_disk(disk, name)
        recorded = (disk_names.recorded(name) for name in _names(disk_names.records(directory)))
        self.networks = [disk for disk in recorded if disk is not None and disk not in here]

    def _of_disk(self, disk: int, name: str) -> None:
        path = f"{self.directory}/{disk_names.disk_of(name)}"
        active = _active(path)
        if not disk_names.are_layers(name):
            if not active and _target(path).startswith("/"):
                self.links[disk] = path
                return
            file = disk_names.layer(path, active) if active else path
            self.lines.append(_disk_line(disk, allocated(file)))
            return
        for snapshot in _names(f"{self.directory}/{name}"):
            if disk_names.is_number(snapshot) and snapshot != active:
                size = allocated(disk_names.layer(path, snapshot))
                self.lines.append(_snapshot_line(disk, snapshot, size))

    def add(self, disk: int, sizes: Optional[Tuple[int, Mapping[int, int]]]) -> None:
        """Add what a store says of a disk, None for nothing."""
        if sizes:
            size, snapshots = sizes
            self.lines.append(_disk_line(disk, size))
            self.lines += [_snapshot_line(disk, number, kept) for number, kept in snapshots.items()]


def report(directory: str) -> str:
    """Return the probe's answer for the system datastore `directory`."""
    root, answer = disk_names.base_store(os.path.dirname(directory)), []
    if os.path.isdir(device_names.devices(root)):
        from ..device import offline

        offline.look(root)
    vms = {name: _Vm(f"{directory}/{name}") for name in _names(directory) if name.isdigit()}
    if any(vm.links or vm.networks for vm in vms.values()):
        from . import store_sizes

        files = store_sizes.of_files(link for vm in vms.values() for link in vm.links.values())
        images = store_sizes.of_networks({vm.directory: vm.networks for vm in vms.values() if vm.networks})
        for vm in vms.values():
            for disk, link in vm.links.items():
                vm.add(disk, files.get(link))
            for disk in vm.networks:
                vm.add(disk, images.get((vm.directory, disk)))
    for name, vm in vms.items():
        if vm.lines:
            text = base64.b64encode("\n".join(vm.lines).encode()).decode()
            answer.append(f'VM = [ ID = {name}, MONITOR = "{text}" ]\n')
    return "".join(answer)
