# SPDX-License-Identifier: Apache-2.0
"""What the host's monitoring probe asks: the disk sizes of every VM of a system datastore (docs/explanation/contract.md).

Sizes are what is allocated on this host, in MiB. Nothing is opened and no link is followed out of a VM directory, so
that neither a dangling link nor a hung shared mount stops the probe.
"""

from __future__ import annotations

import base64
import os
import re

from ..tools.files import allocated
from ..units import mib_ceil

DISK = re.compile(r"disk\.([0-9]+)\Z")
SNAPSHOTS = re.compile(r"disk\.([0-9]+)\.snap\Z")


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _active(path: str) -> str:
    """Return the active layer of the disk `path`, '' if it has none."""
    try:
        folder, _, layer = os.readlink(path).rpartition("/")
    except OSError:
        return ""
    return layer if folder == f"{os.path.basename(path)}.snap" and layer.isdigit() else ""


def _vm_lines(directory: str) -> list[str]:
    lines = []
    for name in _names(directory):
        disk, snapshots = DISK.match(name), SNAPSHOTS.match(name)
        if disk:
            layer = _active(f"{directory}/{name}")
            path = f"{directory}/{name}.snap/{layer}" if layer else f"{directory}/{name}"
            lines.append(f"DISK_SIZE = [ ID={disk.group(1)}, SIZE={mib_ceil(allocated(path))} ]")
        elif snapshots:
            active = _active(f"{directory}/{name[:-5]}")
            for snapshot in _names(f"{directory}/{name}"):
                if snapshot.isdigit() and snapshot != active:
                    size = mib_ceil(allocated(f"{directory}/{name}/{snapshot}"))
                    lines.append(f"SNAPSHOT_SIZE = [ ID={snapshot}, DISK_ID={snapshots.group(1)}, SIZE={size} ]")
    return lines


def report(directory: str) -> str:
    """Return the probe's answer for the system datastore `directory`."""
    answer = []
    for name in _names(directory):
        if name.isdigit():
            lines = _vm_lines(f"{directory}/{name}")
            if lines:
                text = base64.b64encode("\n".join(lines).encode()).decode()
                answer.append(f'VM = [ ID = {name}, MONITOR = "{text}" ]\n')
    return "".join(answer)
