# SPDX-License-Identifier: Apache-2.0
"""A guest of libvirt fills real memory (zram and XFS of Debian's kernel) with what cannot be compressed.

The guest is a boot sector: its firmware's driver writes to virtio-blk past the page cache, and nobody but the
error policy of its disk holds it back when a write fails. Kernels take minutes to boot in emulation in
emulation.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost, Program
from nfs.site import LOCATION, STORE, MiB
from nfs.test_apparmor import LIBVIRTD_CONF, QEMU_CONF
from nfs.test_memory import INSTALL, MEMORY, ROOT, MemoryHost
from semishared.model import steps as s
from semishared.model.device import steps as device_steps

DISK = 200 * MiB
WRITTEN = 48 * MiB
BLOCK = 32 << 10
"""Bytes that the guest writes at once."""
BALLAST = 195 * MiB
"""What somebody else takes of the 237 MiB that XFS has of 320, but of zram none: so the guest needs less
time.
"""
WATCH = ["/usr/local/sbin/semishared-ram", "watch"]
DEVICE = "/mnt/device"
SOURCE = Path(caches.CHECKOUT, "tests/lab/guest/writer.S")
DOMAIN = """<domain type='qemu'><name>one-{vm}</name><memory>32768</memory><os><type arch='x86_64' machine='pc'>hvm</type></os>
<features><acpi/></features><devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file' device='disk'><source file='{vm_dir}/disk.0'/><target dev='vda' bus='virtio'/>
<driver name='qemu' type='qcow2' cache='none'/></disk>
<serial type='file'><source path='/var/tmp/serial.{vm}'/><target port='0'/></serial></devices></domain>
"""  # noqa: E501


def boot_sector(folder: Path, size: int) -> bytes:
    """Return the guest that writes so many bytes."""
    subprocess.run(["as", "--32", "-o", folder / "o", SOURCE], check=True)
    subprocess.run(
        [
            "ld",
            "-m",
            "elf_i386",
            "-Ttext",
            "0x7c00",
            "--oformat",
            "binary",
            "-o",
            folder / "sector",
            folder / "o",
        ],
        check=True,
    )
    sector = bytearray((folder / "sector").read_bytes())
    sector[504:508] = struct.pack("<I", size // BLOCK)
    return bytes(sector)


class GuestHost(MemoryHost):
    """A host with memory and one more device, libvirt, and our hypervisor directory."""

    def __init__(self, top: Path) -> None:
        KernelHost.__init__(self, "full", memory_mib=1400, disks={"local": 400, "device": 600})
        self._side = None
        self._top = top

    def prepare(self) -> s.ImageRef:
        remotes = self._top / "remotes"
        shutil.copytree(Path(caches.CHECKOUT, "tests/lab/stock"), remotes, symlinks=True)
        subprocess.run(
            [f"{caches.CHECKOUT}/install.sh", "--remotes", remotes], check=True, capture_output=True
        )
        subprocess.run(["chmod", "-R", "a+rX", self._top], check=True)
        self.mount_disk("local", LOCATION)
        self.mount_disk("device", DEVICE)
        self.put(f"{STORE}/image", boot_sector(self._top, WRITTEN), 0o660)
        self.put("/etc/libvirt/qemu.conf", QEMU_CONF)
        self.put("/etc/libvirt/libvirtd.conf", LIBVIRTD_CONF)
        owned = "/var/lib/libvirt/qemu /var/cache/libvirt/qemu /var/log/libvirt/qemu"
        known = caches.capabilities()
        self.script(
            f"truncate -s {DISK} {STORE}/image; mkdir -p {LOCATION}/101 {owned}\n"
            "mount -t cgroup2 c /sys/fs/cgroup; ln -sfn /proc/self/fd /dev/fd\n"
            f"{f'cp -r {known} /var/cache/libvirt/qemu/capabilities' if known else ''}\n"
            f"chown -R {ONEADMIN[0]}:{ONEADMIN[1]} {LOCATION} {owned}; libvirtd -d"
        )
        return s.ImageRef(100, 1, "raw", f"{STORE}/image")

    def deploy(self, disk: s.DiskRef) -> None:
        """Let a guest boot as one_vmm_exec does."""
        domain = DOMAIN.format(vm=disk.vm, vm_dir=disk.vm_dir).encode()
        words = [
            f"{self._top}/remotes/vmm/semishared/deploy",
            f"{disk.vm_dir}/deployment.0",
            "full",
            str(disk.vm),
            "full",
        ]
        self.run(words, stdin=domain, user=ONEADMIN)

    def virsh(self, *argv: str) -> str:
        return self.run(["virsh", "-q", "-c", "qemu:///system", *argv], user=ONEADMIN).out.strip()

    def state(self, disk: s.DiskRef) -> str:
        return self.virsh("domstate", "--reason", f"one-{disk.vm}")

    def said(self, disk: s.DiskRef) -> str:
        """Return what a guest has said, but for how far it is."""
        return self.run(["cat", f"/var/tmp/serial.{disk.vm}"]).out.replace(".", "")

    def at_fault(self, disk: s.DiskRef) -> str:
        """Return, of a guest that has read another block than it wrote: which, where it differs in its
        memory, and what the disk has.
        """
        registers = self.virsh("qemu-monitor-command", f"one-{disk.vm}", "--hmp", "info registers")
        (block,) = (int(found, 16) for found in re.findall(r"EBP=(\w+)", registers))
        for name, at in (("written", 0x10000), ("read", 0x20000)):
            self.virsh(
                "qemu-monitor-command", f"one-{disk.vm}", "--hmp", f'pmemsave {at} {BLOCK} "/var/tmp/{name}"'
            )
        self.virsh("destroy", f"one-{disk.vm}")
        self.run(["qemu-img", "convert", "-O", "raw", disk.path, "/var/tmp/disk"])
        seen = []
        for name, at in (("read", 0), ("disk", MiB + block * BLOCK)):
            done = self.run(
                ["cmp", "-l", "-n", str(BLOCK), "-i", f"0:{at}", "/var/tmp/written", f"/var/tmp/{name}"],
                check=False,
            )
            found = done.out.splitlines()
            seen.append(f"{name}: {len(found)} bytes differ, {found[:4]} to {found[-1:]} {done.err}")
        return f"block {block}; {'; '.join(seen)}; {self.run(['qemu-img', 'map', disk.path]).out}"

    def home(self, disk: s.DiskRef) -> str:
        """Return on which device a disk is."""
        return self.run(["readlink", "-f", f"{disk.path}.snap"]).out.partition("/.semishared/")[0]


@pytest.fixture
def host() -> Iterator[GuestHost]:
    top = Path(tempfile.mkdtemp(prefix="memory-", dir="/var/tmp"))
    try:
        with GuestHost(top) as up:
            yield up
    finally:
        shutil.rmtree(top)


def until(is_so: Callable[[], bool], what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {seconds} s"
        time.sleep(1)


@contextmanager
def watching(host: GuestHost) -> Iterator[Program]:
    """Have memory looked after as the unit does, within the block; what is under way then goes on to its
    end.
    """
    watcher = host.start_program(WATCH)
    try:
        yield watcher
    finally:
        watcher.signal()
    until(lambda: not host.run(["pgrep", "-f", "host/watch.py"], check=False).out, "end of the last round")


@pytest.mark.long
def test_a_guest_that_fills_memory_goes_on_where_there_is_room(host: GuestHost) -> None:
    image = host.prepare()
    host.script(f"sh {INSTALL}/semishared-ram.sh enable 320M zram 2")
    host.on(device_steps.SetDevices(ROOT, (DEVICE, f"{MEMORY}=ram:2")))
    disk = host.clone(image, 1, ("ram", "any"), DISK)
    assert host.home(disk) == MEMORY
    # Who looks after memory has been there, to keep some of it for the move, and is away while it gets full.
    with watching(host):
        until(
            lambda: host.run(["test", "-e", f"{MEMORY}/.semishared/spare/3"], check=False).code == 0,
            "room that is kept",
        )
    host.script(f"fallocate -l {BALLAST} {MEMORY}/ballast")
    host.deploy(disk)
    until(lambda: host.state(disk) == "paused (I/O error)", "guest that waits")
    assert host.virsh("domblkerror", "one-1") == "vda: no space" and host.said(disk) == ""
    assert host.zram()[1] > 30 * MiB, "it cannot be compressed"
    with watching(host):
        until(lambda: bool(host.said(disk)), "guest that goes on")
        until(lambda: len(host.said(disk)) > 1, "guest that has read all again")
        assert host.said(disk) != "wx", host.at_fault(disk)
        assert (
            host.said(disk) == "wv" and host.home(disk) == DEVICE and host.state(disk).startswith("running")
        )
        assert host.run(["ls", f"{MEMORY}/.semishared/layers"]).out == ""
        until(lambda: host.zram()[1] < 16 * MiB, "memory that is free again", 60)
