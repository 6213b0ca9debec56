# SPDX-License-Identifier: Apache-2.0
"""`semishared plan ACTION` of disks on a real Ceph cluster: it says what the action would do, and nothing
changes anywhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Tuple

import pytest
import rbd

from lab.oned import objects
from lab.oned.states import Img
from lab.oned.template import Template
from rehearsing import things
from semishared.front import datastore
from tools.ceph_site import BRIDGE, POOL, READER, SECRET, USER
from tools.oned_site import HERE, ActionSite

if TYPE_CHECKING:
    from tools.ceph_site import Site

STORE = 105
Words = List[str]


class CephSite:
    """Images on the cluster, VMs on this machine, under a simulated oned."""

    def __init__(self, ceph: Site, one: ActionSite) -> None:
        self.ceph, self.one = ceph, one
        one.oned.datastore_create(
            f'NAME="ceph" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared" DISK_TYPE="RBD" '
            f'POOL_NAME="{POOL}" CEPH_USER="{USER}" '
            f'CEPH_SECRET="{SECRET}" CEPH_CONF="{ceph.conf}" SEMISHARED_CEPH_READER="{READER}" '
            f'SEMISHARED_CEPH_BRIDGE_USER="{BRIDGE}"',
            STORE,
        )

    def image(self, persistent: bool = False, **attributes: str) -> int:
        """Have an image of 8 MiB on the cluster, as somebody else has made it; return its id."""
        number, known = len(self.one.oned.images), self.one.oned.datastore(STORE)
        source = self.ceph.make(number, size=8 << 20).source
        template: Template = {"DEV_PREFIX": "vd", **attributes}
        held = objects.Image(
            number, "image", 0, persistent, STORE, known.name, template, source=source, format="raw", size=8
        )
        held.disk_type = known.disk_type
        held.set_state(Img.READY)
        self.one.oned.images[number] = held
        known.images.append(number)
        return number

    def words(self, image: int) -> Words:
        """Return the arguments of clone or ln for a new VM with the image."""
        vm = self.one.vm(image)
        return [f"fe:{self.one.oned.image(image).source}", f"{HERE}:{self.one.disk(vm)}", str(vm), str(STORE)]

    def state(self) -> Any:
        """Return all there is, on this machine and in the pool: names, hashes, snapshots, who watches or
        locks, metadata.
        """
        pool = {}
        for name in self.ceph.names():
            with rbd.Image(self.ceph.ioctx, name, read_only=True) as image:
                pool[name] = (
                    self.ceph.content(name),
                    image.size(),
                    image.list_lockers(),
                    sorted(image.metadata_list()),
                    sorted((found["id"], found["name"], found["size"]) for found in image.list_snaps()),
                    self.ceph.parent(name),
                )
        return (
            things(self.one.location),
            pool,
            self.ceph.busy(),
            sorted(item["id"] for item in self.ceph.rbd.trash_list(self.ceph.ioctx)),
        )


@pytest.fixture
def cloud(site: Site, tmp_path: Path) -> Iterator[CephSite]:
    site.wipe()
    with ActionSite.up(tmp_path / "one") as one:
        yield CephSite(site, one)


Situation = Callable[[CephSite], Words]
SITUATIONS: Dict[str, Tuple[Situation, List[str]]] = {}


def situation(name: str, *steps: str) -> Callable[[Situation], Situation]:
    def add(made: Situation) -> Situation:
        SITUATIONS[name] = made, list(steps)
        return made

    return add


@situation("clone", "FreezeImage", "StageBase", "...")
def overlay(cloud: CephSite) -> Words:
    return cloud.words(cloud.image())


@situation("clone of what is known", "StageBase", "PrepareVm", "CreateOverlay")
def warm(cloud: CephSite) -> Words:
    image = cloud.image()
    cloud.one.tm("CLONE", *cloud.words(image))
    return cloud.words(image)


@situation("clone as a copy", "FreezeImage", "PrepareVm", "CopyImage")
def copy(cloud: CephSite) -> Words:
    return cloud.words(cloud.image(SEMISHARED_LOCAL="copy"))


@situation("clone over the pool", "LendContent", "...")
def remote(cloud: CephSite) -> Words:
    return cloud.words(cloud.image(SEMISHARED_LOCAL="remote-first"))


@situation("clone on the store", "PrepareVm", "RecordNetwork", "CloneStored", "ConfirmDisk")
def shared(cloud: CephSite) -> Words:
    return cloud.words(cloud.image(SEMISHARED_PLACE="shared"))


@situation("ln", "BeginSession", "PrepareVm", "RecordNetwork")
def in_place(cloud: CephSite) -> Words:
    return cloud.words(cloud.image(persistent=True))


@situation("ln of a local disk", "CheckWriters", "SeeImage", "...")
def local(cloud: CephSite) -> Words:
    return cloud.words(cloud.image(persistent=True, SEMISHARED_PLACE="local"))


def made(cloud: CephSite, action: str, persistent: bool = False, **attributes: str) -> Tuple[str, int]:
    """Return the place of disk 0, of an image, of a VM that is off, and the VM."""
    words = cloud.words(cloud.image(persistent, **attributes))
    cloud.one.tm(action, *words)
    return words[1], int(words[2])


def shared_disk(cloud: CephSite) -> Tuple[str, int]:
    return made(cloud, "CLONE", SEMISHARED_PLACE="shared")


def saved(cloud: CephSite, disk: str, vm: int) -> Words:
    return [disk, f"{POOL}/one-77", "-1", str(vm), str(STORE)]


@situation("cpds of a disk on the network", "CopyStored")
def saved_shared(cloud: CephSite) -> Words:
    return saved(cloud, *shared_disk(cloud))


@situation("cpds of a local disk", "StageImage", "...")
def saved_local(cloud: CephSite) -> Words:
    return saved(cloud, *made(cloud, "CLONE"))


@situation("delete", "RemoveDisk", "...")
def removed(cloud: CephSite) -> Words:
    disk, vm = shared_disk(cloud)
    return [disk, str(vm), str(STORE)]


@situation("mvds", "EndSession", "...")
def session_ends(cloud: CephSite) -> Words:
    disk, vm = made(cloud, "LN", persistent=True)
    return [disk, cloud.one.oned.vm(vm).disks[0]["SOURCE"], str(vm), str(STORE)]


@situation("mvds of a local disk", "EndSession", "...")
def local_ends(cloud: CephSite) -> Words:
    disk, vm = made(cloud, "LN", persistent=True, SEMISHARED_PLACE="local")
    return [disk, cloud.one.oned.vm(vm).disks[0]["SOURCE"], str(vm), str(STORE)]


def snapshot(disk: str, vm: int, number: int) -> Words:
    return [disk, str(number), str(vm), str(STORE)]


def with_snapshot(cloud: CephSite, disk: str, vm: int) -> Words:
    cloud.one.tm("SNAP_CREATE", *snapshot(disk, vm, 0))
    return snapshot(disk, vm, 0)


@situation("snap_create", "KeepSnapshot")
def snap_create(cloud: CephSite) -> Words:
    return snapshot(*shared_disk(cloud), 0)


@situation("snap_delete", "ForgetSnapshot")
def snap_delete(cloud: CephSite) -> Words:
    return with_snapshot(cloud, *shared_disk(cloud))


@situation("snap_revert of an image", "RevertImage")
def snap_revert(cloud: CephSite) -> Words:
    return with_snapshot(cloud, *made(cloud, "LN", persistent=True))


@situation("resize", "GrowDisk", "...")
def grown(cloud: CephSite) -> Words:
    disk, vm = shared_disk(cloud)
    return [disk, "16", str(vm), str(STORE)]


Image = Dict[str, Any]
DATASTORE: Dict[str, Tuple[Callable[[CephSite], Image], List[str]]] = {}
"""By action of datastores: what leads to it, and returns what oned says of the image; the steps that are said
to follow.
"""


def of_datastore(
    action: str, *steps: str
) -> Callable[[Callable[[CephSite], Image]], Callable[[CephSite], Image]]:
    def add(made: Callable[[CephSite], Image]) -> Callable[[CephSite], Image]:
        DATASTORE[action] = made, list(steps)
        return made

    return add


@of_datastore("cp", "StoreUpload")
@of_datastore("stat")
def upload(cloud: CephSite) -> Image:
    path = cloud.one.top / "upload.img"
    path.write_bytes(b"upload" * (1 << 18))
    return {"PATH": path, "SIZE": 8}


@of_datastore("mkfs", "CreateImage")
def empty(_: CephSite) -> Image:
    return {"SIZE": 8, "FORMAT": "raw"}


@of_datastore("export", "DigestImage", "...")
@of_datastore("rm", "RemoveImage")
@of_datastore("monitor")
def stored(cloud: CephSite) -> Image:
    return {"SOURCE": cloud.ceph.make(7, size=8 << 20).source, "FORMAT": "raw", "SIZE": 8}


@of_datastore("clone", "CopyStored")
def cloned(cloud: CephSite) -> Image:
    return {"PATH": cloud.ceph.make(8, size=8 << 20).source, "FORMAT": "raw", "SIZE": 8}


@of_datastore("snap_delete", "ForgetSnapshot")
@of_datastore("snap_revert", "RevertImage")
@of_datastore("snap_flatten", "FlattenImage")
def snapped(cloud: CephSite) -> Image:
    image = stored(cloud)
    with rbd.Image(cloud.ceph.ioctx, "one-7") as opened:
        opened.create_snap("0")
        opened.protect_snap("0")
    cloud.ceph.write("one-7", 0, b"later" * 100)
    return {**image, "TARGET_SNAPSHOT": 0}


def _answer(action: str, stdout: str) -> Any:
    """Return what two answers have in common: Ceph counts what a pool holds some seconds late, so numbers of
    monitor differ.
    """
    return re.findall(r"^(\w+)=\d+$", stdout, re.MULTILINE) if action == "monitor" else stdout


@pytest.mark.parametrize("action", DATASTORE)
@pytest.mark.fault(
    21, "`semishared plan` of a datastore action changes nothing in Ceph: no image, byte, snapshot or lock"
)
def test_a_rehearsal_of_a_datastore_action_changes_nothing(cloud: CephSite, action: str) -> None:
    made, steps = DATASTORE[action]
    image, base, template = made(cloud), cloud.one.location / str(STORE), {"SAFE_DIRS": str(cloud.one.top)}
    stdin = cloud.ceph.request(base, template=template, **image)
    before = cloud.state()
    said: Dict[str, Any] = json.loads(
        cloud.one.cli("plan", "--json", f"datastore/{action}", "7", stdin=stdin).stdout
    )
    assert cloud.state() == before
    found = [step["step"] for part in said["plan"] if "answers" not in part for step in part["steps"]]
    assert found + ["..."] * said["open"] == steps
    done = cloud.ceph.run(action, base, template=template, **image)
    assert done.returncode == 0, done.stderr.decode()
    assert said["open"] or _answer(action, said["stdout"]) == _answer(
        action, done.stdout.decode().rstrip("\n")
    )
    assert (cloud.state() != before) == bool(steps and action != "export")


def test_every_datastore_action_is_rehearsed_here() -> None:
    assert set(DATASTORE) == set(datastore.ACTIONS)


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.fault(
    21,
    "`semishared plan` changes nothing on any machine and nothing in Ceph: no image, byte, snapshot or lock",
)
def test_a_rehearsal_says_the_steps_and_changes_nothing(cloud: CephSite, name: str) -> None:
    made, steps = SITUATIONS[name]
    words = made(cloud)
    before = cloud.state()
    said: Dict[str, Any] = json.loads(cloud.one.cli("plan", "--json", name.split()[0], *words).stdout)
    assert cloud.state() == before
    found = [step["step"] for part in said["plan"] if "answers" not in part for step in part["steps"]]
    assert found + ["..."] * said["open"] == steps
    cloud.one.tm(name.split()[0].upper(), *words)
    assert cloud.state() != before
