# SPDX-License-Identifier: Apache-2.0
"""What a guest has beside its disks goes along too: UEFI variables, a file in its directory, and its TPM,
which QEMU and swtpm hand on, and a full backup has.
"""

from __future__ import annotations

import base64
import shutil
import struct
import threading
import time
from typing import Iterator

import pytest

from lab import caches
from lab.cloud import ONCE, Cloud
from lab.guest import BOOT, LINUX, Guest, GuestError
from system.test_backup_places import in_repository, keep

pytestmark = pytest.mark.long
OVMF = "/usr/share/OVMF/OVMF_CODE.fd"
VARIABLES = "/sys/firmware/efi/efivars/{}-6d1a7c7e-0f0e-4f7c-8b1a-000000000016"
BEFORE, MEANWHILE = VARIABLES.format("Before"), VARIABLES.format("Meanwhile")
ATTRIBUTES = struct.pack("<I", 7)
"""Not volatile, seen at boot and afterwards."""
CRASHED = "X64 Exception"
PCR = 16
SHA256 = 0x000B
NOBODY = struct.pack(">IIHBH", 9, 0x40000009, 0, 0, 0)
"""Of a session: an empty password."""


def tpm(guest: Guest, tag: int, code: int, body: bytes) -> bytes:
    """Send one command to the guest's TPM; return what its answer holds."""
    answer = guest.device("/dev/tpm0", struct.pack(">HII", tag, 10 + len(body), code) + body)
    result = struct.unpack(">HII", answer[:10])[2]
    assert result == 0, f"TPM command {code:#x}: {result:#x}"
    return answer[10:]


def extend(guest: Guest, digest: bytes) -> None:
    """Extend a register: it lives in the TPM's memory, and the next boot begins without it."""
    tpm(guest, 0x8002, 0x182, struct.pack(">I", PCR) + NOBODY + struct.pack(">IH", 1, SHA256) + digest)


OWNER, INDEX = 0x40000001, 0x01500016


def define(guest: Guest) -> None:
    """Make a place of 8 bytes in the TPM's own memory, which stays from boot to boot."""
    public = struct.pack(">IHIHH", INDEX, SHA256, 0x02060006, 0, 8)
    tpm(guest, 0x8002, 0x12A, struct.pack(">I", OWNER) + NOBODY + struct.pack(">HH", 0, len(public)) + public)


def remember(guest: Guest, value: bytes) -> None:
    body = struct.pack(">II", OWNER, INDEX) + NOBODY + struct.pack(">H", 8) + value + bytes(2)
    tpm(guest, 0x8002, 0x137, body)


def remembered(guest: Guest) -> bytes:
    answer = tpm(guest, 0x8002, 0x14E, struct.pack(">II", OWNER, INDEX) + NOBODY + struct.pack(">HH", 8, 0))
    return answer[6:14]


def register(guest: Guest) -> bytes:
    selected = (1 << PCR).to_bytes(3, "little")
    return tpm(guest, 0x8001, 0x17E, struct.pack(">IHB", 1, SHA256, 3) + selected)[-32:]


@pytest.fixture(scope="module")
def tpm_hosts(cloud: Cloud) -> Iterator[None]:
    """Have swtpm run as QEMU does, as OpenNebula wants it, and a kernel that UEFI can start."""
    for host in cloud.lab.hosts:
        conf = host.path("/etc/libvirt/qemu.conf")
        conf.write_text(f'{conf.read_text()}\nswtpm_user = "oneadmin"\nswtpm_group = "oneadmin"\n')
        host.run(["install", "-d", "-o", "oneadmin", "/var/lib/swtpm-localca"], user="root")
        host.run(["pkill", "-x", "libvirtd"], user="root")
        until(lambda host=host: not host.run(["pgrep", "-x", "libvirtd"], user="root", check=False).stdout)
        host.run(["/usr/sbin/libvirtd", "-d"], user="root")
        shutil.copy(caches.newest_kernel(), host.path(f"{BOOT}/vmlinuz"))
    yield


def until(is_so: object) -> None:
    deadline = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def deploy(cloud: Cloud) -> int:
    image = cloud.os_image("firmware", system=LINUX)
    template = cloud.template(
        "firmware of a guest", [{"IMAGE_ID": str(image)}], machine="q35", TPM={"MODEL": "tpm-crb"}
    )
    # A guest whose firmware has crashed is reset (booted).
    template["RAW"] = {**template["RAW"], "DATA": template["RAW"]["DATA"].replace(ONCE, "")}
    template["OS"] = {**template["OS"], "KERNEL": f"{BOOT}/vmlinuz", "FIRMWARE": OVMF}
    vm = cloud.oned.vm_create({**template, "MEMORY": "256"})
    cloud.oned.vm_deploy(vm, "h1", 101)
    return vm


def booted(cloud: Cloud, vm: int) -> Guest:
    """Wait for a guest, and reset it if its firmware has crashed: OVMF before 2023.02 lets interrupts of the
    timer nest until its stack is full, where the processor is slow enough.
    """
    for patience in (600, 900):
        try:
            return cloud.guest(vm, timeout=patience)
        except GuestError as error:
            if CRASHED in str(error):
                cloud.oned.vm_reboot(vm, hard=True)
    return cloud.guest(vm, timeout=1800)


def has_both(cloud: Cloud, vm: int) -> None:
    """See that the guest has its variables, and that they are in the file it will boot with next."""
    guest, record = booted(cloud, vm), cloud.oned.vm(vm)
    kept = (
        cloud.lab.node(record.last.host.name).path(f"{cloud.vm_dir(vm)}/{record.name}_VARS.fd").read_bytes()
    )
    for variable, value in ((BEFORE, b"written before"), (MEANWHILE, b"written meanwhile")):
        assert guest.file(variable) == ATTRIBUTES + value
        assert value in kept


def test_variables_and_tpm_go_along(cloud: Cloud, tpm_hosts: None) -> None:
    h1, h2 = cloud.lab.hosts
    vm = deploy(cloud)
    guest = booted(cloud, vm)
    guest.file(BEFORE, ATTRIBUTES + b"written before")
    extend(guest, bytes(range(32)))
    extended = register(guest)
    assert extended != bytes(32)

    # What is written while it moves is in the firmware's memory: QEMU writes it to the file at the target.
    moving = threading.Thread(target=cloud.oned.vm_migrate, args=(vm, "h2"), kwargs={"how": "live"})
    kvmrc = h1.path("/var/tmp/one/etc/vmm/kvm/kvmrc")
    before = kvmrc.read_text()
    kvmrc.write_text(f'{before}\nMIGRATE_OPTIONS="--bandwidth 16"\n')
    moving.start()
    job = ["virsh", "-q", "-c", "qemu:///system", "domjobinfo", f"one-{vm}"]
    until(lambda: b"Memory processed" in h1.run(job, check=False).stdout)
    guest.file(MEANWHILE, ATTRIBUTES + b"written meanwhile")
    moving.join()
    kvmrc.write_text(before)
    assert cloud.oned.state(vm) == ("ACTIVE", 3) and cloud.oned.vm(vm).last.host.name == "h2"
    guest = cloud.guest(vm)
    has_both(cloud, vm)
    assert register(guest) == extended
    extend(guest, bytes(32))
    assert register(guest) != extended
    assert [name for name in cloud.files(h1, "/var/lib/libvirt/swtpm") if name.endswith("permall")] == []

    # Off and to the other host: the variables are a file of the VM's directory.
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.oned.vm_migrate(vm, "h1")
    cloud.oned.vm_resume(vm)
    has_both(cloud, vm)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.fixture
def rule(cloud: Cloud) -> Iterator[None]:
    """Let the drivers' user run what OpenNebula's packages let it run."""
    places = [host.path("/etc/sudoers.d/vtpm") for host in cloud.lab.hosts]
    for place in places:
        place.write_text("oneadmin ALL=(root) NOPASSWD: /var/tmp/one/vtpm_setup *\n")
    yield
    for place in places:
        place.unlink()


@pytest.mark.fault(94, "a guest whose VM was restored finds in its TPM what it had there then")
def test_tpm_is_backed_up_and_restored(cloud: Cloud, tpm_hosts: None, rule: None) -> None:
    image = cloud.os_image("tpm", system=LINUX)
    template = cloud.template("tpm", [{"IMAGE_ID": str(image)}], TPM={"MODEL": "tpm-crb"})
    # Of a kernel that is no bzImage SeaBIOS spoils the ACPI tables, by which it would find its TPM.
    template["OS"] = {**template["OS"], "KERNEL": f"{BOOT}/vmlinuz"}
    vm = cloud.oned.vm_create(template)
    cloud.oned.vm_deploy(vm, "h1", 101)
    guest = cloud.guest(vm, timeout=600)
    define(guest)
    remember(guest, b"then....")
    words = ("0", cloud.oned.vm(vm).deploy_id, "-", str(vm), "101")
    cloud.tm("prebackup_live", vm, *words)
    kept_in = cloud.lab.fe.path(keep(cloud, vm))
    packed = base64.b64encode((kept_in / "disk.tpm.0").read_bytes()).decode()
    cloud.tm("postbackup_live", vm, *words)
    remember(guest, b"now.....")
    cloud.oned.vm_poweroff(vm, hard=True)
    # What the backup has copied there: a restore brings it back.
    h1, state = cloud.lab.node("h1"), f"{cloud.vm_dir(vm)}/tpm/tpm2-00.permall"
    kept = h1.path(state).read_bytes()
    h1.run(["rm", state])
    with in_repository(cloud, vm) as backup:
        cloud.tm("restore", vm, str(vm), str(backup), "-1", "-1")
    assert h1.path(state).read_bytes() == kept
    cloud.oned.vm_resume(vm)
    assert remembered(cloud.guest(vm, timeout=600)) == b"then...."
    cloud.terminate(vm)
    # `oneimage restore` makes a template that has the state.
    vm = cloud.oned.vm_create({**template, "TPM_STATE": packed})
    cloud.oned.vm_deploy(vm, "h2", 101)
    assert remembered(cloud.guest(vm, timeout=600)) == b"then...."
    cloud.terminate(vm)
    cloud.oned.image_delete(image)
    assert cloud.leftovers() == []
