# SPDX-License-Identifier: Apache-2.0
"""The hypervisor directory against real libvirts, called as one_vmm_exec does; the records are written by
hand.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterator

import pytest

from lab import Lab, Node
from lab.guest import Guest, serial_path, serial_xml, write_guest_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

STORES = "/var/lib/one//datastores"
PLAIN = "/var/lib/one/datastores"
VMM = "/var/tmp/one/vmm/semishared"
VIRSH = ["virsh", "-q", "-c", "qemu:///system"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.up(hosts=2) as up:
        up.install()
        yield up


class Vm:
    """A VM as oned knows it, with disks as the transfer driver leaves them."""

    def __init__(self, lab: Lab, number: int, host: Node) -> None:
        self.lab, self.number, self.host = lab, number, host
        self.name = f"one-{number}"
        self.dir = f"{STORES}/101/{number}"
        self.disks: list[str] = []
        self.id = ""
        self.guest = Guest(host, serial_path(self.name))

    def shell(self, script: str, *argv: str, host: Node | None = None) -> str:
        """Run a script in the VM directory of a host."""
        words = ["sh", "-euc", f'mkdir -p "$0/.semishared"; cd "$0"; {script}', self.dir, *argv]
        return (host or self.host).run(words).stdout.decode()

    def record(self, disk: int, how: str, format: str, path: str, host: Node | None = None) -> None:
        place = "shared" if how == "in-place" else "local"
        data = {
            "version": 1,
            "disk": disk,
            "place": place,
            "how": how,
            "format": format,
            "path": path,
            "readonly": False,
        }
        self.shell('printf %s "$2" >".semishared/disk.$1.json"', str(disk), json.dumps(data), host=host)

    def add(self, disk: int, device: str = "disk") -> None:
        bus, target = ("virtio", f"vd{chr(97 + disk)}") if device == "disk" else ("ide", "hda")
        mark = "<readonly/>" if device == "cdrom" else ""
        self.disks.append(
            f"<disk type='file' device='{device}'><source file='{self.dir}/disk.{disk}'/>"
            f"<target dev='{target}' bus='{bus}'/>{mark}<driver name='qemu' type='raw' cache='none'/></disk>"
        )

    def add_in_place(self, disk: int, image: str) -> None:
        link = f"{PLAIN}/100/.semishared/{image}/image"
        for host in self.lab.hosts:
            self.shell(
                f'mkdir -p "{os.path.dirname(link)}"; ln -sfn "../../{image}" "{link}"; ln -sfn '
                f'"{link}" disk.{disk}',
                host=host,
            )
            self.record(disk, "in-place", "raw", link, host)
        self.add(disk)

    def make_overlay(self, disk: int, base: str) -> None:
        self.shell(f"qemu-img create -q -f qcow2 -F raw -b {base} disk.{disk}")
        self.record(disk, "overlay", "qcow2", f"{PLAIN}/101/{self.number}/disk.{disk}")

    def add_iso(self, disk: int) -> None:
        for host in self.lab.hosts:
            self.shell(f"truncate -s 1M disk.{disk}", host=host)
        self.add(disk, "cdrom")

    @property
    def xml(self) -> bytes:
        serial = serial_xml(self.name)
        return (
            f"<domain type='{self.lab.virt}'>\n<name>{self.name}</name>\n<memory "
            f"unit='MiB'>128</memory><vcpu>1</vcpu>"
            "<os><type arch='x86_64' machine='pc'>hvm</type><boot dev='hd'/></os><features><acpi/></features>"
            f"<devices><emulator><![CDATA[/usr/bin/qemu-kvm-one]]></emulator>{''.join(self.disks)}<memballoon model='none'/>"  # noqa: E501
            f"</devices>{serial}</domain>\n"
        ).encode()

    def call(
        self, action: str, *argv: str, stdin: bytes = b"", host: Node | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Run an action on a host, through ssh from the front-end."""
        where = host or self.host
        words = ["ssh", where.name, "--", f"{VMM}/{action}", *argv, str(self.number), where.name]
        return self.lab.fe.run(words, input=stdin, check=False, timeout=120)

    def does(self, action: str, *argv: str, stdin: bytes = b"", host: Node | None = None) -> str:
        done = self.call(action, *argv, stdin=stdin, host=host)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode().strip()

    def boot(self) -> None:
        self.id = self.does("deploy", f"{self.dir}/deployment.0", self.host.name, stdin=self.xml)
        self.guest.wait_up()

    def cancel(self) -> None:
        self.guest.close()
        self.does("cancel", self.id, self.host.name)

    def migrate(self, target: Node, proof: bool = True) -> subprocess.CompletedProcess[bytes]:
        if proof:
            data = {"version": 1, "to": target.name, "shared_checked": [f"{PLAIN}/100"]}
            self.shell('printf %s "$1" >.semishared/migration.json', json.dumps(data))
        message = (
            f"<VMM_DRIVER_ACTION_DATA><VM><ID>{self.number}</ID><TEMPLATE><CONTEXT><DISK_ID>1</DISK_ID></CONTEXT></TEMPLATE></VM>"
            f"<DATASTORE><BASE_PATH>{STORES}/101</BASE_PATH><TEMPLATE><SHARED>NO</SHARED></TEMPLATE></DATASTORE>"
            "</VMM_DRIVER_ACTION_DATA>"
        ).encode()
        words = [
            "ssh",
            self.host.name,
            "--",
            f"{VMM}/migrate",
            self.id,
            target.name,
            self.host.name,
            str(self.number),
            self.host.name,
        ]
        return self.lab.fe.run(words, input=message, check=False, timeout=180)

    def moved(self, target: Node) -> None:
        self.host = target
        self.guest.moved(target)
        self.guest.wait_up()

    def state(self, host: Node) -> str:
        return host.run([*VIRSH, "domstate", self.id], check=False).stdout.decode().strip()

    def live_disks(self) -> dict[str, str]:
        text = self.host.run([*VIRSH, "domblklist", self.id]).stdout.decode()
        return {words[0]: words[1] for words in map(str.split, text.splitlines()) if words}


def image(lab: Lab, name: str, bootable: bool = False, mib: int = 8) -> str:
    """Put an image into the shared store."""
    path = f"{PLAIN}/100/{name}"
    if bootable:
        write_guest_image(lab.fe.path(path))
        os.chown(lab.fe.path(path), lab.uid, lab.gid)
    else:
        lab.fe.run(["truncate", "-s", f"{mib}M", path])
    return path


def no_stock_migration(lab: Lab) -> bool:
    return not any(list(host.path("/var/tmp").glob("stock-migrate-ran*")) for host in lab.hosts)


@pytest.mark.long  # test_vm.py does the same through oned
def test_mixed_vm_boots_attaches_sleeps_and_stays_where_it_is(lab: Lab) -> None:
    h1, h2 = lab.hosts
    vm = Vm(lab, 7, h1)
    system, base = image(lab, "os7", bootable=True), image(lab, "base7")
    image(lab, "data7")
    vm.make_overlay(0, system)
    vm.add(0)
    vm.add_iso(1)
    vm.add_in_place(2, "data7")
    vm.boot()
    assert vm.live_disks() == {
        "vda": f"{vm.dir}/disk.0",
        "vdc": f"{PLAIN}/100/.semishared/data7/image",
        "hda": f"{vm.dir}/disk.1",
    }
    vm.guest.write("vdb", "kept", 0, 1024)

    # Hot attach of an overlay over a raw image, which oned calls raw.
    vm.make_overlay(5, base)
    disk = (
        "<DISK><ATTACH>YES</ATTACH><DISK_ID>5</DISK_ID><DRIVER>raw</DRIVER><FORMAT>raw</FORMAT>"
        "<TYPE>FILE</TYPE><DISK_TYPE>FILE</DISK_TYPE></DISK>"
    )
    text = f"<VMM_DRIVER_ACTION_DATA><VM><ID>7</ID><TEMPLATE>{disk}</TEMPLATE></VM></VMM_DRIVER_ACTION_DATA>"
    message = base64.b64encode(text.encode()).decode()
    vm.does("attach_disk", vm.id, f"{vm.dir}/disk.5", "vdf", "5", message)
    vm.guest.wait_disk("vdc")
    assert vm.guest.disks()["vdc"] == 8 << 20, "the guest sees the qcow2 file and not what is in it"
    vm.guest.write("vdc", "mine", 4096, 1024)
    vm.guest.check("vdc", "zero", 0, 1024)

    refused = vm.migrate(h2)
    assert (
        refused.returncode == 1 and b"disk 0 (overlay)" in refused.stderr and refused.stderr.count(b"\n") == 1
    )
    assert vm.state(h1) == "running" and vm.state(h2) == ""

    # save and restore are forwarders: the checkpoint names the right files and formats by itself.
    vm.guest.close()
    vm.does("save", vm.id, f"{vm.dir}/checkpoint", h1.name)
    assert vm.state(h1) == ""
    vm.does("restore", f"{vm.dir}/checkpoint", h1.name, vm.id)
    vm.guest.wait_up()
    vm.guest.check("vdc", "mine", 4096, 1024)
    vm.guest.check("vdb", "kept", 0, 1024)

    vm.does("detach_disk", vm.id, f"{vm.dir}/disk.5", "vdf", "5")
    vm.guest.wait_disk("vdc", present=False)
    vm.cancel()
    assert (
        json.loads(h1.run(["qemu-img", "info", "--output=json", f"{vm.dir}/disk.5"]).stdout)["format"]
        == "qcow2"
    )
    assert no_stock_migration(lab)


@pytest.mark.long  # test_vm.py has the same with all other actions around it
def test_vm_in_place_moves_live_there_and_back(lab: Lab) -> None:
    h1, h2 = lab.hosts
    vm = Vm(lab, 8, h1)
    image(lab, "os8", bootable=True)
    image(lab, "data8")
    vm.add_in_place(0, "os8")
    vm.add_iso(1)
    vm.add_in_place(2, "data8")
    vm.boot()
    vm.guest.loop("vdb", "moving", 0, 4096, 20)
    done = vm.migrate(h2)
    assert done.returncode == 0, done.stderr
    assert vm.state(h1) == "" and vm.state(h2) == "running"
    assert not h1.path(f"{vm.dir}/.semishared/migration.json").exists()
    vm.moved(h2)

    # A defined domain stays defined, and on one host only.
    h2.run(
        ["sh", "-euc", f"{' '.join(VIRSH)} dumpxml {vm.id} >/tmp/8.xml; {' '.join(VIRSH)} define /tmp/8.xml"]
    )
    done = vm.migrate(h1)
    assert done.returncode == 0, done.stderr
    assert vm.state(h2) == "" and vm.state(h1) == "running"
    assert b"Persistent:     yes" in h1.run([*VIRSH, "dominfo", vm.id]).stdout
    vm.moved(h1)
    seen = vm.guest.loop_stop("vdb")
    assert seen["writes"] > 0 and seen["errors"] == 0 and seen["mismatches"] == 0
    h1.run([*VIRSH, "undefine", vm.id])

    # The other side cannot open a disk: the VM stays, and nothing stays over there.
    vm.shell("rm disk.1", host=h2)
    failed = vm.migrate(h2)
    assert failed.returncode == 1
    plain = [
        line
        for line in failed.stderr.decode().splitlines()
        if not line.startswith(("WARN: ", "INFO: ", "ERROR: "))
    ]
    assert len(plain) == 1 and "libvirt on h1: migrate" in plain[0]
    assert vm.state(h1) == "running" and vm.state(h2) == ""
    vm.guest.write("vdb", "after", 0, 64)

    # Somebody else's domain of that name over there is not ours to touch.
    other = vm.xml.replace("".join(vm.disks).encode(), b"").replace(
        b"<name>", f"<uuid>{vm.id}</uuid><name>".encode()
    )
    h2.run([*VIRSH, "create", "/dev/stdin"], input=other)
    failed = vm.migrate(h2)
    assert failed.returncode == 1 and b"already has a domain" in failed.stderr
    assert vm.state(h1) == "running" and vm.state(h2) == "running"
    h2.run([*VIRSH, "destroy", vm.id])

    h2.cut()
    try:
        failed = vm.migrate(h2)
    finally:
        h2.join()
    assert failed.returncode == 1 and b"does not answer" in failed.stderr
    assert vm.state(h1) == "running"
    vm.guest.check("vdb", "after", 0, 64)
    vm.cancel()
    assert no_stock_migration(lab)


def test_migration_that_dies_half_way_leaves_the_vm_where_it_was(lab: Lab) -> None:
    h1, h2 = lab.hosts
    vm = Vm(lab, 10, h1)
    image(lab, "os10", bootable=True)
    vm.add_in_place(0, "os10")
    vm.add_iso(1)
    vm.boot()
    kvmrc = h1.path("/var/tmp/one/etc/vmm/kvm/kvmrc")
    kvmrc.write_text(kvmrc.read_text() + "MIGRATE_OPTIONS='--bandwidth 1'\n")
    # The process to kill while memory is on its way: QEMU over there, or our own script over here.
    for node, victim in ((h2, f"guest={vm.name},"), (h1, f"with_records migrate {vm.id}")):
        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(vm.migrate, h2)
            wait_for(lambda: vm.state(h2) == "paused")
            found = node.run(["pgrep", "-f", victim]).stdout.decode().split()
            assert len(found) == 1, "this node's own processes, and of those the one"
            node.run(["kill", "-9", found[0]], user="root")
            failed = moving.result()
        assert failed.returncode != 0
        wait_for(lambda: vm.state(h2) == "")
        assert vm.state(h1) == "running"
        vm.guest.command("ping")
    vm.cancel()


def wait_for(condition: Callable[[], bool], timeout: float = 40) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_vm_of_others_reaches_the_stock_migration(lab: Lab) -> None:
    vm = Vm(lab, 9, lab.hosts[0])
    vm.id = "one-9"
    assert no_stock_migration(lab)
    failed = vm.migrate(lab.hosts[1], proof=False)
    assert b"stock migration would have" in failed.stderr
    assert not no_stock_migration(lab)
