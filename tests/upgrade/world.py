# SPDX-License-Identifier: Apache-2.0
"""A cloud as the older version left it: VMs of every place, running, off, suspended, stopped, undeployed,
with snapshots.
"""

from __future__ import annotations

import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

from configurations import oned_conf, vmm_execrc
from lab import Lab, Node, connections
from lab.cloud import DATASTORES, ONCE, RBD_STORE, STORE, SYSTEM, Cloud
from lab.forks import serve
from lab.guest import BOOT, Guest, content, lay_out_boot
from lab.oned import IMAGE_DS, SYSTEM_DS, Oned, Settings
from upgrade import versions

KIB = 64
DATA = content("base", 0, KIB)
OTHER_SYSTEM = 102
PLACES: Dict[str, Dict[str, Any]] = {
    "in-place": {},
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
}
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KINDS: Dict[str, Tuple[int, Tuple[str, ...]]] = {
    "dir": (STORE, ("raw", "qcow2")),
    "rbd": (RBD_STORE, ("raw",)),
}
"""Per kind of store its datastore, and the formats that images have there."""
FEWER = {"overlay": "raw", "copy": "qcow2", "store-clone": "raw"}
"""Places whose disks are of images of one format with `make test`; with test-full, as in place always, they
are of both.
"""


class Disk(NamedTuple):
    """A disk of a VM, as the guest and OpenNebula call it."""

    target: str
    id: int
    place: str
    format: str
    image: int
    """-1 if it is volatile."""


class Old:
    """The cloud, and its VMs by what state the older version left them in."""

    def __init__(self, cloud: Cloud, kind: str) -> None:
        self.cloud, self.kind = cloud, kind
        self.store, self.formats = KINDS[kind]
        self.vms: Dict[str, int] = {}
        self.images: Dict[str, int] = {}

    # -- images and VMs ----------------------------------------------------------------------------

    def upload(self) -> None:
        """Upload what several VMs share, and what nobody uses yet."""
        cloud = self.cloud
        self.images["os"] = cloud.os_image()
        for place, format in product(list(PLACES)[1:], self.formats):
            self.images[f"{place} {format}"] = self.image(f"{place}-{format}", place, format)
        self.images["idle"] = self.image("idle", "in-place", self.formats[-1])

    def image(self, name: str, place: str, format: str) -> int:
        """Upload an image for a place."""
        return self.cloud.data_image(
            name, DATA, persistent=place == "in-place", format=format, store=self.store, **PLACES[place]
        )

    def mixed(self) -> List[Tuple[str, str]]:
        """Return places and formats of the disks that each VM has."""
        found = list(product(PLACES, self.formats))
        if os.environ.get("SEMISHARED_FULL"):
            return found
        return [
            (place, format)
            for place, format in found
            if FEWER.get(place, format) == format or len(self.formats) == 1
        ]

    def deploy(self, name: str, host: str = "h1") -> int:
        """Create and deploy a VM with disks of each place, three volatile ones, and its context."""
        disks = [{"IMAGE_ID": str(self.images["os"])}]
        for place, format in self.mixed():
            if place == "in-place":
                self.images[f"{name} {format}"] = self.image(f"{name}-{format}", place, format)
            disks.append({"IMAGE_ID": str(self.images[f"{name if place == 'in-place' else place} {format}"])})
        disks += [{"TYPE": "fs", "SIZE": "16", "FORMAT": format} for format in ("raw", "qcow2")]
        disks.append({"TYPE": "swap", "SIZE": "16"})
        template = self.cloud.template(name, disks)
        template["RAW"]["DATA"] = template["RAW"]["DATA"].replace(ONCE, "")  # one of them is reset
        self.vms[name] = vm = self.cloud.oned.vm_create(template)
        self.cloud.oned.vm_deploy(vm, host, SYSTEM)
        return vm

    def disks(self, name: str) -> List[Disk]:
        """Return the disks of a VM but the first, which it has booted from, and swap."""
        found = []
        for row in self.cloud.oned.vm(self.vms[name]).disks[1:]:
            if row["TYPE"].lower() == "swap":
                continue
            image = int(row.get("IMAGE_ID", "-1"))
            place = next((key.split()[0] for key, value in self.images.items() if value == image), "volatile")
            place = place if place in (*PLACES, "volatile") else "in-place"
            found.append(Disk(row["TARGET"], int(row["DISK_ID"]), place, row["FORMAT"], image))
        return found

    def kept(self, name: str) -> List[Disk]:
        """Return the disks of a VM that can have snapshots."""
        return [disk for disk in self.disks(name) if disk.image >= 0]

    # -- what guests wrote ---------------------------------------------------------------------------

    def begin(self, name: str, host: str = "h1") -> None:
        """Deploy a VM, write, take a live snapshot of each disk, write on: `one` is in the snapshot, `two` is
        not.
        """
        vm = self.deploy(name, host)
        guest = self.cloud.guest(vm)
        for disk in self.disks(name):
            guest.write(disk.target, "one", 1024, 64)
            guest.write(disk.target, "only", 2048, 64)
        for disk in self.kept(name):
            assert self.cloud.oned.disk_snapshot_create(vm, disk.id, "live") == 0
        for disk in self.disks(name):
            guest.write(disk.target, "two", 1024, 64)

    def check(self, name: str, seed: str = "two") -> Guest:
        """See that a VM's guest has what it wrote, on every disk."""
        guest = self.cloud.guest(self.vms[name])
        for disk in self.disks(name):
            self.check_disk(guest, disk, seed)
        return guest

    def check_disk(self, guest: Guest, disk: Disk, seed: str) -> None:
        """See that a disk has what was written, and below that what it was made from."""
        guest.check(disk.target, seed, 1024, 64)
        guest.check(disk.target, "only", 2048, 64)
        guest.check(disk.target, "zero" if disk.place == "volatile" else "base", 0, KIB)

    def stored(self, image: int, format: str, offset: int, count: int = 64) -> bytes:
        """Return what an image has in its store (KiB)."""
        if self.kind == "rbd":
            return self.cloud.lab.ceph.read(
                self.cloud.source(image).partition("/")[2], count << 10, offset << 10
            )
        return self.cloud.read(self.cloud.source(image), format, count << 10, offset << 10)

    def check_stored(self, image: int, format: str, seed: str) -> None:
        """See that an image in its store is what a disk of ours was."""
        data = self.stored(image, format, 0, 2048 + 64)
        assert data[1024 << 10 : (1024 + 64) << 10] == content(seed, 1024, 64)
        assert data[2048 << 10 :] == content("only", 2048, 64)
        assert data[: KIB << 10] == DATA

    def end(self, name: str, seed: str) -> None:
        """Terminate a VM: what was written to its persistent disks is in their images, and nothing in the
        others.
        """
        mine = [disk for disk in self.kept(name) if disk.place == "in-place"]
        others = [disk for disk in self.kept(name) if disk.place != "in-place"]
        self.cloud.terminate(self.vms.pop(name))
        for disk in mine:
            self.check_stored(disk.image, disk.format, seed)
        for disk in others:
            assert self.stored(disk.image, disk.format, 1024) == bytes(64 << 10)

    # -- what is on disk -----------------------------------------------------------------------------

    def bases(self, node: Node) -> Dict[str, int]:
        """Return the bases of a host, and which file each is."""
        folder = node.path(f"{DATASTORES}/.semishared/bases")
        return {
            path.name: (path / "image").stat().st_ino
            for path in folder.iterdir()
            if (path / "image").exists()
        }

    def everything(self) -> Dict[str, Any]:
        """Return all there is of VMs, bases, stores and images: names, sizes, times, links; what may not
        change untold.
        """
        found: Dict[str, Any] = {}
        for node in (self.cloud.lab.fe, *self.cloud.lab.hosts):
            for name, entry in _below(str(node.path(DATASTORES))):
                if not PASSING.search(name) and not stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    found[f"{node.name}:{name}"] = _described(entry)
        if self.kind == "rbd":
            found["pool"] = self.cloud.lab.ceph.images()
        return found


PASSING = re.compile(r"(^|/)(locks/|\.monitor$|\.machine-)|/locks$")
"""Files that hold nothing: locks come with whoever asks, and probes of monitoring."""


def _below(top: str, name: str = "") -> Iterator[Tuple[str, os.DirEntry[str]]]:
    """Yield all that is below a directory, by names relative to it. Not as paths: to make those takes more
    than to look at the files.
    """
    with os.scandir(f"{top}/{name}") as entries:
        for entry in entries:
            path = f"{name}/{entry.name}" if name else entry.name
            yield path, entry
            if entry.is_dir(follow_symlinks=False):
                yield from _below(top, path)


def _described(entry: os.DirEntry[str]) -> Tuple[object, ...]:
    seen = entry.stat(follow_symlinks=False)
    if entry.is_symlink():
        return ("link", os.readlink(entry.path))
    if entry.is_dir():
        return ("directory", seen.st_mode)
    return (seen.st_mode, seen.st_size, seen.st_mtime_ns, seen.st_nlink, seen.st_ino)


def make_old(old: Old) -> None:
    """Have the VMs of the older version: in each state, with a snapshot of each disk that can have one."""
    oned = old.cloud.oned
    old.upload()
    # Of two at once, as many as the machine has processors.
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda words: old.begin(*words),
                (("run",), ("off",), ("suspended",), ("stopped",), ("undeployed", "h2")),
            )
        )
    oned.vm_poweroff(old.vms["off"], hard=True)
    for disk in old.kept("off"):
        assert oned.disk_snapshot_create(old.vms["off"], disk.id, "off") == 1
    oned.vm_suspend(old.vms["suspended"])
    oned.vm_stop(old.vms["stopped"])
    oned.vm_undeploy(old.vms["undeployed"], hard=True)
    # In place alone, which can be moved while it runs.
    system = old.cloud.os_image("mine", persistent=True)
    disks = [{"IMAGE_ID": str(system)}]
    for format in old.formats:
        old.images[f"live {format}"] = old.image(f"live-{format}", "in-place", format)
        disks.append({"IMAGE_ID": str(old.images[f"live {format}"])})
    old.vms["live"] = vm = old.cloud.deploy("live", disks)
    guest = old.cloud.guest(vm)
    for disk in old.disks("live"):
        guest.write(disk.target, "one", 1024, 64)
        guest.write(disk.target, "only", 2048, 64)
        guest.write(disk.target, "two", 1024, 64)
    # An image with two snapshots, that no VM uses any more.
    disk_id = oned.disk_attach(vm, old.images["idle"])
    target = oned.vm(vm).disks[-1]["TARGET"]
    guest.wait_disk(target)
    guest.write(target, "only", 2048, 64)
    for number, seed in enumerate(("one", "two")):
        guest.write(target, seed, 1024, 64)
        assert oned.disk_snapshot_create(vm, disk_id, seed) == number
    guest.write(target, "three", 1024, 64)
    oned.disk_detach(vm, disk_id)


def configure(lab: Lab) -> None:
    """Give the front-end the configuration of an OpenNebula."""
    etc = lab.fe.path("/etc/one")
    (etc / "vmm_exec").mkdir(parents=True)
    (etc / "oned.conf").write_text(oned_conf())
    (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())


@contextmanager
def older_cloud(kind: str, systems: Sequence[int] = (SYSTEM, OTHER_SYSTEM)) -> Iterator[Old]:
    """Put up a lab with the older version and its VMs; take all of it down at the end."""
    with installed(kind, systems, versions.OLDER) as cloud:
        for store in cloud.oned.datastores.values():
            if "DS_LIVE_MIGRATE" in store.template:
                store.template["DS_LIVE_MIGRATE"] = "NO"
        versions.keep(cloud.lab)
        old = Old(cloud, kind)
        make_old(old)
        yield old


@contextmanager
def installed(
    kind: str,
    systems: Sequence[int],
    version: str,
    hosts: int = 2,
    prepare: Callable[[Lab], None] = lambda lab: None,
) -> Iterator[Cloud]:
    """Put up a lab with a version on its machines, and no VM; take all of it down at the end.

    `prepare` is called before the installation.
    """
    with Lab.up(hosts=hosts, stores=(STORE,), ceph=kind == "rbd") as lab:
        versions.unpack(lab, version)
        prepare(lab)
        configure(lab)
        versions.install(lab, version)
        versions.sync(lab)
        serve(lab)
        connections.share(lab)
        for host in lab.hosts:
            lay_out_boot(host.path(BOOT))
        with Oned.in_lab(lab, Settings(domain_type=lab.virt, vm_mad=lab.virt)) as oned:
            oned.datastore_create(IMAGE_DS, STORE)
            if kind == "rbd":
                oned.datastore_create(lab.ceph.datastore(), RBD_STORE)
            for number in systems:
                oned.datastore_create(SYSTEM_DS.replace("semi_sys", f"semi_sys_{number}"), number)
            yield Cloud(lab, oned)
