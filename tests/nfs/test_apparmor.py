# SPDX-License-Identifier: Apache-2.0
"""Debian's kernel with Debian's AppArmor profiles enforcing: libvirtd, virt-aa-helper and QEMU are confined
as on a stock host.

QEMU shows its firmware and nothing more (a guest's kernel would take minutes to boot, so none lets go of a
disk either); its disks are opened, switched, pulled and copied all the same, and what AppArmor denies is in
the kernel's log. The disks are made on this machine, by the same host side.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator
from xml.etree import ElementTree

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost
from semishared.model import steps as s
from tools.world import World

LONG_S = 900
UUID = "75b33178-6a6b-4667-b9b8-64da283038a7"
QEMU_CONF = b'user = "oneadmin"\ngroup = "oneadmin"\ndynamic_ownership = 0\nstdio_handler = "file"\n'
LIBVIRTD_CONF = b'unix_sock_rw_perms = "0777"\nauth_unix_ro = "none"\nauth_unix_rw = "none"\n'
# A tmpfs of that kernel has no O_DIRECT.
CACHE = "writeback"
ON_HOST = """
import json, sys
from semishared.config import Config
from semishared.wire.session import Session
from semishared.model.steps import from_data
from semishared.named import to_data
with Session("localhost", "test", Config()) as session:
    print(json.dumps(to_data(session.run([from_data(step) for step in json.load(sys.stdin)]))))
"""
DISK = """
		<disk type='file' device='disk'>
			<source file='{}/disk.{}'/>
			<target dev='vd{}' bus='virtio'/>
			<driver name='qemu' type='raw' cache='{}' discard='unmap'/>
		</disk>"""
DENIED = 'apparmor="DENIED"'


class Confined:
    """A host whose libvirt is confined, with disks, and our hypervisor directory beside stand-ins for the
    stock one.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self.remotes = top / "remotes"
        self.world = World(top)
        self.vm_dir = f"{self.world.location}/101/7"
        # What libvirtd keeps open, QEMU and the compiler of profiles: half of it is too little. Its clock
        # goes by what it has done: whatever else this machine does, no time limit of ours or of libvirt is
        # reached.
        clock = ["-icount", "shift=1"]
        self.host = KernelHost(
            "h1", memory_mib=1024, kernel_arguments="apparmor=1 security=apparmor", qemu_arguments=clock
        )

    def disk(self, number: int) -> s.DiskRef:
        return self.world.disk(7, number)

    def prepare(self) -> None:
        """Install the hypervisor directory, and make an overlay with a snapshot, a clone on the store, and
        one more overlay.
        """
        shutil.copytree(Path(__file__).resolve().parents[1] / "lab/stock", self.remotes, symlinks=True)
        kvmrc = self.remotes / "etc/vmm/kvm/kvmrc"
        kvmrc.write_text(
            kvmrc.read_text().replace("DEFAULT_ATTACH_CACHE=none", f"DEFAULT_ATTACH_CACHE={CACHE}")
        )
        subprocess.run(
            [caches.CHECKOUT / "install.sh", "--remotes", self.remotes], check=True, capture_output=True
        )
        raw, qcow2 = self.world.image("raw"), self.world.image("q", "qcow2")
        overlay, clone, attached = (self.disk(number) for number in range(3))
        self.world.clone(raw, overlay)
        self.world.on(
            s.AddLayer(overlay, 1, 0, "qcow2"),
            s.ActivateLayer(overlay, 1, "qcow2"),
            s.CloneOnStore(clone, qcow2, 0),
        )
        self.world.clone(raw, attached)
        subprocess.run(["chmod", "-R", "a+rX", str(self.remotes)], check=True)
        subprocess.run(["chown", "-Rh", f"{ONEADMIN[0]}:{ONEADMIN[1]}", str(self.world.location)], check=True)

    def start(self) -> None:
        """Load the profiles as Debian ships them, and start libvirtd under its own."""
        host = self.host
        host.put("/etc/libvirt/qemu.conf", QEMU_CONF)
        host.put("/etc/libvirt/libvirtd.conf", LIBVIRTD_CONF)
        # The same rules, compiled faster.
        host.put("/etc/apparmor/parser.conf", b"Optimize=no-expr-simplify\n")
        known, owned = (
            caches.capabilities(),
            "/var/lib/libvirt/qemu /var/cache/libvirt/qemu /var/log/libvirt/qemu",
        )
        host.script(
            "mount -t securityfs s /sys/kernel/security; mount -t cgroup2 c /sys/fs/cgroup\n"
            "sysctl -qw kernel.printk_ratelimit=0; ln -sfn /proc/self/fd /dev/fd\n"
            "apparmor_parser -r /etc/apparmor.d/usr.sbin.libvirtd "
            "/etc/apparmor.d/usr.lib.libvirt.virt-aa-helper\n"
            f"mkdir -p {owned}; {f'cp -r {known} /var/cache/libvirt/qemu/capabilities' if known else ''}\n"
            f"chown -R {ONEADMIN[0]}:{ONEADMIN[1]} {owned}; /usr/sbin/libvirtd -d",
            timeout=LONG_S,
        )

    def virsh(self, *argv: str) -> str:
        return self.host.run(
            ["virsh", "-q", "-c", "qemu:///system", *argv], user=ONEADMIN, timeout=LONG_S
        ).out

    def on(self, *steps: s.Step) -> list[object]:
        """Carry out steps by the host side, as the transfer actions do."""
        data = json.dumps([s.to_data(step) for step in steps]).encode()
        found: list[object] = json.loads(
            self.host.python(ON_HOST, stdin=data, user=ONEADMIN, timeout=LONG_S).out
        )
        return found

    def action(self, name: str, *argv: str, stdin: bytes = b"") -> None:
        """Do a hypervisor action as one_vmm_exec starts it; nothing of it may be denied."""
        self.host.run(
            [f"{self.remotes}/vmm/semishared/{name}", *argv], stdin=stdin, user=ONEADMIN, timeout=LONG_S
        )

    def denied(self) -> list[str]:
        """Return what was denied since the last look, and forget it."""
        return [
            line for line in self.host.run(["dmesg", "-c"], timeout=LONG_S).out.splitlines() if DENIED in line
        ]

    def chain(self, target: str) -> list[str]:
        """Return the files of a running guest's disk, the active one first."""
        for disk in ElementTree.fromstring(self.virsh("dumpxml", "one-7")).findall("devices/disk"):
            if disk.find("target").get("dev") == target:  # type: ignore[union-attr]
                return [os.path.normpath(source.get("file", "")) for source in disk.iter("source")]
        raise AssertionError(f"no disk {target}")

    def deploy(self) -> None:
        spelled = f"{self.world.location}//101/7"
        disks = "".join(DISK.format(spelled, number, "ab"[number], CACHE) for number in range(2))
        domain = (
            f"<domain type='qemu'>\n<name>one-7</name>\n<uuid>{UUID}</uuid>\n<memory>32768</memory>\n"
            "<os><type arch='x86_64' machine='pc'>hvm</type></os><features><acpi/></features>\n"
            f"<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>{disks}\n</devices></domain>\n"
        )
        self.action("deploy", f"{spelled}/deployment.0", "h1", "7", "h1", stdin=domain.encode())


@pytest.fixture(scope="module")
def site() -> Iterator[Confined]:
    top = Path(tempfile.mkdtemp(prefix="apparmor-", dir="/var/tmp"))
    try:
        os.chmod(top, 0o755)
        confined = Confined(top)
        confined.prepare()
        with confined.host:
            confined.start()
            confined.denied()
            yield confined
    finally:
        shutil.rmtree(top)


@pytest.mark.fault(
    20, "under Debian's AppArmor profiles a default disk boots and has live snapshots, nothing is denied"
)
def test_default_disks_boot_and_have_live_snapshots_under_the_stock_profiles(site: Confined) -> None:
    site.deploy()
    assert site.denied() == []
    # They are in force.
    label = site.host.script("cat /proc/$(pidof qemu-system-x86_64)/attr/current", timeout=LONG_S).out.strip()
    assert label == f"libvirt-{UUID} (enforce)"
    foreign = {"driver": "file", "node-name": "foreign", "filename": site.disk(2).path}
    command = json.dumps({"execute": "blockdev-add", "arguments": foreign})
    assert "Permission denied" in site.virsh("qemu-monitor-command", "one-7", command)
    assert any("disk.2.snap/0" in line for line in site.denied())
    disk = site.disk(0)
    layer = f"{disk.path}.snap/"
    (lease,) = site.world.root.glob("bases/*/leases/7-0")
    site.on(s.AddLayer(disk, 2, 1, "qcow2"), s.SwitchLayer(disk, 1, 2, "one-7", "vda"))
    assert site.chain("vda") == [f"{layer}2", f"{layer}1", f"{layer}0", str(lease)]
    assert site.denied() == []


@pytest.mark.long
@pytest.mark.fault(
    20,
    "under Debian's AppArmor profiles hot attach, save-as, backup, checkpoint and resume work, "
    "nothing is denied",
)
def test_the_rest_of_a_guests_life_under_the_stock_profiles(site: Confined) -> None:
    if "one-7" not in site.virsh("list", "--name").split():
        site.deploy()
    disk, store = site.disk(2), site.world.store
    message = (
        "<VMM_DRIVER_ACTION_DATA><VM><ID>7</ID><TEMPLATE><DISK><ATTACH>YES</ATTACH><DISK_ID>2</DISK_ID><DRIVER>raw</DRIVER>"
        "<FORMAT>raw</FORMAT><TYPE>FILE</TYPE><DISK_TYPE>FILE</DISK_TYPE><TM_MAD>semishared</TM_MAD></DISK></TEMPLATE></VM>"
        "</VMM_DRIVER_ACTION_DATA>"
    )
    words = [f"{site.vm_dir}/disk.2", "vdc", "2", base64.b64encode(message.encode()).decode()]
    site.action("attach_disk", "one-7", *words, "7", "h1")
    (lease,) = site.world.root.glob("bases/*/leases/7-2")
    layer = f"{disk.path}.snap/"
    assert site.chain("vdc") == [f"{layer}0", str(lease)]
    assert site.denied() == []
    # A snapshot, and its deletion: the attached disk is its own layer over the base again.
    site.on(s.AddLayer(disk, 1, 0, "qcow2"), s.SwitchLayer(disk, 0, 1, "one-7", "vdc"))
    site.on(s.PullLayer(disk, 1, "one-7", "vdc", str(lease)), s.DropLayer(disk, 0))
    assert site.chain("vdc") == [f"{layer}1", str(lease)]
    assert site.denied() == []
    site.on(s.SaveDisk(disk, f"{store}/saved", "qcow2", "one-7"))
    assert site.denied() == []
    backup = f"{site.vm_dir}/backup"
    site.on(s.BackUp(7, site.vm_dir, backup, ("0", "1", "2"), "one-7", "NONE", "<VM/>"))
    for number in range(3):
        check = f"qemu-io -f qcow2 -r -c 'read -P 0xa1 1M 64k' {backup}/disk.{number}.0"
        assert "verification failed" not in site.host.script(check, timeout=LONG_S).out
    # When the copy of one disk is done libvirt makes all rules anew from its XML, where no copy is named.
    # What QEMU has open it keeps; that it may not open the copies of the others once more, only to read, when
    # theirs are done, nobody needs.
    said = site.denied()
    assert all(
        ".staged-backup/disk." in line and 'operation="open"' in line and 'requested_mask="r"' in line
        for line in said
    ), said
    site.on(s.EndBackup(7, site.vm_dir, backup, "one-7"))
    site.action("save", "one-7", f"{site.vm_dir}/checkpoint", "h1", "7", "h1")
    site.action("restore", f"{site.vm_dir}/checkpoint", "h1", "one-7", "7", "h1")
    assert site.chain("vdc") == [f"{layer}1", str(lease)]
    assert site.denied() == []
