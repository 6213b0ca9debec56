# SPDX-License-Identifier: Apache-2.0
"""What disks there are on a machine, from the records beside them, for `semishared status`."""

from __future__ import annotations

import os

from ..errors import SemisharedError
from ..model.steps_base import ReportDisks
from ..tools import layers, progress
from ..tools.files import allocated
from . import vm_dir


def report(step: ReportDisks) -> dict[str, object]:
    """Return every VM directory of the system datastores with the records of its disks and what they occupy here."""
    found = []
    for system in step.systems:
        directory = f"{step.location}/{system}"
        for name in _names(directory):
            if not name.isdigit() or not name.isascii():
                continue
            progress.touch()
            path = f"{directory}/{name}"
            try:
                disks = [_disk(path, record) for record in vm_dir.records(path)]
                found.append({"vm": int(name), "system": system, "disks": disks, "error": ""})
            except SemisharedError as e:
                found.append({"vm": int(name), "system": system, "disks": [], "error": e.detail})
    return {"vms": found}


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _disk(vm_path: str, record: dict[str, object]) -> dict[str, object]:
    disk, how = record["disk"], str(record["how"])
    size, snapshots = 0, 0
    if record["place"] == "local":
        folder = f"{vm_path}/disk.{disk}.snap"
        numbers = layers.numbered(folder) if os.path.isdir(folder) else []
        files = [f"{folder}/{number}" for number in numbers] or [f"{vm_path}/disk.{disk}"]
        size, snapshots = sum(map(allocated, files)), max(len(numbers) - 1, 0)
    image, network = record.get("image"), record.get("network")
    path = network["name"] if isinstance(network, dict) else record["path"]
    return {
        "disk": disk, "how": how, "place": record["place"], "format": record["format"], "path": path, "bytes": size,
        "snapshots": snapshots, "image": image if isinstance(image, dict) else None,
    }  # fmt: skip
