# SPDX-License-Identifier: Apache-2.0
"""The installed hypervisor directory, called as one_vmm_exec calls it, beside stock scripts that record what
they get.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, NamedTuple, Optional
from xml.etree import ElementTree

import pytest

from rehearsing import things
from semishared.guest.virsh import Site
from tools.world import lay_over

ROOT = Path(__file__).resolve().parents[2]
RECORDER = """#!/bin/sh
here=$(dirname "$0")
printf '%s\\0' "$0" "$@" >"$here/argv"
cat >"$here/stdin"
printf '75b33178-6a6b-4667-b9b8-64da283038a7\\n'
exit 37
"""
DOMAIN = """<domain type='kvm'>
	<name>one-7</name>
	<devices>
		<disk type='file' device='disk'>
			<source file='{0}/disk.0'/>
			<target dev='vda' bus='virtio'/>
			<driver name='qemu' type='raw' cache='none' discard='unmap'/>
		</disk>
		<disk type='file' device='disk'>
			<source file='{0}/disk.1'/>
			<target dev='vdb' bus='virtio'/>
			<driver name='qemu' type='raw' cache='none' discard='unmap'/>
		</disk>
		<disk type='file' device='cdrom'>
			<source file='{0}/disk.2'/>
			<target dev='sda' bus='sata'/>
			<readonly/>
			<driver name='qemu' type='raw' cache='none'/>
		</disk>
	</devices>
	<metadata><one:vm xmlns:one="http://opennebula.org/xmlns/libvirt/1.0"><one:name><![CDATA[<&>]]></one:name></one:vm></metadata>
</domain>

"""


SECRET = "00000000-0000-4000-8000-0000000000cc"


class Got(NamedTuple):
    """What the stock script got."""

    argv: list[str]
    stdin: bytes


@functools.cache
def installed() -> tempfile.TemporaryDirectory[str]:
    """Return a directory with `one`: the drivers beside actions of the stock driver that record how they are
    called.
    """
    top = tempfile.TemporaryDirectory(prefix="installed-")
    kvm = Path(top.name) / "one" / "vmm" / "kvm"
    kvm.mkdir(parents=True)
    for action in (
        "deploy",
        "attach_disk",
        "detach_disk",
        "migrate",
        "save",
        "restore",
        "snapshot_create",
        "snapshot_revert",
        "cancel",
    ):
        (kvm / action).write_text(RECORDER)
        (kvm / action).chmod(0o755)
    subprocess.run(
        [str(ROOT / "install.sh"), "--remotes", f"{top.name}/one"], check=True, capture_output=True
    )
    return top


class Host:
    """A host's /var/tmp/one and datastores, in a directory."""

    def __init__(self, top: Path) -> None:
        self.remotes = top / "one"
        self.kvm = self.remotes / "vmm" / "kvm"
        shutil.copytree(f"{installed().name}/one", self.remotes, symlinks=True)
        self.stores = top / "data stores"
        self.vm_dir = self.stores / "101" / "7"
        self.vm_dir.mkdir(parents=True)
        self.spelled = f"{self.stores}//101/7"
        """The VM directory as oned spells it."""
        self.image = self.stores / "100" / ".semishared" / "abc" / "image"
        self.image.parent.mkdir(parents=True)
        (self.stores / "100" / "abc").write_bytes(b"image")
        self.image.symlink_to("../../abc")

    def add_local(self, disk: int, how: str = "overlay", format: str = "qcow2", **changes: object) -> None:
        (self.vm_dir / f"disk.{disk}").write_bytes(b"disk")
        self.add_record(disk, "local", how, format, str(self.vm_dir / f"disk.{disk}"), **changes)

    def add_in_place(self, disk: int, format: str = "raw", **changes: object) -> None:
        (self.vm_dir / f"disk.{disk}").symlink_to(self.image)
        self.add_record(disk, "shared", "in-place", format, str(self.image), **changes)

    def add_record(
        self, disk: int, place: str, how: str, format: str, path: str, /, **changes: object
    ) -> None:
        record = {
            "version": 1,
            "disk": disk,
            "place": place,
            "how": how,
            "format": format,
            "path": path,
            "readonly": False,
        }
        (self.vm_dir / ".semishared").mkdir(exist_ok=True)
        (self.vm_dir / ".semishared" / f"disk.{disk}.json").write_text(json.dumps({**record, **changes}))

    def add_on_ceph(self, disk: int, how: str = "in-place", **changes: object) -> None:
        network = {
            "protocol": "rbd",
            "name": "one/one-4",
            "hosts": ["10.0.0.1:6789"],
            "user": "guests",
            "secret": SECRET,
        }
        network["conf"] = ""
        self.add_record(disk, "shared", how, "raw", "", network={**network, **changes})

    def write_vm(self, **targets: int) -> None:
        """Leave the vm.xml that oned writes before deploy."""
        disks = "".join(
            f"<DISK><DISK_ID>{number}</DISK_ID><TARGET>{target}</TARGET><TM_MAD>semishared</TM_MAD></DISK>"
            for target, number in targets.items()
        )
        (self.vm_dir / "vm.xml").write_text(f"<VM><TEMPLATE>{disks}</TEMPLATE></VM>")

    def call(self, action: str, *argv: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        for name in ("argv", "stdin"):
            (self.kvm / name).unlink(missing_ok=True)
        return subprocess.run(
            [str(self.remotes / "vmm" / "semishared" / action), *argv],
            input=stdin,
            capture_output=True,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": "/none"},
        )

    def got(self, action: str) -> Optional[Got]:
        if not (self.kvm / "argv").exists():
            return None
        name, *argv, last = (self.kvm / "argv").read_bytes().decode().split("\0")
        assert last == "" and Path(name).resolve() == self.kvm / action
        return Got(argv, (self.kvm / "stdin").read_bytes())

    def passes(self, action: str, *argv: str, stdin: bytes = b"") -> Got:
        """Call, and see that output and exit code are those of the stock script."""
        done = self.call(action, *argv, stdin=stdin)
        assert (done.returncode, done.stderr) == (37, b"")
        assert done.stdout == b"75b33178-6a6b-4667-b9b8-64da283038a7\n"
        got = self.got(action)
        assert got
        return got

    def refuses(self, action: str, *argv: str, stdin: bytes = b"") -> str:
        """Call, and see one plain line and nothing done."""
        done = self.call(action, *argv, stdin=stdin)
        assert done.returncode == 1 and done.stdout == b"" and self.got(action) is None
        lines = done.stderr.decode().splitlines()
        plain = [line for line in lines if not line.startswith(("ERROR: ", "WARN: ", "INFO: "))]
        assert len(plain) == 1 and plain[0] == lines[0], lines
        assert re.match(r"SS\d{3} [a-zA-Z]", plain[0]) and f"[{action}" in plain[0], plain
        return plain[0]

    @property
    def domain(self) -> bytes:
        return DOMAIN.format(self.spelled).encode()

    def deploy_argv(self) -> list[str]:
        return [f"{self.spelled}/deployment.0", "h1", "7", "h1"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_deploy_writes_what_the_records_say(host: Host) -> None:
    host.add_in_place(0)
    host.add_local(1)
    got = host.passes("deploy", *host.deploy_argv(), stdin=host.domain)
    wanted = host.domain.decode().replace(f"{host.spelled}/disk.0", str(host.image))
    first, second = wanted.split("<target dev='vdb'", 1)
    first += "<backingStore/>\n\t\t\t"
    wanted = first + "<target dev='vdb'" + second.replace("type='raw'", "type='qcow2'", 1)
    assert got == Got(host.deploy_argv(), wanted.encode())


def test_deploy_with_an_empty_record_directory_changes_nothing(host: Host) -> None:
    (host.vm_dir / ".semishared").mkdir()
    assert host.passes("deploy", *host.deploy_argv(), stdin=host.domain) == Got(
        host.deploy_argv(), host.domain
    )


def test_deploy_without_records_is_the_stock_one_unless_the_domain_has_a_directory(host: Host) -> None:
    assert host.passes("deploy", *host.deploy_argv(), stdin=host.domain) == Got(
        host.deploy_argv(), host.domain
    )
    source = f"{host.stores}/shares/share-42"
    shared = (
        f"<filesystem><driver type='virtiofs'/><source dir='{source}'/><target "
        f"dir='a'/></filesystem></devices>"
    )
    domain = host.domain.replace(b"</devices>", shared.encode())
    # Neither without a vm.xml, nor with one that says nothing.
    assert "SS042" in host.refuses("deploy", *host.deploy_argv(), stdin=domain)
    (host.vm_dir / "vm.xml").write_text("")
    assert "SS001" in host.refuses("deploy", *host.deploy_argv(), stdin=domain)
    (host.vm_dir / "vm.xml").write_text("<VM/>")
    assert "share-42 is called like a share" in host.refuses("deploy", *host.deploy_argv(), stdin=domain)
    theirs = domain.replace(b"share-42", b"theirs")
    assert host.passes("deploy", *host.deploy_argv(), stdin=theirs) == Got(host.deploy_argv(), theirs)


def test_deploy_first_puts_right_what_died_with_the_guests_last_run(host: Host) -> None:
    """A pull had ended, and QEMU had named the new backing file, but not yet written where the pulled data
    is.
    """
    folder = host.vm_dir / "disk.0.snap"
    folder.mkdir()
    for layer, below in ((0, ""), (1, "0"), (2, "0")):
        words = ["-b", below, "-F", "qcow2"] if below else []
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", *words, str(layer), "1M"], check=True, cwd=folder
        )
    (host.vm_dir / "disk.0").symlink_to("disk.0.snap/2")
    host.add_record(0, "local", "copy", "qcow2", str(folder / "2"))
    notes = [host.vm_dir / ".semishared" / name for name in ("job.0.json", "frozen.json")]
    notes[0].write_text(
        json.dumps({"target": "vda", "run": "5", "layer": "2", "below": "1", "below_format": "qcow2"})
    )
    notes[1].write_text(json.dumps({"how": "SUSPEND", "run": "5"}))
    host.passes("deploy", *host.deploy_argv(), stdin=host.domain)
    assert not [note for note in notes if note.exists()]
    said = subprocess.check_output(["qemu-img", "info", "--output=json", str(folder / "2")])
    assert json.loads(said)["backing-filename"] == "1"


def test_deploy_of_a_large_domain(host: Host) -> None:
    host.add_local(0)
    stdin = host.domain.replace(b"<name>", b"<!--" + b"x" * 3_000_000 + b"--><name>")
    got = host.passes("deploy", *host.deploy_argv(), stdin=stdin)
    assert len(got.stdin) == len(stdin) + len("qcow2") - len("raw") + len("\n\t\t\t<backingStore/>")


def test_deploy_refuses_a_record_that_cannot_be_believed(host: Host) -> None:
    host.add_local(0, version=2)
    assert "newer" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    record = host.vm_dir / ".semishared" / "disk.0.json"
    record.write_text("{")
    assert "disk 0" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    record.unlink()
    record.mkdir()
    assert "disk 0" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    record.rmdir()
    record.symlink_to("/proc/self/mem")
    assert "disk 0" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    shutil.rmtree(host.vm_dir / ".semishared")
    (host.vm_dir / ".semishared").write_text("")
    assert "disk 0" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def test_deploy_refuses_a_disk_of_ours_that_lost_its_record(host: Host) -> None:
    host.add_local(0)
    vm = "<VM><TEMPLATE><DISK><DISK_ID>1</DISK_ID><TM_MAD>{}</TM_MAD></DISK></TEMPLATE></VM>"
    (host.vm_dir / "vm.xml").write_text(vm.format("semishared"))
    assert "disk 1 of" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    (host.vm_dir / "vm.xml").write_text(vm.format("shared"))
    host.passes("deploy", *host.deploy_argv(), stdin=host.domain)


def test_deploy_refuses_a_missing_file(host: Host) -> None:
    host.add_local(0)
    host.add_in_place(1)
    (host.vm_dir / "disk.0").unlink()
    assert "VM 7 disk 0 is not there" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    (host.vm_dir / "disk.0").touch()
    (host.stores / "100" / "abc").unlink()
    assert "100/.semishared/abc/image is not there" in host.refuses(
        "deploy", *host.deploy_argv(), stdin=host.domain
    )
    (host.vm_dir / "disk.1").unlink()
    assert "no link is there" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


@pytest.fixture()
def clone(host: Host) -> Path:
    """A clone on the store as disk 1, with one snapshot below what the guest writes to; the path of that."""
    side = host.image.parent
    snap = side / "clones" / "7-1.snap"
    snap.mkdir(parents=True)
    (side / "clones" / "7-1").symlink_to("7-1.snap/1")
    (host.vm_dir / "disk.1").symlink_to(side / "clones" / "7-1")
    host.add_record(1, "shared", "store-clone", "qcow2", str(snap / "1"))
    lay_over(snap / "0", str(host.image))
    lay_over(snap / "1", "0", "qcow2")
    return snap / "1"


def test_deploy_says_all_that_a_clone_on_the_store_lies_over(host: Host, clone: Path) -> None:
    got = host.passes("deploy", *host.deploy_argv(), stdin=host.domain).stdin.decode()
    assert f"<source file='{clone.parent}/0'/>" in got
    assert f"<source file='{host.image}'/>" in got


@pytest.mark.fault(
    6, "what a clone on the store lies over is a layer of it or its image, or no guest gets it"
)
@pytest.mark.parametrize("layer", ["0", "1"])
def test_deploy_refuses_a_clone_on_the_store_over_anything_else(
    host: Host, clone: Path, layer: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    for name in (str(tmp_path / "secret"), "../../../../abc"):
        (clone.parent / layer).unlink()
        lay_over(clone.parent / layer, name, "qcow2" if name.isdigit() else "raw")
        said = host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
        assert f"lies over {name}" in said or f"lies over {clone.parent}/{name}" in said


def test_deploy_refuses_a_clone_on_the_store_whose_image_lies_over_a_file(
    host: Host, clone: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    lay_over(host.stores / "100" / "abc", str(tmp_path / "secret"))
    for name, below in (("0", str(host.image)), ("1", "0")):
        (clone.parent / name).unlink()
        lay_over(clone.parent / name, below, "qcow2")
    assert f"lies over {tmp_path}/secret, which is neither" in host.refuses(
        "deploy", *host.deploy_argv(), stdin=host.domain
    )


@pytest.fixture()
def remote(host: Host) -> Path:
    """A disk on the host over the image on the store as disk 1, with one snapshot; the path of its active
    layer.
    """
    snap = host.vm_dir / "disk.1.snap"
    snap.mkdir()
    (host.vm_dir / "disk.1").symlink_to("disk.1.snap/1")
    image = {
        "store": 100,
        "id": 4,
        "format": "raw",
        "source": str(host.stores / "100" / "abc"),
        "generation": "",
    }
    host.add_record(1, "local", "remote-first", "qcow2", str(snap / "1"), image=image)
    lay_over(snap / "0", str(host.image))
    lay_over(snap / "1", "0", "qcow2")
    return snap / "1"


def test_deploy_says_all_that_a_disk_over_the_store_lies_over(host: Host, remote: Path) -> None:
    got = host.passes("deploy", *host.deploy_argv(), stdin=host.domain).stdin.decode()
    chain = (
        f"<backingStore type='file'><format type='raw'/><source "
        f"file='{host.image}'/><backingStore/></backingStore></backingStore>"
    )
    assert f"<source file='{host.spelled}/disk.1.snap/0'/>{chain}" in got


def test_deploy_of_a_disk_over_a_store_that_is_not_there_says_so_in_a_line(host: Host, remote: Path) -> None:
    (host.stores / "100").rename(host.stores / "away")
    said = host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    assert (
        f"SS024 VM 7 disk 1 reads from data stores/100/abc, which {os.uname().nodename} does not have" in said
        and "is not mounted" in said
    )
    (host.stores / "away").rename(host.stores / "100")
    (host.stores / "100" / "abc").unlink()
    assert "is not there" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def test_deploy_refuses_a_disk_over_anything_but_the_image_of_its_record(
    host: Host, remote: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"secret" * 1000)
    lay_over(remote.parent / "0", str(tmp_path / "secret"))
    assert "which is neither" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(remote.parent / "0"), "1M"], check=True)
    assert "does not lie over" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    lay_over(remote.parent / "0", "nbd://127.0.0.1/x")
    assert "does not lie over a file" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    lay_over(remote.parent / "0", str(host.image))
    host.image.unlink()
    host.image.symlink_to(tmp_path / "secret")
    assert "leads to" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def test_deploy_does_not_wait_for_a_fifo_in_a_chain(host: Host, clone: Path) -> None:
    (clone.parent / "0").unlink()
    os.mkfifo(clone.parent / "0")
    lay_over(clone.parent / "2", "0", "qcow2")
    (clone.parent / "2").replace(clone)
    assert "no regular file" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def test_deploy_refuses_a_disk_that_is_not_what_its_record_says(host: Host) -> None:
    host.add_local(0)
    (host.vm_dir / "disk.0").unlink()
    (host.vm_dir / "disk.0").symlink_to(host.image)
    assert "is a link to" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)
    (host.vm_dir / "disk.0").unlink()
    (host.vm_dir / ".semishared" / "disk.0.json").unlink()
    host.add_in_place(0, path="/var/lib/one/datastores/100/.semishared/other/image")
    assert "other/image" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def on_ceph(domain: bytes) -> bytes:
    """Return `domain` with its disk 1 as oned writes one of an RBD datastore."""
    text, count = re.subn(
        rb"<disk type='file'( device='disk'>\s*)<source file='[^']*/disk\.1'/>",
        rb"<disk type='network'\1<source protocol='rbd' name='one/one-4-7-1'><host "
        rb"name='10.0.0.1' port='6789'/></source>"
        rb"<auth username='guests'><secret type='ceph' uuid='00000000-0000-4000-8000-0000000000cc'/></auth>",
        domain,
    )
    assert count == 1
    return text


def test_deploy_of_a_local_disk_and_one_on_ceph_whatever_oned_takes_them_for(host: Host) -> None:
    host.add_local(1)
    host.add_on_ceph(0)
    host.write_vm(vda=0, vdb=1)
    got = host.passes("deploy", *host.deploy_argv(), stdin=on_ceph(host.domain))
    disks = ElementTree.fromstring(got.stdin).findall("devices/disk")
    assert [disk.get("type") for disk in disks] == ["network", "file", "file"]
    sources = [disk.find("source").attrib for disk in disks]  # type: ignore[union-attr]
    assert sources[:2] == [{"protocol": "rbd", "name": "one/one-4"}, {"file": f"{host.spelled}/disk.1"}]
    assert [disk.find("auth") is not None for disk in disks] == [True, False, False]


def test_deploy_refuses_to_guess_which_disk_on_ceph_is_which(host: Host) -> None:
    host.add_on_ceph(1)
    assert "without vm.xml" in host.refuses("deploy", *host.deploy_argv(), stdin=on_ceph(host.domain))
    host.write_vm(vda=0, vdb=2)
    assert "disk 0 of" in host.refuses("deploy", *host.deploy_argv(), stdin=on_ceph(host.domain))


def test_deploy_refuses_a_disk_on_ceph_without_a_key(host: Host) -> None:
    host.add_on_ceph(1, secret="")
    host.write_vm(vdb=1)
    assert "secret" in host.refuses("deploy", *host.deploy_argv(), stdin=on_ceph(host.domain))


def test_attach_of_a_disk_on_ceph(host: Host) -> None:
    host.add_on_ceph(1, how="store-clone", name="one/one-4-7-1")
    argv = attach_argv(host, 1, "<SOURCE>one/one-4</SOURCE><CLONE>YES</CLONE><CEPH_USER/>")
    got = host.passes("attach_disk", *argv)
    assert got.argv[:4] == argv[:4]
    (disk,) = ElementTree.fromstring(base64.b64decode(got.argv[4])).findall("VM/TEMPLATE/DISK[ATTACH='YES']")
    wanted = {
        "SOURCE": "one/one-4-7-1",
        "CLONE": "NO",
        "CEPH_USER": "guests",
        "CEPH_SECRET": SECRET,
        "TYPE": "RBD",
    }
    assert {name: disk.findtext(name) for name in wanted} == wanted


@pytest.mark.parametrize("stdin", [b"", b"<domain>", b"<!DOCTYPE domain><domain/>", b"<a/>"])
def test_deploy_refuses_what_is_no_domain(host: Host, stdin: bytes) -> None:
    host.add_local(0)
    assert "SS001" in host.refuses("deploy", *host.deploy_argv(), stdin=stdin)


def test_deploy_of_a_moved_vm_names_the_new_directory(host: Host) -> None:
    host.add_local(0, path="/var/lib/one/datastores/103/7/disk.0")
    got = host.passes("deploy", *host.deploy_argv(), stdin=host.domain)
    wanted = host.domain.replace(b"type='raw'", b"type='qcow2'", 1)
    assert got.stdin == wanted.replace(b"disk.0'/>\n\t\t\t", b"disk.0'/>\n\t\t\t<backingStore/>\n\t\t\t", 1)


def test_failing_stock_script_is_named(host: Host) -> None:
    host.add_local(0)
    (host.kvm / "deploy").unlink()
    assert "kvm/deploy" in host.refuses("deploy", *host.deploy_argv(), stdin=host.domain)


def attach_argv(host: Host, number: int, more: str = "", attach: str = "YES") -> list[str]:
    disk = (
        f"<DISK><ATTACH><![CDATA[{attach}]]></ATTACH><DISK_ID><![CDATA[{number}]]></DISK_ID><DRIVER><![CDATA[raw]]></DRIVER>"
        f"<FORMAT><![CDATA[raw]]></FORMAT><TYPE><![CDATA[FILE]]></TYPE><DISK_TYPE><![CDATA[FILE]]></DISK_TYPE>{more}</DISK>"
    )
    text = f"<VMM_DRIVER_ACTION_DATA><VM><ID>7</ID><TEMPLATE>{disk}</TEMPLATE></VM></VMM_DRIVER_ACTION_DATA>"
    return [
        "252e",
        f"{host.spelled}/disk.{number}",
        "vde",
        "4",
        base64.b64encode(text.encode()).decode(),
        "7",
        "h1",
    ]


def test_attach_of_an_overlay_over_a_raw_image(host: Host) -> None:
    host.add_local(5)
    argv = attach_argv(host, 5)
    got = host.passes("attach_disk", *argv, stdin=b"message")
    assert got.argv[:4] + got.argv[5:] == argv[:4] + argv[5:] and got.stdin == b"message"
    text = base64.b64decode(argv[4]).decode().replace("<![CDATA[raw]]>", "qcow2")
    assert base64.b64decode(got.argv[4]).decode() == text.replace(
        "<DISK_TYPE><![CDATA[FILE]]>", "<DISK_TYPE><![CDATA[FILE]]>"
    )


def test_attach_in_place_names_what_deploy_would(host: Host) -> None:
    host.add_in_place(5)
    argv = attach_argv(host, 5)
    got = host.passes("attach_disk", *argv)
    assert got.argv == [argv[0], str(host.image), *argv[2:4], got.argv[4], *argv[5:]]
    assert b"<DRIVER><![CDATA[raw]]></DRIVER>" in base64.b64decode(got.argv[4])


def test_attach_of_a_foreign_disk_to_a_vm_of_ours_is_untouched(host: Host) -> None:
    host.add_local(0)
    argv = attach_argv(host, 5, "<TM_MAD>shared</TM_MAD>")
    assert host.passes("attach_disk", *argv, stdin=b"x") == Got(argv, b"x")


def test_detach_is_the_stock_scripts_business_unless_the_guest_is_seen_without_the_disk(host: Host) -> None:
    """Nothing is seen here: no such domain runs. tests/upgrade has a guest that has lost the disk."""
    host.add_local(5)
    argv = ["252e", f"{host.spelled}/disk.5", "vde", "4", "7", "h1"]
    assert host.passes("detach_disk", *argv, stdin=b"x") == Got(argv, b"x")
    assert "arguments" in host.refuses("detach_disk", *argv[:2])


AT_WORK = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from semishared.guest import job_lock
job_lock.take(7, sys.argv[2])
print("at work", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "action", ["deploy", "restore", "save", "detach_disk", "snapshot_create", "snapshot_revert"]
)
def test_who_is_at_work_on_the_disks_without_oneds_knowing_is_ended(host: Host, action: str) -> None:
    """As `semishared detach` is: it would go on in disks of which OpenNebula decides now."""
    argv, stdin = REHEARSED[action][0](host)
    words = [sys.executable, "-I", "-c", AT_WORK, str(host.remotes / "lib"), str(host.vm_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as other:
        try:
            assert other.stdout and other.stdout.readline() == b"at work\n"
            host.passes(action, *argv, stdin=stdin)
            assert other.wait(30) == -signal.SIGKILL
        finally:
            other.kill()


def test_attach_refuses(host: Host) -> None:
    host.add_local(0)
    assert "no record" in host.refuses("attach_disk", *attach_argv(host, 5, "<TM_MAD>semishared</TM_MAD>"))
    host.add_local(5)
    argv = attach_argv(host, 5)
    assert "not disk 0" in host.refuses("attach_disk", *argv[:4], attach_argv(host, 0)[4], *argv[5:])
    assert "0 disks to attach" in host.refuses("attach_disk", *attach_argv(host, 5, attach="NO"))
    assert "not base64" in host.refuses("attach_disk", *argv[:4], "@@@", *argv[5:])
    assert "arguments" in host.refuses("attach_disk", *argv[:4])
    (host.vm_dir / "disk.5").unlink()
    assert "is not there" in host.refuses("attach_disk", *argv)


MIGRATE_ARGV = ["252e", "h2", "h1", "7", "h1"]


def migrate_stdin(host: Host, disks: str = "") -> bytes:
    return (
        f"<VMM_DRIVER_ACTION_DATA><HOST>h1</HOST><MIGR_HOST>h2</MIGR_HOST><DISK_TARGET_PATH>{host.spelled}</DISK_TARGET_PATH>"
        f"<VM><ID>7</ID><TEMPLATE>{disks}<CONTEXT><DISK_ID><![CDATA[2]]></DISK_ID></CONTEXT></TEMPLATE></VM>"
        f"<DATASTORE><BASE_PATH><![CDATA[{host.stores}//101]]></BASE_PATH><TEMPLATE><SHARED>NO</SHARED></TEMPLATE></DATASTORE>"
        "</VMM_DRIVER_ACTION_DATA>"
    ).encode()


def test_migration_of_a_vm_with_foreign_disks_only_is_untouched(host: Host) -> None:
    (host.vm_dir / ".semishared").mkdir()
    stdin = migrate_stdin(host, "<DISK><DISK_ID>0</DISK_ID><TM_MAD>shared</TM_MAD></DISK>")
    assert host.passes("migrate", *MIGRATE_ARGV, stdin=stdin) == Got(MIGRATE_ARGV, stdin)


def libvirt(host: Host, *disks: str) -> None:
    """Give the host a libvirt (its test driver) that runs the VM, and a kvmrc that leads there."""
    node = host.remotes / "node.xml"
    domain = (
        "<domain type='test'><name>252e</name><uuid>75b33178-6a6b-4667-b9b8-64da283038a7</uuid><memory>8192</memory>"  # noqa: E501
        f"<os><type>hvm</type></os><devices>{''.join(disks)}</devices></domain>"
    )
    node.write_text(f"<node>{domain}</node>")
    kvmrc = host.remotes / "etc" / "vmm" / "kvm" / "kvmrc"
    kvmrc.parent.mkdir(parents=True)
    kvmrc.write_text(
        f"export LIBVIRT_URI='test://{node}'\nexport "
        f"QEMU_PROTOCOL=qemu+unix\nMIGRATE_OPTIONS='--verbose \"--timeout\" 5'\n"
    )


def live_disk(path: object, dev: str, more: str = "") -> str:
    return (
        f"<disk type='file' device='disk'><source file='{path}'/><target dev='{dev}' "
        f"bus='virtio'/>{more}</disk>"
    )


needs_libvirt = pytest.mark.skipif(importlib.util.find_spec("libvirt") is None, reason="no python3-libvirt")


@needs_libvirt
@pytest.mark.parametrize("how", ["overlay", "copy", "volatile"])
def test_migration_with_a_local_disk_names_it_and_does_nothing(host: Host, how: str) -> None:
    host.add_in_place(0)
    host.add_local(1, how)
    libvirt(host, live_disk(host.image, "vda"), live_disk(f"{host.spelled}/disk.1", "vdb"))
    said = host.refuses("migrate", *MIGRATE_ARGV, stdin=migrate_stdin(host))
    assert f"disk 1 ({how})" in said and "SS041" in said


@needs_libvirt
def test_migration_with_an_unknown_file_names_it_and_does_nothing(host: Host) -> None:
    host.add_in_place(0)
    foreign = live_disk("/var/lib/one/datastores/102/foreign", "vdb")
    context = live_disk(f"{host.spelled}/disk.2", "vdc", "<readonly/>")
    libvirt(host, live_disk(host.image, "vda"), foreign, context)
    assert "disk vdb (foreign) is not on a shared store" in host.refuses(
        "migrate", *MIGRATE_ARGV, stdin=migrate_stdin(host)
    )


@needs_libvirt
def test_migration_refuses_what_it_cannot_do(host: Host) -> None:
    host.add_in_place(0)
    libvirt(host, live_disk(host.image, "vda"), live_disk(f"{host.spelled}/disk.2", "vdc", "<readonly/>"))
    proof = host.vm_dir / ".semishared" / "migration.json"
    proof.write_text(json.dumps({"version": 1, "to": "h2", "shared_checked": [str(host.stores / "100")]}))
    stdin = migrate_stdin(host)
    lost = migrate_stdin(host, "<DISK><DISK_ID>3</DISK_ID><TM_MAD>semishared</TM_MAD></DISK>")
    assert "disk 3 of" in host.refuses("migrate", *MIGRATE_ARGV, stdin=lost)
    assert "not a host name" in host.refuses(
        "migrate", "252e", "-oProxyCommand=x", "h1", "7", "h1", stdin=stdin
    )
    assert "not the arguments" in host.refuses("migrate", "--help", "h2", "h1", "7", "h1", stdin=stdin)
    assert proof.exists()
    # All is well up to the other libvirtd, which is not there: nothing was started, and the proof is used up.
    assert "libvirtd of h2 does not answer at " in host.refuses("migrate", *MIGRATE_ARGV, stdin=stdin)
    assert not proof.exists()
    assert "has not made VM 7 ready" in host.refuses("migrate", "252e", "h1", "h1", "7", "h1", stdin=stdin)


def test_what_kvmrc_does_not_say_has_its_default(tmp_path: Path) -> None:
    kvmrc = tmp_path / "kvmrc"
    assert Site.read(str(kvmrc)) == Site()
    kvmrc.write_text("MIGRATE_OPTIONS='--bandwidth 1'\n")
    assert Site.read(str(kvmrc)) == Site(migrate_options=("--bandwidth", "1"))
    kvmrc.write_text(
        "LIBVIRT_URI=qemu:///session\nQEMU_PROTOCOL=qemu+tls\nVIRSH_TRIES=5\nSYNC_TIME=yes\nCLEANUP_MEMORY_ON_STOP=yes\n"
    )
    assert Site.read(str(kvmrc)) == Site("qemu:///session", "qemu+tls", (), 5, True, True)


Situation = Callable[[Host], "tuple[list[str], bytes]"]
REHEARSED: dict[str, tuple[Situation, list[str]]] = {}
"""By name (its first word is the action): what leads to it, and returns arguments and stdin; the steps that
are said to follow.
"""


def situation(name: str, *steps: str) -> Callable[[Situation], Situation]:
    def add(made: Situation) -> Situation:
        REHEARSED[name] = made, list(steps)
        return made

    return add


@situation("deploy", "BecomeStock")
def deployed(host: Host) -> tuple[list[str], bytes]:
    host.add_in_place(0)
    host.add_local(1)
    return host.deploy_argv(), host.domain


@situation("deploy after a run that died", "Recover", "ReadRecords", "...")
def deployed_again(host: Host) -> tuple[list[str], bytes]:
    host.add_local(0)
    (host.vm_dir / ".semishared" / "job.0.json").write_text(json.dumps({"target": "vda", "run": "5"}))
    return host.deploy_argv(), host.domain


@situation("deploy of a VM of others", "BecomeStock")
def foreign(host: Host) -> tuple[list[str], bytes]:
    return host.deploy_argv(), host.domain


@situation("attach_disk", "BecomeStock")
def attached(host: Host) -> tuple[list[str], bytes]:
    host.add_in_place(5)
    return attach_argv(host, 5), b""


@situation("detach_disk", "BecomeStock")
def detached(host: Host) -> tuple[list[str], bytes]:
    host.add_local(5)
    return ["252e", f"{host.spelled}/disk.5", "vde", "4", "7", "h1"], b""


@situation("restore", "BecomeStock")
def restored(host: Host) -> tuple[list[str], bytes]:
    host.add_local(0)
    return [f"{host.spelled}/checkpoint", "h1", "7", "h1"], b""


@situation("save", "BecomeStock")
def saved(host: Host) -> tuple[list[str], bytes]:
    host.add_local(0)
    return ["252e", f"{host.spelled}/checkpoint", "h1", "7", "h1"], b""


@situation("snapshot_create", "BecomeStock")
def snapshot(host: Host) -> tuple[list[str], bytes]:
    host.add_local(0)
    return ["252e", "0", "7", "h1"], migrate_stdin(host)


@situation("snapshot_revert", "LoseMarks", "BecomeStock")
def gone_back(host: Host) -> tuple[list[str], bytes]:
    host.add_local(0)
    return ["252e", "snap-0", "7", "h1"], migrate_stdin(host)


@situation("migrate of a VM of others", "BecomeStock")
def moved(host: Host) -> tuple[list[str], bytes]:
    (host.vm_dir / ".semishared").mkdir()
    return list(MIGRATE_ARGV), migrate_stdin(host)


COMMAND = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from semishared.cli.main import main; "
    "sys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_says_what_the_stock_script_gets_and_changes_nothing(host: Host, name: str) -> None:
    made, steps = REHEARSED[name]
    argv, stdin = made(host)
    # This machine is the host; OpenNebula calls it so.
    argv[-1] = "localhost"
    action = name.split()[0]
    before = things(host.remotes.parent)
    words = [
        sys.executable,
        "-I",
        "-c",
        COMMAND,
        str(host.remotes / "lib"),
        "plan",
        "--json",
        f"vmm/{action}",
        *argv,
    ]
    done = subprocess.run(
        words, input=stdin, capture_output=True, cwd="/", env={"PATH": os.environ["PATH"]}, check=True
    )
    said = json.loads(done.stdout)
    assert things(host.remotes.parent) == before
    found = [step for part in said["plan"] if "answers" not in part for step in part["steps"]]
    assert [step["step"] for step in found] + ["..."] * said["open"] == steps
    if not said["open"]:
        got = host.passes(action, *argv, stdin=stdin)
        last = found[-1]
        if last["message"]:
            last["argv"][4] = base64.b64encode(last["message"].encode()).decode()
        assert Got(last["argv"], last["stdin"].encode() or stdin) == got


def test_a_rehearsal_shows_of_the_xml_what_differs(host: Host) -> None:
    host.add_in_place(5)
    argv = [*attach_argv(host, 5)[:-1], "localhost"]
    argv[4] = base64.b64encode(base64.b64decode(argv[4]).replace(b"[raw]", b"[qcow2]")).decode()
    words = [sys.executable, "-I", "-c", COMMAND, str(host.remotes / "lib"), "plan", "vmm/attach_disk", *argv]
    said = subprocess.check_output(words, cwd="/", env={"PATH": os.environ["PATH"]}, text=True)
    assert said[said.index("  BecomeStock") :].splitlines() == [
        "  BecomeStock",
        "    action = attach_disk",
        f"    argv = 252e {host.image} vde 4  7 localhost",
        "    message -<DRIVER><![CDATA[qcow2]]></DRIVER>",
        "    message -<FORMAT><![CDATA[qcow2]]></FORMAT>",
        "    message +<DRIVER>raw</DRIVER>",
        "    message +<FORMAT>raw</FORMAT>",
    ]


def test_a_rehearsal_is_refused_as_the_action_would_be(host: Host) -> None:
    host.add_local(0, version=2)
    argv = [*host.deploy_argv()[:-1], "localhost"]
    words = [sys.executable, "-I", "-c", COMMAND, str(host.remotes / "lib"), "plan", "vmm/deploy", *argv]
    done = subprocess.run(
        words, input=host.domain, capture_output=True, cwd="/", env={"PATH": os.environ["PATH"]}, check=False
    )
    assert done.returncode == 1 and done.stdout == b""
    why = "disk.0.json on " + os.uname().nodename + ": the record of disk 0 has version 2, newer than 1 known"
    refused = host.refuses("deploy", *argv, stdin=host.domain)
    said = done.stderr.decode()
    assert said.startswith("SS042 VM 7: ") and why in said and said.count("\n") == 1
    assert refused.startswith("SS042 VM 7: ") and why in refused


@pytest.mark.fault(
    50, "libvirt is told what the daemon can do, whoever it asks as, before it has a share to name"
)
@pytest.mark.parametrize("name", ["virtiofsd", "virtiofsd_read_only"])
def test_the_daemon_says_what_it_can_do(name: str) -> None:
    done = subprocess.run(
        [ROOT / "vmm" / name, "--print-capabilities"], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"type": "fs"}), done.stderr
