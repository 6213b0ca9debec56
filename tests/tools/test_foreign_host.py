# SPDX-License-Identifier: Apache-2.0
"""What another machine sends says what it likes: only the image that oned has acquired for a disk is opened,
and it ends some time.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from semishared.config import Config
from semishared.errors import ForeignImage, RestrictedPath, SemisharedError, ToolTimeout, TransferCorrupt
from semishared.front import streams
from semishared.host import probe
from semishared.model import steps as s
from semishared.model.disk.acquired import Given
from semishared.opennebula.xml import Vm
from semishared.plan.vm import checklist
from semishared.share import registered
from semishared.wire.session import Session
from tools.test_commit import active, attach, kept
from tools.world import MiB, World, qemu_io

VM = 5
EVIL: Dict[str, Any] = {
    "kind": "rbd",
    "user": "libvirt",
    "reader": "libvirt",
    "bridge_user": "libvirt",
    "hosts": ["10.0.0.1"],
    "secret": "00000000-0000-4000-8000-0000000000cc",
    "data_pool": "",
}


def carry(source_dir: str, target_dir: str, given: Dict[int, Given]) -> None:
    """Relay a VM directory as `tm/mv` does, to a machine that has been told what oned has given the VM."""
    with Session("localhost", "mv", Config()) as source, Session("localhost", "mv", Config()) as target:
        source.seq = target.seq = 1
        target.given = {VM: given}
        (found,) = source.run([s.MarkVm(VM, source_dir)])
        source.begin([s.SendVm(VM, source_dir, found.token)])
        target.begin([s.ReceiveVm(VM, target_dir, False, "")])
        said = source.read()
        while isinstance(said, bytes):
            target.send_data(said)
            said = source.read()
        source.finish()
        assert isinstance(said, dict)
        target.send(end=True, sha256=said["sha256"])
        target.finish()


@pytest.fixture(name="given")
def _given(world: World) -> Dict[int, Given]:
    """Make a VM with an overlay, a disk in place and a volatile one; return what oned has given it."""
    base, in_place = world.image(size=8 * MiB), world.image("in-place")._replace(id=36)
    world.clone(base, world.disk(VM, 1))
    world.link(in_place, world.disk(VM, 0))
    world.on(s.CreateVolatile(world.disk(VM, 2), MiB, "raw", ""))
    return {0: Given(in_place), 1: Given(base, is_clone=True), 2: Given(None)}


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
    "another format": lambda world, image: image.update(
        format="qcow2" if image["format"] == "raw" else "raw"
    ),
    "a store on the network": lambda world, image: image.update(
        source="one/one-36", access={**EVIL, "conf": ""}
    ),
}


@pytest.mark.fault(
    26,
    "a VM directory that arrives with a record of another image than oned's is refused, and "
    "nothing of it stays",
)
@pytest.mark.parametrize("disk", [0, 1])
@pytest.mark.parametrize("lie", LIES)
def test_another_image_does_not_arrive(world: World, given: Dict[int, Given], lie: str, disk: int) -> None:
    change(world, disk, lambda image: LIES[lie](world, image))
    target = world.location / "103" / str(VM)
    with pytest.raises(SemisharedError) as caught:
        carry(world.disk(VM).vm_dir, str(target), given)
    assert caught.value.id in ("SS042", "SS079", "SS180", "SS020"), caught.value.line()
    left = os.listdir(target.parent) if target.parent.exists() else []
    assert not [name for name in left if name == str(VM) or name.startswith(f".incoming-{VM}-")]


def in_place_of(world: World, disk: int, image: s.ImageRef) -> None:
    """Have a disk said, by its record and its link, to be an image in place, whatever it was."""
    vm_dir = Path(world.disk(VM).vm_dir)
    world.link(image, world.disk(VM + 1, disk))
    other = Path(world.disk(VM + 1, disk).vm_dir)
    for name in (f".semishared/disk.{disk}.json", f"disk.{disk}"):
        (vm_dir / name).unlink(missing_ok=True)
        (other / name).rename(vm_dir / name)


DIFFERENT: Dict[str, Callable[[World, Dict[int, Given]], object]] = {
    "a volatile disk that is an image": lambda world, given: in_place_of(
        world, 2, world.image("of-another-tenant")
    ),
    "a volatile disk of a VM without images": lambda world, given: (
        in_place_of(world, 2, world.image("of-another-tenant")),
        given.pop(0),
        given.pop(1),
        [
            Path(world.disk(VM).vm_dir, name).unlink()
            for name in (".semishared/disk.0.json", ".semishared/disk.1.json", "disk.0")
        ],
    ),
    "a disk that oned does not have": lambda world, given: in_place_of(
        world, 9, world.image("of-another-tenant")
    ),
    "the image of a disk of its own": lambda world, given: in_place_of(
        world, 1, given[1].image or world.image()
    ),
    "a disk of its own for an image": lambda world, given: given.update(
        {0: given[0]._replace(is_clone=True)}
    ),
    "an image that is only read": lambda world, given: given.update({0: given[0]._replace(is_readonly=True)}),
    "no record": lambda world, given: Path(world.disk(VM).vm_dir, ".semishared/disk.1.json").unlink(),
    "no record of a volatile disk": lambda world, given: Path(
        world.disk(VM).vm_dir, ".semishared/disk.2.json"
    ).unlink(),
}


@pytest.mark.fault(
    26,
    "a disk that arrives is what oned has given the VM: volatile, made from an image, or that image itself",
)
@pytest.mark.parametrize("what", DIFFERENT)
def test_what_oned_has_not_given_does_not_arrive(world: World, given: Dict[int, Given], what: str) -> None:
    DIFFERENT[what](world, given)
    target = world.location / "103" / str(VM)
    with pytest.raises(SemisharedError) as caught:
        carry(world.disk(VM).vm_dir, str(target), given)
    assert caught.value.id in ("SS042", "SS180") and "disk " in caught.value.detail, caught.value.line()
    assert not target.exists()


def test_what_is_so_arrives(world: World, given: Dict[int, Given]) -> None:
    target = world.location / "103" / str(VM)
    carry(world.disk(VM).vm_dir, str(target), given)
    assert json.loads((target / ".semishared/disk.0.json").read_text())["image"]["id"] == 36


@pytest.mark.fault(
    25,
    "no configuration that a record names is opened on the front-end: Ceph's library would write "
    "where it says",
)
def test_a_configuration_that_a_record_names_is_not_opened(world: World, given: Dict[int, Given]) -> None:
    written = world.top / "authorized_keys"
    conf = Path(world.disk(VM).vm_dir, "evil.conf")
    conf.write_text(f"[global]\nlog_file = {written}\nmon_host = 127.0.0.1:1\nclient_mount_timeout = 1\n")
    change(
        world,
        0,
        lambda image: image.update(
            source="one/one-36", access={**EVIL, "user": "x\nssh-ed25519 AAAA", "conf": str(conf)}
        ),
    )
    with Session("localhost", "mv", Config()) as source:
        source.seq, source.given = 1, {VM: given}
        with pytest.raises((ForeignImage, SemisharedError)):
            source.begin([s.SendVm(VM, world.disk(VM).vm_dir)])
            while isinstance(source.read(), bytes):
                pass
            source.finish()
    assert not written.exists()


def relayed(source_dir: str, target_dir: str, limits: streams.Limits, *, stopped: bool = False) -> None:
    with Session("localhost", "mv", Config()) as source, Session("localhost", "mv", Config()) as target:
        (found,) = source.run([s.MarkVm(VM, source_dir)])
        pid = source._process.pid
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            steps = (s.SendVm(VM, source_dir, found.token),), (s.ReceiveVm(VM, target_dir, False, ""),)
            streams.relay(source, steps[0], target, steps[1], limits, lambda text: None)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.fault(
    29, "a host that sends more than the disks and the memory of a VM can be is listened to no longer"
)
def test_a_host_that_sends_without_end_is_ended(world: World, given: Dict[int, Given]) -> None:
    Path(world.disk(VM).vm_dir, "more").write_bytes(os.urandom(3 * MiB))
    target = world.location / "103" / str(VM)
    with pytest.raises(TransferCorrupt, match="more than the 1 MiB"):
        relayed(world.disk(VM).vm_dir, str(target), streams.Limits(0, MiB, 60))
    assert not target.exists()


@pytest.mark.fault(
    29, "a host that is to send and sends nothing holds a transfer no longer than a standstill may last"
)
def test_a_host_that_sends_nothing_is_ended(world: World, given: Dict[int, Given]) -> None:
    with pytest.raises(ToolTimeout, match="no byte"):
        relayed(
            world.disk(VM).vm_dir,
            str(world.location / "103" / str(VM)),
            streams.Limits(0, 0, 0.3),
            stopped=True,
        )


def test_what_a_vm_can_be_is_by_oned() -> None:
    disks = (
        "<DISK><DISK_ID>0</DISK_ID><SIZE>100</SIZE></DISK><DISK><DISK_ID>1</DISK_ID><SIZE>1_000</SIZE></DISK>"
    )
    vm = Vm.parse(f"<VM><ID>{VM}</ID><TEMPLATE><MEMORY>64</MEMORY>{disks}</TEMPLATE></VM>")
    assert checklist.most_bytes(vm) == (300 + 64) * MiB * 11 // 10 + checklist.LITTLE


@pytest.mark.fault(
    28, "a share's record that leads to what no guest may be given is refused on the VM's host, too"
)
@pytest.mark.parametrize("path", ["/", "/run/user", "/var/lib/one/.ssh", "/var/lib", "/etc"])
def test_a_record_leads_to_nothing_that_no_guest_may_have(path: str) -> None:
    with pytest.raises(RestrictedPath, match="has to do with"):
        registered.opened(path)


@pytest.mark.fault(29, "what a label or a name on a host says begins no attribute of the host's template")
def test_a_label_ends_no_value(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probe, "lost", lambda root: ['device /d is of h"\n], SEMISHARED_FENCED = [ STATE = "fenced\\']
    )
    said = probe.report(str(world.location))
    alone, said = said.splitlines()
    assert alone == 'HEALTH_SEMISHARED = "device /d is of h??], SEMISHARED_FENCED = [ STATE = ?fenced?"'
    assert said.count("[") - said.count("]") <= 1
    assert 'HEALTH = "device /d is of h??], SEMISHARED_FENCED = [ STATE = ?fenced?"' in said


@pytest.mark.fault(
    26,
    "what is kept of a disk that oned has no more is in nobody's way when another disk has its "
    "number: the VM moves",
)
def test_a_kept_disk_whose_number_another_one_has(world: World) -> None:
    disk = world.disk(VM)
    attach(world, world.image(size=8 * MiB), disk)
    qemu_io(active(disk), "qcow2", "write -P 0x77 3M 64k")
    world.on(s.RemoveDisk(disk, ""), seq=0)
    ((place, leases),) = [(found["path"], world.leases()) for found in kept(world)]
    other = world.image("other", size=8 * MiB)._replace(id=8)
    attach(world, other, disk)
    with Session("localhost", "mv", Config()) as session:
        # What the source of a move does when the VM is at its target (ReleaseVm asks libvirt before).
        session.seq, session.given = 1, {VM: {1: Given(other)}}
        session.run([s.RemoveVm(VM, disk.vm_dir)])
    assert leases and set(leases) <= set(world.leases())
    qemu_io(f"{place}/disk.1.snap/0", "qcow2", "read -P 0x77 3M 64k", "read -P 0xa1 1M 64k")
