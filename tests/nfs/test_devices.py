# SPDX-License-Identifier: Apache-2.0
"""A device of a pool whose middle answers with errors (dm-error, by Debian's kernel): it is said, and the
rest of the host goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lab.kernel_host import ONEADMIN, KernelHost, KernelHostError
from nfs.site import LOCATION, PATIENCE_S, STORE, HostSide
from semishared.errors import DeviceMissing, HostFailed
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.device import steps as device_steps
from semishared.model.leftover_steps import LookAround

ROOT = f"{LOCATION}/.semishared"
BOOT = """
import sys
from semishared.vmm import records
directory = sys.argv[1]
for record in records.read_records(directory, [0]):
    records.check_disk(directory, record)
    records.read_chain(record.path, record)
"""
"""What vmm/deploy sees of a disk before it starts the VM."""


class Device(KernelHost):
    """A host with two devices, /mnt/a and /mnt/b; what lies below the first can answer with errors."""

    def __init__(self) -> None:
        super().__init__("devices", disks={"local": 400, "a": 400, "b": 400})
        self.side: HostSide | None = None

    def prepare(self) -> None:
        self.mount_disk("local", LOCATION)
        self.mount_disk("b", "/mnt/b")
        mount = "dmsetup mknodes; mkdir -p /mnt/a; mount -t xfs /dev/mapper/a /mnt/a"
        self.script(
            f"modprobe dm-mod; echo '{self._table()}' | {self.dmsetup('create a')}; {mount}; "
            f"chown {ONEADMIN[0]} /mnt/a"
        )
        self.script(
            f"mkdir -p {STORE} {LOCATION}/101; chown {ONEADMIN[0]}:{ONEADMIN[1]} {STORE} {LOCATION}/101"
        )
        self.side = HostSide(self)

    @staticmethod
    def dmsetup(words: str) -> str:
        return f"dmsetup --noudevsync --noudevrules {words}"

    def _table(self, *bad: tuple[int, int]) -> str:
        """Return the table of the device, in sectors: errors where it is bad, else what is below it."""
        end, at, lines = (400 << 20) // 512, 0, []
        for first, last in (*sorted(bad), (end, end)):
            if first > at:
                lines.append(f"{at} {first - at} linear /dev/vdb {at}")
            if last > first:
                lines.append(f"{first} {last - first} error")
            at = last
        return "\\n".join(lines)

    def have_errors(self, *bad: tuple[int, int]) -> None:
        """Answer with errors between these sectors, and as it should everywhere else."""
        change = f"printf '{self._table(*bad)}\\n' | {self.dmsetup('load a')}; {self.dmsetup('resume a')}"
        self.script(
            f"{self.dmsetup('suspend --nolockfs --noflush a')}; {change}; echo 3 >/proc/sys/vm/drop_caches"
        )

    def where(self, path: str) -> list[tuple[int, int]]:
        """Return on which sectors a file lies."""
        said = self.run(["xfs_bmap", path]).out
        return [(int(first), int(last) + 1) for first, last in re.findall(r": (\d+)\.\.(\d+)", said)]

    def on(self, *steps: s.Step) -> list[object]:
        assert self.side
        return self.side.on(*steps, timeout=PATIENCE_S)

    def image(self, number: int, pattern: int) -> s.ImageRef:
        path = f"{STORE}/image{number}"
        fill = f"truncate -s 4M {path}; qemu-io -f raw -c 'write -P {pattern} 0 1M' {path}"
        self.script(fill, user=ONEADMIN)
        return s.ImageRef(100, number, "raw", path)

    def clone(self, image: s.ImageRef, vm: int) -> s.DiskRef:
        disk = s.DiskRef(vm, 0, f"{LOCATION}/101/{vm}")
        self.on(s.StageBase(ROOT, image), s.PrepareVm(vm, disk.vm_dir), s.CreateOverlay(disk, image, 0, ""))
        return disk

    def device_of(self, path: str) -> str:
        return self.run(["realpath", path]).out.split("/.semishared/")[0]

    def states(self) -> dict[str, str]:
        (answer,) = self.on(device_steps.ListDevices(ROOT))
        assert isinstance(answer, dict)
        return {row["path"]: row["state"] for row in answer["devices"]}

    def reads(self, path: str, format: str, pattern: int) -> bool:
        done = self.run(
            ["qemu-io", "-r", "-f", format, "-c", f"read -P {pattern} 0 1M", path], user=ONEADMIN, check=False
        )
        return done.code == 0 and "failed" not in done.out + done.err and "error" not in done.out + done.err

    def can_boot(self, disk: s.DiskRef) -> None:
        """Raise KernelHostError as vmm/deploy fails."""
        self.python(BOOT, disk.vm_dir, user=ONEADMIN)


@pytest.fixture
def host() -> Iterator[Device]:
    with Device() as made:
        made.prepare()
        yield made


@pytest.mark.long  # a machine boots for it; tests/pool and tests/tools have devices that fail as a whole
def test_a_device_that_fails_from_its_middle(host: Device) -> None:
    host.on(device_steps.SetDevices(ROOT, ("/mnt/a",)))
    image = host.image(1, 0xA1)
    first = host.clone(image, 1)
    base = f"{ROOT}/bases/{host.run(['ls', f'{ROOT}/bases']).out.strip()}"
    name = base.rpartition("/")[2]
    assert host.device_of(base) == host.device_of(f"{first.path}.snap") == "/mnt/a"
    host.on(device_steps.SetDevices(ROOT, ("/mnt/a", "/mnt/b")))

    # Only what a base lies on: the file system is well, its label can be read and written, and nobody knows
    # until it is read.
    host.have_errors(*host.where(f"{base}/image"))
    assert host.states() == {"/mnt/a": "", "/mnt/b": ""}
    assert not host.reads(first.path, "qcow2", 0xA1)
    (found,) = host.on(base_steps.VerifyBase(ROOT, name, 0))
    assert isinstance(found, dict) and found["bad"] and found["damaged"]
    second = host.clone(image, 2)
    assert host.reads(second.path, "qcow2", 0xA1), "over a base that was made again"
    host.on(base_steps.MendBase(ROOT, image._replace(generation=name.rpartition("-")[2])))
    assert host.reads(first.path, "qcow2", 0xA1), "of the old one nothing is left"
    (found,) = host.on(base_steps.VerifyBase(ROOT, name, 0))
    assert isinstance(found, dict) and not found["bad"]

    # From the middle, with the log of the file system in it: it shuts itself down at the next write.
    host.have_errors(((200 << 20) // 512, (400 << 20) // 512))
    # Or at a write of its own, between the look at it and the step: then the action fails in one line.
    try:
        third = host.clone(image, 3)
    except HostFailed as e:
        assert "Input/output error" in str(e)
        third = host.clone(image, 3)
    fourth = host.clone(host.image(2, 0xB2), 4)
    assert host.states() == {"/mnt/a": "broken: Input/output error", "/mnt/b": ""}
    for disk, pattern in ((third, 0xA1), (fourth, 0xB2)):
        assert host.device_of(f"{disk.path}.snap") == "/mnt/b"
        assert host.reads(disk.path, "qcow2", pattern)
        host.can_boot(disk)
    with pytest.raises(
        KernelHostError, match=f"{DeviceMissing.__name__}.*on the device /mnt/a of devices, which is broken"
    ):
        host.can_boot(first)
    (listed,) = host.on(base_steps.ListBases(ROOT))
    assert isinstance(listed, dict)
    host.on(LookAround(LOCATION, (101,), (), False), s.RemoveVm(3, third.vm_dir), s.RemoveVm(1, first.vm_dir))

    # It comes back whole: what it has is used again.
    host.script("umount -l /mnt/a")
    host.have_errors()
    host.script("until mount -t xfs /dev/mapper/a /mnt/a; do sleep 1; done")
    assert host.states() == {"/mnt/a": "", "/mnt/b": ""}
    host.can_boot(second)
    assert host.reads(second.path, "qcow2", 0xA1)
