# SPDX-License-Identifier: Apache-2.0
"""The disks of a running guest as libvirt has them: for those of other drivers, of which there is no
record.
"""

from __future__ import annotations

import os
from typing import Dict, List
from xml.etree import ElementTree

from . import domain

HOPS = 8
"""Links that are followed from a disk's name to its file; more is a circle."""


def disks(vm_dir: str, name: str) -> Dict[str, Dict[str, object]]:
    """Return the `type` of each disk that a running guest has open, by its target; of a file also its path,
    and through which `directories` outside of the VM's it, and all that it lies over, is found: '' stands for
    the VM's, in which there is one.
    """
    found: Dict[str, Dict[str, object]] = {}
    for disk in ElementTree.fromstring(domain.dumpxml(name)).iterfind("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        if target is None or source is None:
            continue
        paths = [element.get("file", "") for element in disk.iter("source")]
        row: Dict[str, object] = {"type": disk.get("type", "")}
        if row["type"] == "file" and all(paths):
            row.update(
                path=source.get("file", ""),
                directories=sorted({place for path in paths for place in _places(path, vm_dir)}),
            )
        found[target.get("dev", "")] = row
    return found


def _places(path: str, vm_dir: str) -> List[str]:
    found: List[str] = []
    path = "/" + os.path.normpath(path).lstrip("/")
    for _ in range(HOPS):
        folder = os.path.dirname(path)
        is_inside = f"{folder}/".startswith(f"{vm_dir}/")
        if not os.path.islink(path):
            return [*found, "" if is_inside else folder]
        if not is_inside:
            found.append(folder)
        path = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return [""]
