# SPDX-License-Identifier: Apache-2.0
"""The domain in a checkpoint, which a host wrote that need not be trusted, against oned and the records of the VM's disks."""

from __future__ import annotations

from typing import Any, Dict

import pytest

from semishared.errors import ForeignCheckpoint
from semishared.model.record import Record
from semishared.plan import checkpoint

STORE, VM_DIR = "/var/lib/one/datastores/100", "/var/lib/one//datastores/101/7"
ACCESS: Dict[str, Any] = {
    "kind": "rbd", "user": "libvirt", "reader": "libvirt", "bridge_user": "libvirt", "conf": "", "hosts": [], "data_pool": "",
    "secret": "0" * 8 + "-0000-4000-8000-" + "0" * 12,
}  # fmt: skip


def record(disk: int, how: str, place: str, path: str, source: str, **more: Any) -> Record:
    image = {"store": 100, "id": 4, "format": "raw", "source": source, "generation": "", **more.pop("image", {})}
    data = {"version": 1, "disk": disk, "place": place, "how": how, "format": "raw", "path": path, "readonly": False, "image": image}
    return Record.from_data({**data, **more})


RECORDS = {
    0: record(0, "in-place", "shared", f"{STORE}/.semishared/abc/image", f"{STORE}/abc"),
    1: record(1, "overlay", "local", f"{VM_DIR}/disk.1.snap/0", f"{STORE}/def", format="qcow2"),
    2: record(2, "store-clone", "shared", f"{STORE}/.semishared/def/clones/7-2.snap/1", f"{STORE}/def", format="qcow2"),
    3: record(3, "in-place", "shared", "", "one/one-9", image={"access": ACCESS}, network={
        "protocol": "rbd", "name": "one/one-9", "hosts": [], "user": "libvirt", "secret": ACCESS["secret"], "conf": "",
    }),
}  # fmt: skip
OURS = [
    f"file='{STORE}/.semishared/abc/image'", f"file='{VM_DIR}/disk.1'", "file='/var/lib/one/datastores/103/7/disk.1.snap/4'",
    f"file='{STORE}/.semishared/def/clones/7-2.snap/0'", "protocol='rbd' name='one/one-9'", f"file='{VM_DIR}/disk.5' index='3'",
]  # fmt: skip
OTHERS = [
    f"file='{STORE}/of-others'", f"file='{STORE}/abc'", "file='/var/lib/one/datastores/101/8/disk.0'", "file='/etc/shadow'",
    "dev='/dev/sda'", f"file='{VM_DIR}/../8/disk.0'", f"file='{STORE}/.semishared/def/clones/8-2.snap/0'",
    "protocol='rbd' name='one/one-66'", "protocol='nbd' name='x'", "pool='default' volume='x'", "dir='/'",
]  # fmt: skip


def domain(*sources: str, name: str = "one-7", more: str = "") -> bytes:
    disks = "".join(f"<disk><source {source}/><target dev='vda'/></disk>" for source in sources)
    return f"<domain><name>{name}</name><uuid>u-u</uuid><devices><disk><target dev='hdc'/></disk>{disks}{more}</devices></domain>".encode()


def told(disks: str = "", deploy_id: str = "one-7") -> Any:
    text = f"<VM><ID>7</ID><DEPLOY_ID>{deploy_id}</DEPLOY_ID><TEMPLATE>{disks}</TEMPLATE></VM>"
    return checkpoint.Told.parse(f"<VMM_DRIVER_ACTION_DATA>{text}</VMM_DRIVER_ACTION_DATA>".encode())


@pytest.mark.parametrize("oned", [None, told()], ids=["", "told"])
@pytest.mark.parametrize("source", OURS)
def test_what_is_the_vm_s_is_resumed(source: str, oned: Any) -> None:
    checkpoint.check(domain(source), RECORDS, VM_DIR, oned)


@pytest.mark.fault(26, "a checkpoint that opens what is not the VM's is not resumed, and the refusal names it")
@pytest.mark.parametrize("source", OTHERS)
def test_a_checkpoint_opens_nothing_that_is_not_the_vm_s(source: str) -> None:
    with pytest.raises(ForeignCheckpoint, match="its disk vda is "):
        checkpoint.check(domain(OURS[0], source), RECORDS, VM_DIR, told())


@pytest.mark.fault(26, "a checkpoint of another VM, or with a directory for the guest, is not resumed")
def test_a_checkpoint_is_of_this_vm() -> None:
    with pytest.raises(ForeignCheckpoint, match="of domain 'one-8'"):
        checkpoint.check(domain(name="one-8"), RECORDS, VM_DIR, told())
    checkpoint.check(domain(), RECORDS, VM_DIR, told(deploy_id="u-u"))
    directory = "<filesystem><source dir='/'/></filesystem>"
    with pytest.raises(ForeignCheckpoint, match="a directory"):
        checkpoint.check(domain(more=directory), RECORDS, VM_DIR, told())
    checkpoint.check(domain(more=directory), RECORDS, VM_DIR, told("<RAW><DATA>...</DATA></RAW>"))


def test_a_disk_of_another_driver_is_its_own_affair() -> None:
    disks = "<DISK><DISK_ID>8</DISK_ID><TM_MAD>ceph</TM_MAD><SOURCE>one/one-12</SOURCE></DISK>"
    for name in ("one/one-12", "one/one-12-7-8"):
        checkpoint.check(domain(f"protocol='rbd' name='{name}'"), RECORDS, VM_DIR, told(disks))
    with pytest.raises(ForeignCheckpoint):
        checkpoint.check(domain("protocol='rbd' name='one/one-13'"), RECORDS, VM_DIR, told(disks))
