# SPDX-License-Identifier: Apache-2.0
"""Disk sizes of every VM of a system datastore, for the monitoring probe (docs/explanation/contract.md).

Sizes are allocated MiB on this host. The probe opens no file and follows no link out of a VM directory, so a
dangling link, a hung shared mount or a hung device of the pool does not stop it.
"""

from __future__ import annotations

import base64
import os

from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..tools.files import allocated
from ..units import mib_ceil


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _active(path: str) -> str:
    """Return the active layer of the disk `path`, '' if it has none."""
    try:
        target = os.readlink(path)
    except OSError:
        return ""
    layer = disk_names.layer_of(target)
    return layer if target == disk_names.layer(os.path.basename(path), layer) else ""


def _vm_lines(directory: str) -> list[str]:
    lines = []
    for name in _names(directory):
        disk, path = (
            disk_names.disk_named(disk_names.disk_of(name)),
            f"{directory}/{disk_names.disk_of(name)}",
        )
        if disk is None:
            continue
        active = _active(path)
        if not disk_names.are_layers(name):
            size = mib_ceil(allocated(disk_names.layer(path, active) if active else path))
            lines.append(f"DISK_SIZE = [ ID={disk}, SIZE={size} ]")
            continue
        for snapshot in _names(f"{directory}/{name}"):
            if disk_names.is_number(snapshot) and snapshot != active:
                size = mib_ceil(allocated(disk_names.layer(path, snapshot)))
                lines.append(f"SNAPSHOT_SIZE = [ ID={snapshot}, DISK_ID={disk}, SIZE={size} ]")
    return lines


def report(directory: str) -> str:
    """Return the probe's answer for the system datastore `directory`."""
    root, answer = disk_names.base_store(os.path.dirname(directory)), []
    if os.path.isdir(device_names.devices(root)):
        from ..device import offline

        offline.look(root)
    for name in _names(directory):
        if name.isdigit():
            lines = _vm_lines(f"{directory}/{name}")
            if lines:
                text = base64.b64encode("\n".join(lines).encode()).decode()
                answer.append(f'VM = [ ID = {name}, MONITOR = "{text}" ]\n')
    return "".join(answer)
