# SPDX-License-Identifier: Apache-2.0
"""Memory as a device of a host's pool, made by the shipped script: zram and brd of Debian's kernel, with XFS,
past the page cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHost
from nfs.site import LOCATION, STORE, Guest, Host, NfsSite
from semishared.errors import BadPool, LostWithMemory, NoDeviceOfClass
from semishared.model import steps as s
from semishared.model.device import steps as device_steps

MiB = 1 << 20
SIZE = 64 * MiB
ROOT = f"{LOCATION}/.semishared"
INSTALL = f"{caches.CHECKOUT}/lib/semishared/install"
MEMORY = "/run/semishared-ram"
DIRECT = """
import mmap, os, sys
mixed = []
for at in (0, 512, 1024, 2048):
    memory, beside = mmap.mmap(-1, 8192), bytes(4096 - at)
    for word in ("write", "read"):
        content = os.urandom(4096)
        with open(sys.argv[1], "wb") as file:
            file.write(bytes(4096) if word == "write" else content)
            os.fsync(file.fileno())
        memory[:] = bytes(at) + (content if word == "write" else bytes(4096)) + beside
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_DIRECT)
        try:
            (os.pwritev if word == "write" else os.preadv)(fd, [memoryview(memory)[at : at + 4096]], 0)
        except OSError:
            assert at, "in pages it is always let through"
            continue
        finally:
            os.close(fd)
        with open(sys.argv[1], "rb") as file:
            # As the device has it. (To drop all caches would have each program of this machine be read anew.)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if memory[:] != bytes(at) + content + beside or file.read() != content:
                mixed.append(f"{word} at {at}")
print(*mixed, sep=", ")
"""
"""Writes and reads a page past the page cache, from and to memory that begins within one; prints what was let
through and went wrong.
"""
FIT = 3
"""Disks of that size in 320 MiB, of which XFS takes 64 for its log and a twentieth is for tables."""


class MemoryHost(Host):
    """A host with memory to spare, and an image on what takes the place of its store."""

    def __init__(self) -> None:
        KernelHost.__init__(self, "ram", memory_mib=1100, disks={"local": 400})
        self._side = None

    def prepare(self) -> s.ImageRef:
        self.mount_disk("local", LOCATION)
        self.script(
            f"modprobe xfs; mkdir -p {LOCATION}/101 {STORE}; chown {ONEADMIN[0]}:{ONEADMIN[1]} "
            f"{LOCATION}/101 {STORE}"
        )
        fill = (
            f"head -c 64k /dev/zero | tr '\\0' '\\241' | dd of={STORE}/image bs=64k seek=16 "
            f"iflag=fullblock status=none"
        )
        self.script(f"{fill}; truncate -s {SIZE} {STORE}/image; chmod 660 {STORE}/image", user=ONEADMIN)
        return s.ImageRef(100, 1, "raw", f"{STORE}/image")

    def clone(
        self, image: s.ImageRef, vm: int, classes: tuple[str, ...] = ("ram",), size: int = SIZE
    ) -> s.DiskRef:
        """Clone an image of that size into memory as `tm/clone` plans it."""
        disk = self.disk(vm)
        self.on(s.PrepareVm(vm, disk.vm_dir), device_steps.PlaceLayers(disk, classes, size, size // 10))
        overlay = s.CreateOverlay(disk, image, 0, "extended_l2=on,cluster_size=128k")
        self.on(s.StageBase(ROOT, image), overlay, device_steps.NoteClasses(disk, classes))
        return disk

    def row(self) -> dict[str, object]:
        """Return what is told of memory."""
        (answer,) = self.on(device_steps.ListDevices(ROOT))
        (row,) = [row for row in answer["devices"] if row["path"] == MEMORY]
        return dict(row)

    def zram(self) -> list[int]:
        """Return the bytes that were written to it, those that are left of them compressed, what it takes for
        these, and its limit.
        """
        return list(map(int, self.run(["cat", "/sys/block/zram0/mm_stat"]).out.split()[:4]))

    def unit(self, word: str) -> str:
        """Carry out a line of the shipped unit, as systemd would."""
        (line,) = re.findall(
            rf"^{word}=(.+)$", self.run(["cat", f"{INSTALL}/semishared-ram.service"]).out, re.MULTILINE
        )
        done = self.run(line.split(), check=False)
        return done.err if done.code else ""


def mixed(host: KernelHost, directory: str) -> str:
    """Return which direct I/O of a file in a directory has taken memory for other memory."""
    return host.run(["/usr/bin/python3", "-I", "-S", "-c", DIRECT, f"{directory}/direct"]).out.strip()


@pytest.fixture(scope="module")
def host() -> Iterator[MemoryHost]:
    with MemoryHost() as up:
        yield up


@pytest.fixture(scope="module")
def image(host: MemoryHost) -> s.ImageRef:
    return host.prepare()


def test_zram_alone_is_no_place_for_disks_and_is_said_to_be_none(nfs_site: NfsSite) -> None:
    """On a machine that is up, with nothing in memory when it is done: what needs much of it has one of its
    own.
    """
    host = nfs_site.hosts[1]
    look = f"from semishared.device import memory; print(memory.mixes_memory('{MEMORY}'), memory.zram_limit('{MEMORY}'))"  # noqa: E501
    host.script(
        f"modprobe zram; device=$(zramctl --find --size 320M); mkfs.xfs -q $device; mkdir -p "
        f"{MEMORY}; mount $device {MEMORY}\n"
        "echo 300M >/sys/block/${device#/dev/}/mem_limit"
    )
    try:
        assert mixed(host, MEMORY) == ", ".join(
            f"{word} at {at}" for at in (512, 1024, 2048) for word in ("write", "read")
        )
        assert host.python(look).out.split() == ["True", str(300 * MiB)]
    finally:
        host.script(f"device=$(findmnt -n -o SOURCE {MEMORY}); umount {MEMORY}; zramctl --reset $device")
    assert host.python(look).out.split() == ["False", "0"], "it is in the root directory now"


def check_watched(host: MemoryHost, kind: str) -> None:
    """See that memory which is promised twice is looked after, as the unit or cron has it, and is full before
    its device is.
    """
    assert host.row()["watched"] is False
    command = re.findall(
        r"^ExecStart=(.+)$", host.run(["cat", f"{INSTALL}/semishared-ram-watch.service"]).out, re.MULTILINE
    )
    watcher = host.start_program(command[0].split())
    try:
        last = f"{MEMORY}/.semishared/spare/3"
        host.script(f"for _ in $(seq 300); do [ -e {last} ] && break; sleep 0.1; done; stat {last}")
        assert host.row()["watched"] is True and host.run(command[0].split()).code == 0, "one on each host"
        # What cannot be compressed, past the page cache as QEMU writes it.
        filled = host.run(
            ["dd", "if=/dev/urandom", f"of={MEMORY}/full", "bs=1M", "oflag=direct"], check=False
        ).err
        assert "No space left on device" in filled, filled
        if kind == "zram":
            assert host.zram()[2] < 340 * MiB and host.zram()[3] == host.row()["limit"] == 0
        # The last blocks, too: then nothing can be made there but with what was kept free, as the delta of a
        # disk that is to leave.
        host.script(
            f"dd if=/dev/zero of={MEMORY}/full bs=4k oflag=direct,append conv=notrunc 2>/dev/null || :"
        )
        make = ["qemu-img", "create", "-q", "-f", "qcow2", f"{MEMORY}/delta", "1G"]
        assert "No space left" in host.run(make, user=ONEADMIN, check=False).err
        give = f"from semishared.device import ledger; assert ledger.give_spare('{MEMORY}/.semishared')"
        host.python(give, user=ONEADMIN)
        host.run(make, user=ONEADMIN)
        host.run(["rm", f"{MEMORY}/full", f"{MEMORY}/delta"])
        assert host.unit("ExecStop") == ""
        assert watcher.wait(60).code == 0, "without memory there is nothing to look after"
    finally:
        watcher.signal()


@pytest.mark.parametrize("kind", ["zram", "brd"])
@pytest.mark.long  # what it makes is a device of class ram as in tests/pool/test_ram.py
def test_the_shipped_script_makes_memory_a_device_for_disks(
    host: MemoryHost, image: s.ImageRef, kind: str
) -> None:
    refused = host.run(["sh", f"{INSTALL}/semishared-ram.sh", "enable", "320M", kind, "9"], check=False)
    assert refused.err == "semishared-ram: '9' is not 1 to 8 times\n"
    host.script(f"sh {INSTALL}/semishared-ram.sh enable 320M {kind}")
    source = host.run(["findmnt", "-n", "-o", "SOURCE,FSTYPE", MEMORY]).out.split()
    assert source == ["/dev/dm-0" if kind == "zram" else "/dev/ram0", "xfs"]
    assert int(host.run(["blockdev", "--getsize64", source[0]]).out) == 320 * MiB
    verified = host.run(
        [
            "systemd-analyze",
            "verify",
            f"{INSTALL}/semishared-ram.service",
            f"{INSTALL}/semishared-ram-watch.service",
        ]
    )
    assert (verified.out, verified.err) == ("", "")
    with pytest.raises(
        BadPool,
        match=f"{MEMORY} on .* is memory, which a restart empties, and declared as fast: {MEMORY}=ram is",
    ):
        host.on(device_steps.SetDevices(ROOT, (MEMORY,)))
    host.on(device_steps.SetDevices(ROOT, (f"{MEMORY}=ram",)))
    row = host.row()
    assert (row["class"], row["state"], row["promised"], row["mixes_memory"]) == ("ram", "", 0, False)
    assert mixed(host, MEMORY) == ""
    host.script(f"rm {MEMORY}/direct")

    disks = [host.clone(image, vm) for vm in range(1, FIT + 1)]
    assert host.row()["promised"] == FIT * SIZE
    with pytest.raises(
        NoDeviceOfClass, match=f"no device of class ram on ram for a disk of up to 64.0 MiB: {MEMORY} has"
    ):
        host.clone(image, 9)
    guest = Guest(host, disks[0].path, "qcow2")
    assert "error" not in guest.do("read -P 0xa1 1M 64k") + guest.do(f"write -P 7 0 {SIZE // 2}") + guest.do(
        "read -P 7 4M 1M"
    )
    top = host.run(["readlink", "-f", disks[0].path]).out.strip()
    assert top.startswith(f"{MEMORY}/.semishared/layers/1-0-")
    if kind == "zram":
        original, stored, used, _ = host.zram()
        assert original > SIZE // 4 and stored < original // 4 and used < 320 * MiB
    assert "is in use" in host.unit("ExecStop"), "a guest has a disk open there"
    assert "error" not in guest.do("read -P 7 0 1M")
    guest.end()

    assert host.unit("ExecStop") == "" and host.unit("ExecStop") == "", "once more is as good as once"
    assert host.run(["mountpoint", "-q", MEMORY], check=False).code and host.row()["state"] == "not there"
    left = host.run(
        ["bash", "-c", "cat /sys/block/zram0/disksize /sys/block/ram0/size 2>/dev/null || true"]
    ).out.split()
    assert set(left) <= {"0"}, "the memory is free"
    assert host.run(["dmsetup", "ls"]).out == "No devices found\n"
    assert host.unit("ExecStart") == "" and host.unit("ExecStart") == ""
    if kind == "zram":
        # As a stop leaves it that was cut off when it had unmounted.
        host.script(f"umount {MEMORY}")
        assert host.unit("ExecStart") == ""
        sizes = host.run(["bash", "-c", "cat /sys/block/zram*/disksize"]).out.split()
        assert [size for size in sizes if size != "0"] == [str(320 * MiB)], (
            "one device, and no memory beside it"
        )
        assert host.unit("ExecStop") == host.unit("ExecStart") == ""
    assert host.row()["uuid"] == row["uuid"] and host.row()["lost"] == [f"{vm}-0" for vm in range(1, FIT + 1)]
    with pytest.raises(LostWithMemory):
        host.on(s.SendVm(1, disks[0].vm_dir, ""))
    for disk in (*disks, host.disk(9)):
        host.on(s.RemoveVm(disk.vm, disk.vm_dir))
    again = host.clone(image, 1)
    host.on(s.RemoveVm(1, again.vm_dir))
    # Promised twice over, as somebody wants it, and so after a restart.
    host.script(f"sh {INSTALL}/semishared-ram.sh enable 320M {kind} 2")
    assert host.unit("ExecStop") == host.unit("ExecStart") == "" and host.row()["weight"] == 2
    many = [host.clone(image, vm) for vm in range(1, 2 * FIT + 1)]
    assert host.row()["promised"] == 2 * FIT * SIZE
    for disk in many:
        host.on(s.RemoveVm(disk.vm, disk.vm_dir))
    check_watched(host, kind)
    host.script(f"sh {INSTALL}/semishared-ram.sh disable")
    assert (
        host.run(["ls", "/etc/semishared-ram.conf", "/usr/local/sbin/semishared-ram"], check=False).out == ""
    )
