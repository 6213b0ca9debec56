# SPDX-License-Identifier: Apache-2.0
"""No job of QEMU writes elsewhere what it decrypts for a running guest, whoever asks for it: told by the XML
of the domain.

libvirt's own test driver has the domain, so only semishared can refuse anything here. Real guests:
tests/pool/test_running_encrypted.py.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from semishared.model.disk import names as disk_names
from semishared.model.disk.place import COPY
from semishared.model.disk.record import Record
from tools.test_libvirt import ended

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libvirt") is None, reason="no python3-libvirt")
SECRET = (
    "<encryption format='luks'><secret type='passphrase' "
    "uuid='8f2c1a4e-5d0b-4b3e-9a57-0c6f3e2d1b40'/></encryption>"
)
DISKS = """<disk type='file' device='disk'><driver name='qemu' type='raw'/>
  <source file='{top}/disk.0'>{secret}</source><target dev='vda'/></disk>
<disk type='file' device='disk'><driver name='qemu' type='raw'/>
  <source file='{top}/disk.1'/>{secret}<target dev='vdb'/></disk>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{top}/disk.2'/>
  <backingStore type='file'><format type='raw'/><source file='{top}/below'>{secret}</source><backingStore/></backingStore>
  <target dev='vdc'/></disk>
<disk type='file' device='disk'><driver name='qemu' type='raw'/>
  <source file='{top}/disk.3'/><target dev='vdd'/></disk>"""  # noqa: E501
"""Encrypted as OpenNebula says it, as libvirt did before, below an overlay; and one that is not."""
NODE = """<node><domain type='test'><name>one-5</name><memory>32768</memory><os><type>hvm</type></os>
<devices>{disks}</devices></domain></node>"""
BEGIN = """
from semishared.disk import device_move, records
from semishared.errors import SemisharedError
from semishared.guest import active_layer, backup_job, block_jobs, domain, go_over, virsh, libvirtd
from semishared.model.device.names import Link
from semishared.model.refs import DiskRef
from semishared.model.device.steps import MoveLayers
virsh._site.append(virsh.Site(uri={uri!r}))
top = {top!r}
def said(do, *words):
    try: do(*words)
    except SemisharedError as e: return e.id, e.detail
    return "", ""
def disk(number): return DiskRef(5, number, top)
"""


def asked(directory: Path, code: str) -> Any:
    """Return what code says of the guest whose disks lie in a directory."""
    (directory / "node.xml").write_text(NODE.format(disks=DISKS.format(top=directory, secret=SECRET)))
    status, said, errors = ended(BEGIN.format(uri=f"test://{directory}/node.xml", top=str(directory)) + code)
    assert (status, errors) == (0, ""), errors
    return json.loads(said)


@pytest.fixture()
def vm_dir(tmp_path: Path) -> Path:
    """Return the directory of a VM with a disk that is encrypted, and one that is not: 0 and 3."""
    directory = tmp_path / "101" / "5"
    (directory / ".semishared").mkdir(parents=True)
    for number in (0, 3):
        path = directory / f"disk.{number}"
        path.write_bytes(bytes(1 << 20))
        record = Record(number, COPY, "raw", str(path))
        Path(disk_names.record(str(directory), number)).write_text(json.dumps(record.to_data()))
    return directory


def test_which_disks_are_decrypted_the_xml_says_wherever_it_does(vm_dir: Path) -> None:
    assert asked(vm_dir, "import json; print(json.dumps(sorted(domain.encrypted('one-5'))))") == [
        "vda",
        "vdb",
        "vdc",
    ]


def test_every_job_that_writes_a_disk_elsewhere_is_refused(vm_dir: Path) -> None:
    code = """
import json
copy = lambda target: block_jobs.copy(disk(0), 'one-5', target, top + '/saved', 'qcow2', 'NONE')
switch = lambda target: block_jobs.switch(disk(0), 'one-5', target, top + '/1', 'NONE')
pull = lambda target: block_jobs.pull(disk(0), 'one-5', target, '', top + '/disk.0', block_jobs.NOTHING)
jobs = {'copy': copy, 'switch': switch, 'pull': pull, 'mirror': lambda target: block_jobs.mirror('one-5', target, top + '/other', 'raw'),
        'backup': lambda target: backup_job.BackupJob('one-5', None).begin({target: top + '/backup'}, {}, '')}
found = {what: {target: said(job, target)[0] for target in ('vda', 'vdb', 'vdc')} for what, job in jobs.items()}
found['mirror']['plain'] = said(jobs['mirror'], 'vdd')
print(json.dumps(found))
"""  # noqa: E501
    before = sorted(path.name for path in vm_dir.rglob("*"))
    found = asked(vm_dir, code)
    # What is not encrypted is refused by the driver, which knows no such jobs: it was asked.
    id, detail = found["mirror"].pop("plain")
    assert id != "SS074" and "blockcopy vdd" in detail
    assert {word for said in found.values() for word in said.values()} == {"SS074"}, found
    assert sorted(path.name for path in vm_dir.rglob("*")) == sorted([*before, "node.xml"]), (
        "nothing was made, nor noted"
    )


def test_no_delta_is_put_on_an_encrypted_disk_nor_on_the_others_with_it(vm_dir: Path) -> None:
    code = """
import json
own = [records.record_of(disk(number)) for number in (0, 3)]
print(json.dumps(said(go_over.begin, top, 'one-5', own)))
"""
    before = sorted(path.name for path in vm_dir.rglob("*"))
    id, detail = asked(vm_dir, code)
    assert id == "SS074" and "disk vda of one-5" in detail
    assert sorted(path.name for path in vm_dir.rglob("*")) == sorted([*before, "node.xml"])


def test_a_disk_goes_to_another_device_under_its_guest_unless_it_is_encrypted(vm_dir: Path) -> None:
    code = """
import json
links = [Link(uuid, 'layers', '5-0-0123456789ab') for uuid in ('a', 'b')]
print(json.dumps([said(device_move._check, MoveLayers(disk(number), 'one-5', links[0].name, 'b', 0), top, *links) for number in (0, 3)]))
"""  # noqa: E501
    (id, detail), plain = asked(vm_dir, code)
    assert id == "SS164" and "disk 0 of VM 5 is encrypted (LUKS_SECRET)" in detail
    assert plain == ["", ""]
