# SPDX-License-Identifier: Apache-2.0
"""Encrypted disks: a raw image with a LUKS header; libvirt has its passphrase (LUKS_SECRET), QEMU decrypts.

What lies on a disk is ciphertext, what QEMU reads is not. So whatever copies files or RBD images keeps the
secret, and whatever is copied by a running QEMU (snapshots, save-as, backups) would be plaintext. And an
overlay has no LUKS header: QEMU, told to decrypt, would not open it, nor could it keep what the guest writes.
Below QEMU, on RBD, a clone is as good as a copy.

LUKS_SECRET is an attribute of the image that OpenNebula copies into the VM's DISK, whose user can write it.
Only for what is made of an image here does it have to be anything that libvirt could know; everywhere else
any value means encrypted.
"""

from __future__ import annotations

from typing import Iterable

from ...errors import EncryptedDisk
from ...model.attributes import LUKS_SECRET
from ...model.disk.place import Place
from ...opennebula.xml import Disk, Image, Vm

UNDER_OVERLAY = (
    "is encrypted (LUKS_SECRET) and cannot be laid under a qcow2 overlay, which QEMU would not open"
)


def secret(disk: Disk, image: Image | None = None) -> str:
    """Return the UUID of the libvirt secret that a disk is opened with, '' for none; raise BadAttribute."""
    for holder, text in (
        (f"disk {disk.id}", disk.luks_secret),
        (f"image {image.id}" if image else "", image.luks_secret if image else ""),
    ):
        if text:
            LUKS_SECRET.parsed(text, holder)
    return disk.luks_secret or (image.luks_secret if image else "")


def check_clone(disk: Disk, image: Image, place: Place, has_bridge: bool) -> None:
    """Raise EncryptedDisk if a disk made of an encrypted image, in `place`, could not be opened."""
    if secret(disk, image) and place.backing != "none" and (place.is_local or not has_bridge):
        raise EncryptedDisk(
            f"image {image.id} {UNDER_OVERLAY}: "
            "set SEMISHARED_LOCAL = copy, without SEMISHARED_PLACE = shared, or make the image persistent"
        )


def check_diff(disk: Disk, image: Image) -> None:
    """Raise EncryptedDisk if the image of a disk that is to be local and committed is encrypted."""
    if secret(disk, image):
        raise EncryptedDisk(
            f"image {image.id} {UNDER_OVERLAY}: remove SEMISHARED_PLACE = local, it is then attached in place"
        )


def check_volatile(disk: Disk) -> None:
    """Raise EncryptedDisk if an empty disk is to be opened with a secret: it has no LUKS header."""
    if secret(disk):
        raise EncryptedDisk(
            f"disk {disk.id} is volatile and has a LUKS_SECRET, but an empty disk is not encrypted"
        )


def check_running(vm: Vm, numbers: Iterable[int], what: str) -> None:
    """Raise EncryptedDisk if a running QEMU is to copy an encrypted disk: it would write plaintext."""
    for number in numbers:
        if vm.disk(number).luks_secret:
            raise EncryptedDisk(
                f"disk {number} of VM {vm.id} is encrypted (LUKS_SECRET), and a {what} while it "
                f"runs would be decrypted"
            )


def check_snapshot(vm: Vm, number: int, in_place: bool, is_running: bool) -> None:
    """Raise EncryptedDisk if a snapshot would be plaintext, or leave the guest with an overlay; a copy of
    what is off is neither.
    """
    if is_running:
        check_running(vm, [number], "snapshot")
    if vm.disk(number).luks_secret and not in_place:
        raise EncryptedDisk(
            f"disk {number} of VM {vm.id} is encrypted (LUKS_SECRET): a snapshot would put a "
            f"qcow2 overlay over it, which QEMU "
            "would not open; only a persistent disk can have snapshots, while the VM is off"
        )
