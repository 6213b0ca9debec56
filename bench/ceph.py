# SPDX-License-Identifier: Apache-2.0
"""What a VM's disk from an RBD image costs: first and further ones on a host, and the stock driver's way, in
turns.

Stock OpenNebula puts an image from Ceph on a host by exporting all of it for every VM: `rbd export`, started
on the host through ssh. That is the baseline, of the same image to the same directory, with the same user.
Bytes are counted by the OSD.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Dict, List, Tuple

from clone import Rig, Samples
from figures import Figure, rounds_within

from lab.ceph import POOL, USER
from lab.cloud import DATASTORES, RBD_STORE, STORE, SYSTEM, Cloud

MiB = 1 << 20
SIZES = {"256 MiB, half of it data": 256, "2 GiB, half of it data": 2048}
DIR = "on a mounted store"
EXTENT = 16 * MiB
HEADERS_LIMIT = 0.25
"""MiB that opening an image and asking what has changed may take: headers and the object map, whatever is in
the image.
"""


def _image(cloud: Cloud, mib: int, store: int = RBD_STORE) -> int:
    """Upload an image in which every second extent of 16 MiB is incompressible data."""
    path = cloud.upload_file(f"rbd-{mib}.img")
    with path.open("wb") as file:
        for offset in range(0, mib * MiB, 2 * EXTENT):
            file.seek(offset)
            file.write(os.urandom(EXTENT))
        file.truncate(mib * MiB)
    cloud.give(path)
    image = cloud.oned.image_create(
        store, f"in-{store}-{mib}", path=f"/var/tmp/{path.name}", type="OS", prefix="vd"
    )
    path.unlink()
    return image


class CephRig(Rig):
    """The programs to compare, for images on Ceph."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud)
        self._read = 0

    def clone(self, vm: int, image: int) -> float:
        """Run the clone action; return the seconds."""
        place = f"{self.host.name}:/var/lib/one//datastores/{SYSTEM}/{vm}/disk.0"
        store = self.cloud.oned.image(image).datastore_id
        words = ["clone", "semishared", f"fe:{self.cloud.source(image)}", place, str(vm), str(store)]
        before = self.cloud.lab.ceph.bytes_read()
        self.cloud.oned.drivers.tm(words)
        self._read = self.cloud.lab.ceph.bytes_read() - before
        return self.meter.samples["tm/clone"][-1].wall

    def read_mib(self) -> float:
        """Return the MiB that the OSD gave away during the last clone or export."""
        return self._read / MiB

    def export(self, image: int) -> float:
        """Export an image as the stock driver does; return the seconds."""
        path = f"{DATASTORES}/{SYSTEM}/export.raw"
        before = self.cloud.lab.ceph.bytes_read()
        source = f"{POOL}/{self.cloud.source(image).split('/')[1]}"
        seconds = self.program("ssh", self.host.name, f"rbd --id {USER} export --no-progress {source} {path}")
        self._read = self.cloud.lab.ceph.bytes_read() - before
        self.host.path(path).unlink()
        return seconds


def ceph(quick: bool) -> List[Figure]:
    """Compare first and further disks with a full export."""
    warm, cold = (2, 1) if quick else (8, 4)
    samples: Samples = defaultdict(list)
    with Cloud.up(hosts=1, ceph=True) as cloud:
        rig = CephRig(cloud)
        images = {size: _image(cloud, mib) for size, mib in SIZES.items()}
        images[DIR] = _image(cloud, min(SIZES.values()), STORE)
        vms = {
            size: cloud.create(f"vm-{image}", [{"IMAGE_ID": str(image)}]) for size, image in images.items()
        }
        for size in SIZES:
            rig.export(images[size])  # what the OSD has in its cache is the same for both from here on
        print("  first disks and exports", flush=True)
        for _ in rounds_within(75, cold):
            rig.forget()
            for size in SIZES:
                image = images[size]
                samples[size, "first"].append(rig.clone(vms[size], image))
                samples[size, "first read"].append(rig.read_mib())
                rig.delete(vms[size])
                samples[size, "export beside first"].append(rig.export(image))
        print("  further disks and exports", flush=True)
        rig.clone(vms[DIR], images[DIR])
        rig.delete(vms[DIR])
        for _ in rounds_within(80, warm):
            samples[DIR, "warm"].append(rig.clone(vms[DIR], images[DIR]))
            rig.delete(vms[DIR])
            for size in SIZES:
                image = images[size]
                samples[size, "warm"].append(rig.clone(vms[size], image))
                samples[size, "warm read"].append(rig.read_mib())
                samples[size, "warm data"].append(rig.store_read())
                rig.delete(vms[size])
                samples[size, "export"].append(rig.export(image))
                samples[size, "export read"].append(rig.read_mib())
    return _figures(list(SIZES), samples)


def _figures(sizes: List[str], s: Dict[Tuple[str, str], List[float]]) -> List[Figure]:
    small, large = sizes
    found = []
    for size in sizes:
        found += [
            Figure(
                f"ceph/first/{size}",
                f"first disk on a host from an RBD image of {size}",
                "s",
                s[size, "first"],
                "`rbd export` through ssh, as stock",
                s[size, "export beside first"],
                expected={small: 2.0, large: 1.3}[size],
                because="reads the same data several extents at a time, but hashes and flushes it; stock "
                "flushes nothing",
                budget=("ratio", "<=", {small: 1.1, large: 0.75}[size]),
                budget_from="first disk from Ceph",
                if_missed={
                    small: "what a further disk costs is nearly half of it, and an export leaves what it "
                    "writes to be written later",
                    large: "all of it is on the device at its end, which an export leaves to be "
                    "written later",
                }[size],
            ),
            Figure(
                f"ceph/warm/{size}",
                f"further disk on that host from an RBD image of {size}",
                "s",
                s[size, "warm"],
                "`rbd export` through ssh, as stock",
                s[size, "export"],
                expected={small: 0.8, large: 0.2}[size],
                because="the export grows with the data",
            ),
            Figure(
                f"ceph/warm-dir/{size}",
                f"further disk on that host from an RBD image of {size}",
                "s",
                s[size, "warm"],
                "further disk from an image in a mounted store",
                s[DIR, "warm"],
                expected=1.1,
                because="one connection to the cluster, which alone knows whether the image has changed",
                budget=("ratio", "<=", 1.1),
                budget_from="further disk from Ceph",
                if_missed="librados has to be loaded, and let in by the cluster, before that can be asked",
            ),
            Figure(
                f"ceph/first-read/{size}",
                f"read from RBD by a first disk, {size}",
                "MiB",
                s[size, "first read"],
            ),
            Figure(
                f"ceph/warm-data/{size}",
                f"data read from RBD by a further disk, {size}",
                "bytes",
                s[size, "warm data"],
                expected=0.0,
                because="the base is on the host",
                budget=("value", "<=", 0.0),
                budget_from="bytes per warm VM",
            ),
            Figure(
                f"ceph/warm-read/{size}",
                f"given by the OSD to a further disk, headers included, {size}",
                "MiB",
                s[size, "warm read"],
                expected=0.02,
                because="the image's header and object map say whether it has changed",
                budget=("value", "<=", HEADERS_LIMIT),
                budget_from="bytes per warm VM",
            ),
            Figure(
                f"ceph/export-read/{size}",
                f"read from RBD by an export, {size}",
                "MiB",
                s[size, "export read"],
            ),
        ]
    found.append(
        Figure(
            "ceph/size-independence",
            f"further disk from an RBD image of {large}",
            "s",
            s[large, "warm"],
            f"of {small}",
            s[small, "warm"],
            expected=1.0,
            because="nothing of it is read",
            budget=("ratio", "<=", 1.2),
            budget_from="independent of image size",
        )
    )
    return found
