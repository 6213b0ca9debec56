# SPDX-License-Identifier: Apache-2.0
"""A VM with a disk of each kind, and its backups."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from lab import domains
from lab.cloud import Cloud
from lab.guest import content
from lab.oned.template import vectors

from .kept import Kept, Model

MIB = 8
DATA = content("base", 0, 1024)
DISKS: Dict[str, Tuple[str, bool, Dict[str, Any]]] = {
    "overlay": ("raw", False, {}),
    "overlay over qcow2": ("qcow2", False, {}),
    "copy": ("qcow2", False, {"SEMISHARED_LOCAL": "copy"}),
    "raw copy": ("raw", False, {"SEMISHARED_LOCAL": "copy"}),
    "remote-first": ("raw", False, {"SEMISHARED_LOCAL": "remote-first"}),
    "store clone": ("raw", False, {"SEMISHARED_PLACE": "shared"}),
    "in place": ("qcow2", True, {}),
    "raw in place": ("raw", True, {}),
    "diff": ("raw", True, {"SEMISHARED_PLACE": "local"}),
}
"""Format of the image, persistent, its attributes."""
RAW = ("raw copy", "raw in place", "raw volatile")
KINDS = [*DISKS, "volatile", "raw volatile"]


class Rig:
    """A VM with a disk of each kind, and its backups."""

    def __init__(self, cloud: Cloud, where: Path, name: str, kinds: Tuple[str, ...] = tuple(KINDS)) -> None:
        self.cloud = cloud
        os_image = cloud.os_image(f"{name}-os")
        images = {
            kind: cloud.data_image(
                f"{name}-{number}",
                DATA,
                MIB,
                persistent=DISKS[kind][1],
                format=DISKS[kind][0],
                **DISKS[kind][2],
            )
            for number, kind in enumerate(kinds)
            if kind in DISKS
        }
        disks = [{"IMAGE_ID": str(os_image)}]
        for kind in kinds:
            format = "raw" if kind in RAW else "qcow2"
            disks.append(
                {"IMAGE_ID": str(images[kind])}
                if kind in images
                else {"TYPE": "fs", "SIZE": str(MIB), "FORMAT": format}
            )
        self.images = [os_image, *images.values()]
        self.vm = cloud.deploy(name, disks, context=False)
        self.targets = {kind: f"vd{'bcdefghijklmno'[number]}" for number, kind in enumerate(kinds)}
        self.numbers = {kind: number + 1 for number, kind in enumerate(kinds)}
        self.model = Model(
            cloud,
            self.vm,
            {
                self.targets[kind]: (self.numbers[kind], MIB, DATA if kind in images else b"")
                for kind in kinds
            },
        )
        self.kept = Kept(self.model, where)

    @property
    def other(self) -> str:
        """Return the host on which the VM is not."""
        return "h2" if self.cloud.oned.vm(self.vm).last.host.name == "h1" else "h1"

    def deploy(self) -> None:
        """Start the VM, which is on no host, on another one."""
        self.cloud.oned.vm_deploy(self.vm, self.other, self.cloud.oned.vm(self.vm).last.ds_id)

    def grow(self) -> None:
        for kind in KINDS:
            disk = self.cloud.oned.vm(self.vm).disk(self.numbers[kind])
            assert disk
            size = int(disk["SIZE"]) + 1
            self.cloud.oned.disk_resize(self.vm, self.numbers[kind], size)
            self.model.grow(self.targets[kind], size)

    def guest_is_killed(self) -> None:
        record = self.cloud.oned.vm(self.vm)
        node = self.cloud.lab.node(record.last.host.name)
        pid = node.path(f"/run/libvirt/qemu/one-{self.vm}.pid").read_text().strip()
        node.run(["kill", "-KILL", pid], user="root")
        deadline = time.monotonic() + 60
        while f"one-{self.vm}" in domains.names(node):
            assert time.monotonic() < deadline, "libvirt does not see that its QEMU is gone"
            time.sleep(0.1)

    def snapshots(self, kind: str) -> List[int]:
        rows = self.cloud.oned.vm(self.vm).snapshots.get(self.numbers[kind], {})
        return [int(row["ID"]) for row in vectors(rows, "SNAPSHOT")]

    def delete_snapshots(self) -> None:
        for kind in KINDS:
            for snapshot in self.snapshots(kind):
                self.cloud.oned.disk_snapshot_delete(self.vm, self.numbers[kind], snapshot)

    def close(self) -> None:
        self.cloud.terminate(self.vm)
        for image in self.images:
            self.cloud.oned.image_delete(image)
