# SPDX-License-Identifier: Apache-2.0
"""The domain in a checkpoint, which a host wrote that need not be trusted, against oned and the records of
the VM's disks.
"""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from semishared.errors import BadRecord, ForeignCheckpoint
from semishared.model.disk.record import Record
from semishared.model.exchange import Exchange, Here, drive
from semishared.model.vm.hypervisor_steps import Recorded
from semishared.plan.vm import checkpoint, hypervisor

STORE, VM_DIR = "/var/lib/one/datastores/100", "/var/lib/one//datastores/101/7"
ACCESS: Dict[str, Any] = {
    "kind": "rbd",
    "user": "libvirt",
    "reader": "libvirt",
    "bridge_user": "libvirt",
    "conf": "",
    "hosts": [],
    "data_pool": "",
    "secret": "0" * 8 + "-0000-4000-8000-" + "0" * 12,
}


def record(disk: int, how: str, place: str, path: str, source: str, **more: Any) -> Record:
    image = {
        "store": 100,
        "id": 4,
        "format": "raw",
        "source": source,
        "generation": "",
        **more.pop("image", {}),
    }
    data = {
        "version": 1,
        "disk": disk,
        "place": place,
        "how": how,
        "format": "raw",
        "path": path,
        "readonly": False,
        "image": image,
    }
    return Record.from_data({**data, **more})


RECORDS = {
    0: record(0, "in-place", "shared", f"{STORE}/.semishared/abc/image", f"{STORE}/abc"),
    1: record(1, "overlay", "local", f"{VM_DIR}/disk.1.snap/0", f"{STORE}/def", format="qcow2"),
    2: record(
        2,
        "store-clone",
        "shared",
        f"{STORE}/.semishared/def/clones/7-2.snap/1",
        f"{STORE}/def",
        format="qcow2",
    ),
    3: record(
        3,
        "in-place",
        "shared",
        "",
        "one/one-9",
        image={"access": ACCESS},
        network={
            "protocol": "rbd",
            "name": "one/one-9",
            "hosts": [],
            "user": "libvirt",
            "secret": ACCESS["secret"],
            "conf": "",
        },
    ),
}
OURS = [
    f"file='{STORE}/.semishared/abc/image'",
    f"file='{VM_DIR}/disk.1'",
    "file='/var/lib/one/datastores/103/7/disk.1.snap/4'",
    f"file='{STORE}/.semishared/def/clones/7-2.snap/0'",
    "protocol='rbd' name='one/one-9'",
    f"file='{VM_DIR}/disk.5' index='3'",
]
OTHERS = [
    f"file='{STORE}/of-others'",
    f"file='{STORE}/abc'",
    "file='/var/lib/one/datastores/101/8/disk.0'",
    "file='/etc/shadow'",
    "dev='/dev/sda'",
    f"file='{VM_DIR}/../8/disk.0'",
    f"file='{STORE}/.semishared/def/clones/8-2.snap/0'",
    "protocol='rbd' name='one/one-66'",
    "protocol='nbd' name='x'",
    "pool='default' volume='x'",
    "dir='/'",
    f"file='{VM_DIR}/disk.1' dev='/dev/sda'",
    f"file='{VM_DIR}/disk.1' protocol='nbd' name='x'",
    f"file='{VM_DIR}/disk.9'",
    f"file='{STORE}/.semishared/abc/evil/7/disk.1'",
    "file='/home/x/101/7/disk.1'",
    "protocol='nbd' name='one/one-9'",
]


def domain(*sources: str, name: str = "one-7", more: str = "") -> bytes:
    disks = "".join(f"<disk><source {source}/><target dev='vda'/></disk>" for source in sources)
    return (
        f"<domain><name>{name}</name><uuid>u-u</uuid><devices><disk><target "
        f"dev='hdc'/></disk>{disks}{more}</devices></domain>"
    ).encode()


def told(disks: str = "", deploy_id: str = "one-7") -> Any:
    context = "<CONTEXT><DISK_ID>5</DISK_ID></CONTEXT>"
    text = f"<VM><ID>7</ID><DEPLOY_ID>{deploy_id}</DEPLOY_ID><TEMPLATE>{disks}{context}</TEMPLATE></VM>"
    return checkpoint.Told.parse(f"<VMM_DRIVER_ACTION_DATA>{text}</VMM_DRIVER_ACTION_DATA>".encode())


@pytest.mark.parametrize("oned", [None, told()], ids=["", "told"])
@pytest.mark.parametrize("source", OURS)
def test_what_is_the_vm_s_is_resumed(source: str, oned: Any) -> None:
    checkpoint.check(domain(source), RECORDS, VM_DIR, oned)


@pytest.mark.fault(
    26, "a checkpoint that opens what is not the VM's is not resumed, and the refusal names it"
)
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


def disk(
    source: str, driver: str = "<driver name='qemu' type='raw'/>", more: str = "", inside: str = ""
) -> bytes:
    text = (
        f"<disk type='file' device='disk'>{driver}<source {source}>{inside}</source>{more}<target "
        f"dev='vda'/></disk>"
    )
    return f"<domain><name>one-7</name><devices>{text}</devices></domain>".encode()


QCOW2, BELOW = (
    "<driver name='qemu' type='qcow2'/>",
    "<backingStore type='file'><format type='raw'/><source file='/etc/shadow'/></backingStore>",
)
REACHED = f"<auth username='libvirt'><secret type='ceph' uuid='{ACCESS['secret']}'/></auth>"


@pytest.mark.fault(
    26,
    "a disk of a checkpoint is opened in the format, over what, as whom and by what configuration "
    "its record says",
)
@pytest.mark.parametrize("number", [0, 3, 5], ids=["in place", "network", "context"])
def test_a_disk_of_a_checkpoint_is_opened_as_its_record_says(number: int) -> None:
    source, more = OURS[{0: 0, 3: 4, 5: 5}[number]], REACHED if number == 3 else ""
    true = disk(source, more=more)
    assert checkpoint.with_active_layers(true, RECORDS, context=5) == true, "nothing is changed that is right"
    other = {
        "format": disk(source, QCOW2, more),
        "no format": disk(source, "", more),
        "below": disk(source, more=more + BELOW),
        "no format, below": disk(source, "", more + BELOW),
    }
    if number == 3:
        other["as whom"] = disk(source, more=REACHED.replace("libvirt", "admin"))
        other["configuration"] = disk(
            source, more=more, inside="<config file='/var/lib/one/datastores/101/7/evil.conf'/>"
        )
        other["monitors"] = disk(source, more=more, inside="<host name='evil'/>")
    for what, text in other.items():
        found = checkpoint.with_active_layers(text, RECORDS, context=5).decode()
        assert (
            "shadow" not in found and "evil" not in found and "admin" not in found and "qcow2" not in found
        ), what
        assert found.count("<driver name='qemu' type='raw'/>") == 1, what


@pytest.mark.fault(26, "what a VM only reads it only reads when it is resumed")
def test_what_is_only_read_stays_so() -> None:
    records = {0: RECORDS[0]._replace(readonly=True)}
    assert b"<readonly/>" in checkpoint.with_active_layers(disk(OURS[0]), records)
    whole = disk(OURS[0], more="<readonly/>")
    assert checkpoint.with_active_layers(whole, records) == whole


def test_a_checkpoint_names_no_second_file_of_a_disk() -> None:
    inside = "<dataStore type='file'><format type='raw'/><source file='/etc/shadow'/></dataStore>"
    with pytest.raises(ForeignCheckpoint, match="second file"):
        checkpoint.check(disk(OURS[1], QCOW2, inside=inside), RECORDS, VM_DIR, told())
    with pytest.raises(ForeignCheckpoint, match="two of <source>"):
        checkpoint.check(disk(OURS[1], more=f"<source {OURS[0]}/>"), RECORDS, VM_DIR, told())


@pytest.mark.fault(
    26,
    "a VM one of whose disks came without a record is not resumed from a checkpoint that nothing "
    "can be compared with",
)
def test_no_checkpoint_is_read_without_the_records_of_its_disks() -> None:
    disks = "<DISK><DISK_ID>0</DISK_ID><TM_MAD>semishared</TM_MAD></DISK><DISK><DISK_ID>1</DISK_ID><TM_MAD>ssh</TM_MAD></DISK>"  # noqa: E501
    message = (
        f"<VMM_DRIVER_ACTION_DATA><VM><ID>7</ID><TEMPLATE>{disks}</TEMPLATE></VM></VMM_DRIVER_ACTION_DATA>"
    )
    asked = hypervisor.Asked("restore", (f"{VM_DIR}/checkpoint", "h1", "one-7", "7", "101"), message.encode())
    done: List[str] = []

    def do(wanted: Exchange) -> Any:
        assert isinstance(wanted, Here)
        done.append(type(wanted.step).__name__)
        return Recorded([]) if done[-1] == "ReadRecords" else "" if done[-1] == "CheckEpoch" else []

    with pytest.raises(BadRecord, match="disk 0 of"):
        drive(hypervisor.planned(asked), do)
    assert "BecomeStock" not in done
