# SPDX-License-Identifier: Apache-2.0
"""Records that come from another machine say what they like: only the image that oned has acquired for a disk is opened for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from semishared.config import Config
from semishared.errors import ForeignImage, SemisharedError
from semishared.model import steps as s
from semishared.wire.session import Session
from tools.world import MiB, World

VM = 5
EVIL: Dict[str, Any] = {
    "kind": "rbd", "user": "libvirt", "reader": "libvirt", "bridge_user": "libvirt", "hosts": ["10.0.0.1"],
    "secret": "00000000-0000-4000-8000-0000000000cc", "data_pool": "",
}  # fmt: skip


def carry(source_dir: str, target_dir: str, images: Dict[Any, s.ImageRef]) -> None:
    """Relay a VM directory as `tm/mv` does, to a machine that has been told what oned has acquired."""
    with Session("localhost", "mv", Config()) as source, Session("localhost", "mv", Config()) as target:
        source.seq = target.seq = 1
        target.images = images
        (found,) = source.run([s.MarkVm(VM, source_dir)])
        assert isinstance(found, dict)
        source.begin([s.SendVm(VM, source_dir, found["token"])])
        target.begin([s.ReceiveVm(VM, target_dir, False, "")])
        said = source.read()
        while isinstance(said, bytes):
            target.send_data(said)
            said = source.read()
        source.finish()
        assert isinstance(said, dict)
        target.send(end=True, sha256=said["sha256"])
        target.finish()


@pytest.fixture(name="images")
def _images(world: World) -> Dict[Any, s.ImageRef]:
    """Make a VM with an overlay and a disk in place; return what oned has acquired for it."""
    base, in_place = world.image(size=8 * MiB), world.image("in-place")._replace(id=36)
    world.clone(base, world.disk(VM, 1))
    world.link(in_place, world.disk(VM, 0))
    return {(VM, 0): in_place, (VM, 1): base}


def change(world: World, disk: int, change_it: Callable[[Dict[str, Any]], object]) -> None:
    path = Path(world.disk(VM).vm_dir, ".semishared", f"disk.{disk}.json")
    record = json.loads(path.read_text())
    change_it(record["image"])
    path.write_text(json.dumps(record))


LIES: Dict[str, Callable[[World, Dict[str, Any]], object]] = {
    "another image": lambda world, image: image.update(source=world.image("of-another-tenant").source),
    "any file": lambda world, image: image.update(source="/var/lib/one/.one/one_auth"),
    "another id": lambda world, image: image.update(id=77),
    "another datastore": lambda world, image: image.update(store=177),
    "another format": lambda world, image: image.update(format="qcow2" if image["format"] == "raw" else "raw"),
    "a store on the network": lambda world, image: image.update(source="one/one-36", access={**EVIL, "conf": ""}),
}


@pytest.mark.fault(26, "a VM directory that arrives with a record of another image than oned's is refused, and nothing of it stays")
@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("lie", LIES)
def test_another_image_does_not_arrive(world: World, images: Dict[Any, s.ImageRef], lie: str, disk: int) -> None:
    change(world, disk, lambda image: LIES[lie](world, image))
    target = world.location / "103" / str(VM)
    with pytest.raises(SemisharedError) as caught:
        carry(world.disk(VM).vm_dir, str(target), images)
    assert caught.value.id in ("SS042", "SS079", "SS180", "SS020"), caught.value.line()
    left = os.listdir(target.parent) if target.parent.exists() else []
    assert not [name for name in left if name == str(VM) or name.startswith(f".incoming-{VM}-")]


def test_what_is_so_arrives(world: World, images: Dict[Any, s.ImageRef]) -> None:
    target = world.location / "103" / str(VM)
    carry(world.disk(VM).vm_dir, str(target), images)
    assert json.loads((target / ".semishared/disk.0.json").read_text())["image"]["id"] == 36


@pytest.mark.fault(25, "no configuration that a record names is opened on the front-end: Ceph's library would write where it says")
def test_a_configuration_that_a_record_names_is_not_opened(world: World, images: Dict[Any, s.ImageRef]) -> None:
    written = world.top / "authorized_keys"
    conf = Path(world.disk(VM).vm_dir, "evil.conf")
    conf.write_text(f"[global]\nlog_file = {written}\nmon_host = 127.0.0.1:1\nclient_mount_timeout = 1\n")
    change(world, 0, lambda image: image.update(source="one/one-36", access={**EVIL, "user": "x\nssh-ed25519 AAAA", "conf": str(conf)}))
    with Session("localhost", "mv", Config()) as source:
        source.seq, source.images = 1, images
        with pytest.raises((ForeignImage, SemisharedError)):
            source.begin([s.SendVm(VM, world.disk(VM).vm_dir)])
            while isinstance(source.read(), bytes):
                pass
            source.finish()
    assert not written.exists()
