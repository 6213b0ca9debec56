# SPDX-License-Identifier: Apache-2.0
"""A VM with disks on Ceph and on its host, and its backups."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence, Set

from lab.cloud import RBD_STORE, Cloud
from lab.guest import content

from .kept import Kept, Model

MIB = 16
DATA = content("base", 0, 64)
PLACES: Dict[str, Dict[str, Any]] = {
    "in-place": {},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
    "overlay": {},
}
"""Disks 1 to 3; disk 4 is a volatile one."""
TARGETS = {"in-place": "vdb", "store-clone": "vdc", "overlay": "vdd", "volatile": "vde"}


class Mixed:
    """The VM, and its backups."""

    def __init__(
        self, cloud: Cloud, os_image: int, where: Path, name: str, places: Sequence[str] = tuple(TARGETS)
    ) -> None:
        self.cloud = cloud
        self.images = {
            place: cloud.data_image(
                f"{name}-{place}", DATA, MIB, persistent=place == "in-place", store=RBD_STORE, **attributes
            )
            for place, attributes in PLACES.items()
            if place in places
        }
        disks: List[Dict[str, str]] = [{"IMAGE_ID": str(os_image)}]
        disks += [{"IMAGE_ID": str(image)} for image in self.images.values()]
        if "volatile" in places:
            disks.append({"TYPE": "fs", "SIZE": str(MIB), "FORMAT": "qcow2"})
        self.vm = cloud.deploy(name, disks, context=False)
        self.numbers = {place: number for number, place in enumerate(places, 1)}
        targets = {place: f"vd{'bcde'[number]}" for number, place in enumerate(places)}
        firsts = {place: DATA if place in PLACES else b"" for place in places}
        self.model = Model(
            cloud,
            self.vm,
            {target: (self.numbers[place], MIB, firsts[place]) for place, target in targets.items()},
        )
        self.kept = Kept(self.model, where)

    @property
    def other(self) -> str:
        return "h2" if self.cloud.oned.vm(self.vm).last.host.name == "h1" else "h1"

    def marks(self) -> Dict[str, int]:
        """Return how many marks each image of the VM has in the pool."""
        found = {
            name: sum(snap["name"].startswith(f"semishared-backup-{self.vm}-") for snap in image["snaps"])
            for name, image in self.cloud.lab.ceph.images().items()
        }
        return {name: count for name, count in found.items() if count}

    def backed_up(self, **how: Any) -> Set[str]:
        """Make the next backup; return the places of the disks of which all is in it."""
        self.kept.back_up(**how)
        return {place for place, number in self.numbers.items() if number in self.kept.whole[-1]}
