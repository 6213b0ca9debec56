# SPDX-License-Identifier: Apache-2.0
"""Shares on XFS in real guests, which are emulated in an emulated host with Debian's kernel, whose libvirt
starts our daemon.

They are up in two minutes.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lab import caches
from lab.guest import LINUX, lay_out_boot
from lab.kernel_host import ONEADMIN, KernelHost, KernelHostError
from nfs.site import LOCATION, HostSide
from nfs.test_apparmor import LIBVIRTD_CONF, QEMU_CONF
from semishared.model import steps as s
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, first_uid
from shares.page import ROOT, rule
from shares.test_xfs import MARKER, MOUNT, TREE, MiB

pytestmark = pytest.mark.long

LONG_S = 1800
OWNERS = {1: 5, 2: 9, 3: 5}
"""Of each share; VM 1 has 1 and 3, VM 2 has 2."""
SIZES = {1: 4 * MiB, 2: 16 * MiB, 3: 8 * MiB}
OWNED = "/var/lib/libvirt/qemu /var/cache/libvirt/qemu /var/log/libvirt/qemu"
# As oned writes it (LibVirtDriverKVM.cc), whose daemon would be root of the host.
FILESYSTEM = """<filesystem type='mount' accessmode='passthrough'><driver type='virtiofs' queue='1024'/>
<binary path='/var/tmp/one/vmm/kvm/virtiofsd.sh' xattr='on'><cache mode='always'/><sandbox mode='namespace'/></binary>
<source dir='{source}'/><target dir='share{image}'/></filesystem>"""  # noqa: E501
DOMAIN = """<domain type='qemu'><name>one-{vm}</name><memory>163840</memory><os><type arch='x86_64' machine='pc'>hvm</type>
<kernel>{boot}/vmlinux</kernel><initrd>{boot}/initrd</initrd><cmdline>{words}</cmdline></os>
<features><acpi/></features><devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
{filesystems}
<serial type='unix'><source mode='bind' path='/var/tmp/serial.{vm}'/><target port='0'/></serial></devices></domain>
"""  # noqa: E501
DISK = """<DISK><DISK_ID>{image}</DISK_ID><IMAGE_ID>{image}</IMAGE_ID><MOUNT_TAG>share{image}</MOUNT_TAG><SOURCE>{source}</SOURCE>
<TM_MAD>semishared</TM_MAD><TYPE>FILESYSTEM</TYPE></DISK>"""  # noqa: E501
RELAY = """
import os, select, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
while True:
    for ready in select.select([0, line], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else line.recv(65536)
        if not data:
            sys.exit()
        os.write(1, data) if ready == line else line.sendall(data)
"""


class Inner:
    """The agent in a guest that is in a kernel host."""

    def __init__(self, host: KernelHost, vm: int) -> None:
        # As root, whom the socket belongs to: libvirt makes it, with dynamic_ownership = 0.
        self._line = host.start_program(
            ["/usr/bin/python3", "-I", "-u", "-c", RELAY, f"/var/tmp/serial.{vm}"]
        )
        self._read = 0

    def _answer(self, timeout: float) -> str:
        """Return the next answer of the agent; raise KernelHostError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            line, found, _ = self._line.out[self._read :].partition("\n")
            if not found:
                assert not self._line.ended, self._line.wait(0)
                time.sleep(0.1)
                continue
            self._read += len(line) + 1
            if line.startswith(("OK", "ERR")):
                return line.strip()
        raise KernelHostError(f"no answer in {timeout} s: {self._line.out[-2000:]}")

    def ask(self, words: str) -> str:
        """Give a command to the agent; return its answer."""
        self._line.write(f"{words}\n".encode())
        return self._answer(LONG_S)

    def wait_up(self) -> None:
        """Wait until it has booted: what is said to it before may be lost. Answers come in the order of what
        was asked.
        """
        deadline, patience = time.monotonic() + LONG_S, 10
        while time.monotonic() < deadline:
            patience += 5
            wanted = f"OK {secrets.token_hex(4)}"
            self._line.write(f"ping {wanted[3:]}\n".encode())
            with suppress(KernelHostError):
                while self._answer(patience) != wanted:
                    pass
                return
        raise KernelHostError(f"the guest is not up after {LONG_S} s: {self._line.out[-2000:]}")

    def run(self, script: str) -> tuple[int, str]:
        """Run a script of busybox's shell; return its exit code and what it said."""
        code, _, said = self.ask(f"run {script.encode().hex()}").removeprefix("OK ").partition(" ")
        return int(code), bytes.fromhex(said).decode()


class Site:
    """A host with shares on XFS, given to guests of two owners by our hypervisor directory."""

    def __init__(self, host: KernelHost, top: Path) -> None:
        self.host, self._top = host, top
        self.paths: dict[int, str] = {}
        self.guests: dict[int, Inner] = {}

    def prepare(self) -> None:
        shutil.copytree(Path(caches.CHECKOUT, "tests/lab/stock"), self._top / "remotes", symlinks=True)
        subprocess.run(
            [f"{caches.CHECKOUT}/install.sh", "--remotes", self._top / "remotes"],
            check=True,
            capture_output=True,
        )
        lay_out_boot(self._top, LINUX)
        subprocess.run(["chmod", "-R", "a+rX", self._top], check=True)
        subprocess.run(["chown", "-Rh", f"{ONEADMIN[0]}:{ONEADMIN[1]}", self._top], check=True)
        host, known = self.host, caches.capabilities()
        host.put("/etc/sudoers.d/semishared-shares", rule("oneadmin").encode(), 0o440)
        host.put("/etc/libvirt/qemu.conf", QEMU_CONF)
        host.put("/etc/libvirt/libvirtd.conf", LIBVIRTD_CONF)
        host.run(["bash", "-euc", MOUNT, ROOT, *map(str, ONEADMIN)])
        host.script(
            f"mkdir -p {LOCATION}/101 {OWNED}; mount -t cgroup2 c /sys/fs/cgroup; ln -sfn "
            f"/proc/self/fd /dev/fd\n"
            f"{f'cp -r {known} /var/cache/libvirt/qemu/capabilities' if known else ''}\n"
            f"chown -R {ONEADMIN[0]}:{ONEADMIN[1]} {LOCATION} {OWNED}; libvirtd -d"
        )
        side = HostSide(host)
        side.on(share_steps.MarkRoot(TREE, MARKER))
        for image, owner in OWNERS.items():
            self.paths[image] = side.on(share_steps.MakeShare(TREE, Share(image, owner, 1, SIZES[image])))[0][
                "source"
            ]
        for vm, images in ((1, (1, 3)), (2, (2,))):
            noted = {str(image): [MARKER, 1] for image in images}
            side.on(
                s.PrepareVm(vm, f"{LOCATION}/101/{vm}"), s.NoteClients(vm, f"{LOCATION}/101/{vm}", (), noted)
            )

    def boot(self, vm: int, *images: int) -> None:
        """Let a guest boot as one_vmm_exec does."""
        vm_dir, values = (
            f"{LOCATION}/101/{vm}",
            [{"image": image, "source": self.paths[image]} for image in images],
        )
        disks = "".join(DISK.format(**value) for value in values)
        self.host.put(f"{vm_dir}/vm.xml", f"<VM><ID>{vm}</ID><TEMPLATE>{disks}</TEMPLATE></VM>".encode())
        filesystems = "".join(FILESYSTEM.format(**value) for value in values)
        domain = DOMAIN.format(
            vm=vm, boot=self._top, words=LINUX.os["KERNEL_CMD"], filesystems=filesystems
        ).encode()
        words = [
            f"{self._top}/remotes/vmm/semishared/deploy",
            f"{vm_dir}/deployment.0",
            "shares",
            str(vm),
            "shares",
        ]
        self.host.run(words, stdin=domain, user=ONEADMIN, timeout=LONG_S)
        self.guests[vm] = Inner(self.host, vm)

    def mount(self, vm: int, *images: int) -> None:
        """Wait for a guest, and mount its shares."""
        self.guests[vm].wait_up()
        for image in images:
            assert self.guests[vm].run(
                f"mkdir /share{image} && mount -t virtiofs share{image} /share{image}"
            ) == (0, "")

    def stat(self, format: str, path: str) -> str:
        """Return what is true of a file on the host."""
        return self.host.run(["stat", "-c", format, path]).out.strip()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    top = Path(tempfile.mkdtemp(prefix="shares-", dir="/var/tmp"))
    try:
        with KernelHost("shares", memory_mib=1400, disks={"shares": 500, "off": 320}, processors=2) as host:
            site = Site(host, top)
            site.prepare()
            for vm, images in ((1, (1, 3)), (2, (2,))):
                site.boot(vm, *images)
            for vm, images in ((1, (1, 3)), (2, (2,))):
                site.mount(vm, *images)
            yield site
    finally:
        shutil.rmtree(top)


def test_what_root_of_a_guest_makes_is_of_no_user_of_the_host(site: Site) -> None:
    assert site.guests[1].run(
        "cp /bin/busybox /share3/su && chmod 6755 /share3/su && stat -c %a:%u /share3/su"
    ) == (0, "6755:0\n")
    first = first_uid(OWNERS[3])
    assert site.stat("%a:%u:%g", f"{site.paths[3]}/su") == f"6755:{first}:{first}"
    script = (
        "mknod /share3/disk b 252 0; echo >/share3/last; chown 65535:65535 /share3/last; chown 65536 "
        "/share3/last; rm /share3/su"
    )
    said = "mknod: /share3/disk: Operation not permitted\nchown: /share3/last: Invalid argument\n"
    assert site.guests[1].run(script) == (0, said)
    assert site.stat("%u:%g", f"{site.paths[3]}/last") == f"{first + 65535}:{first + 65535}"
    assert site.guests[1].run("rm /share3/last") == (0, "")


def test_a_guest_that_fills_its_share_is_told_so_at_its_size_and_its_neighbour_goes_on(site: Site) -> None:
    full, other = site.guests[1], site.guests[2]
    code, said = full.run("dd if=/dev/zero of=/share1/file bs=256k count=24 conv=fsync")
    assert code == 1 and "No space left on device" in said, said
    assert site.stat("%s", f"{site.paths[1]}/file") == str(SIZES[1])
    assert full.run("df -k /share1 | tail -1 | awk '{print $2, $4}'") == (0, f"{SIZES[1] >> 10} 0\n")
    # While the share of the first is full.
    assert other.run("dd if=/dev/zero of=/share2/file bs=256k count=20 conv=fsync 2>/dev/null") == (0, "")
    assert site.stat("%s", f"{site.paths[2]}/file") == str(5 * MiB)
    assert full.run(
        "rm /share1/file && dd if=/dev/zero of=/share1/file bs=256k count=15 conv=fsync 2>/dev/null"
    ) == (0, "")


def test_files_without_data_end_too_in_a_guest(site: Site) -> None:
    # What a size of 8 MiB allows, without the directory itself.
    code, said = site.guests[1].run(
        "cd /share3; i=0; while [ $i -lt 1100 ] && true >$i; do i=$((i+1)); done; echo made $i"
    )
    assert said == "sh: can't create 1023: No space left on device\nmade 1023\n", code
    assert site.guests[2].run("echo >/share2/small") == (0, "")
