# SPDX-License-Identifier: Apache-2.0
"""Where a disk lives and how its overlay is made: attributes of the image, else of its datastore.

`overlay_options` needs no attribute: [overlays] of semishared.conf decides.

And its I/O class, and what an encrypted image rules out.
"""

from __future__ import annotations

from typing import Container, Iterable, Optional

from ... import NAME
from ...errors import BadAttribute, EncryptedDisk, OnedUnavailable
from ...model import steps as s
from ...model.attributes import CLASS, FS, IO_CLASS, LOCAL, LUKS_SECRET, PLACE, SHARE_ACCESS
from ...model.disk.place import DIFF, IN_PLACE, NORMAL, PLACES, STORE_CLONE, Place
from ...model.exchange import AskOned, On, Part, Plan, warn
from ...opennebula.args import VmPlace
from ...opennebula.xml import Datastore, Disk, Image, Vm


def place(image: Image, datastore: Datastore) -> Place:
    """Return the place of a disk that is cloned from `image`; raise BadAttribute."""
    where, where_from = PLACE.said(image, datastore)
    how, how_from = LOCAL.said(image, datastore)
    if where == "shared":
        if how_from and how_from == where_from:
            raise BadAttribute(
                f"SEMISHARED_LOCAL = {how} of {how_from} contradicts its SEMISHARED_PLACE = shared"
            )
        return STORE_CLONE
    return PLACES[how]


def is_client(image: Optional[Image], datastore: Datastore) -> bool:
    """Tell whether guests are clients of the share `image` (None: one without an attribute).

    Raise BadAttribute, also where that cannot be.
    """
    access, holder = SHARE_ACCESS.said(image, datastore)
    fs = FS.text(datastore).lower()
    if access == "client" and fs not in ("", "cephfs"):
        raise BadAttribute(
            f"SEMISHARED_SHARE_ACCESS of {holder} is client: datastore {datastore.id} is on {fs}, "
            f"only cephfs has clients"
        )
    return access == "client"


def device_classes(image: Image, datastore: Datastore) -> tuple[str, ...]:
    """Return the device classes for local disks from `image`, the first to try in front; raise BadAttribute.

    () for any.
    """
    return tuple(CLASS.value(image, datastore).split())


def is_diff(image: Image, datastore: Datastore) -> bool:
    """Tell whether disks of a persistent image lie over bases of their hosts; raise BadAttribute."""
    return PLACE.value(image, datastore) == "local"


def attached(image: Image, datastore: Datastore, disk: Disk) -> Place:
    """Return the place of a disk that ln attaches: persistent, or read-only; raise BadAttribute."""
    where, where_from = PLACE.said(image, datastore)
    LOCAL.value(image, datastore)
    if where != "local" or disk.is_readonly:
        return IN_PLACE  # nothing is written to what is read-only: there would be nothing to commit
    if image.is_shareable:
        raise BadAttribute(
            f"SEMISHARED_PLACE = local of {where_from} contradicts PERSISTENT_TYPE = SHAREABLE: what several "
            "guests write at once is in one place"
        )
    return DIFF


def reason(image: Image, datastore: Datastore, disk: Disk) -> str:
    """Return, in a few words, why a disk from `image` has the place of `place` or `attached`."""
    where, where_from = PLACE.said(image, datastore)
    how, how_from = LOCAL.said(image, datastore)
    if image.is_persistent or disk.is_readonly:
        if attached(image, datastore, disk).commits:
            return f"persistent, SEMISHARED_PLACE = local of {where_from}: only here until it is committed"
        return "persistent: attached in place"
    if where_from and where != "auto":
        return f"SEMISHARED_PLACE = {where} of {where_from}"
    if how_from:
        return f"not persistent, SEMISHARED_LOCAL = {how} of {how_from}"
    return "not persistent: the default"


def is_dense(disk: Disk, image: Optional[Image] = None) -> bool:
    """Tell whether all blocks of a disk are to be allocated: SPARSE = no of the DISK, else of its image."""
    said = disk.text("SPARSE") or (image.attribute("SPARSE") if image else "")
    return said.strip().lower() == "no"


BY_SIZE = "by-size"
ENTRY = 16
"""Bytes in an L2 table for a cluster with subclusters (docs/interop/qcow2.txt of QEMU)."""
CACHED = 32 << 20
"""Bytes of L2 tables in QEMU's cache by default (DEFAULT_L2_CACHE_MAX_SIZE in block/qcow2.h)."""
SMALL, LARGE = 128 << 10, 256 << 10
"""Bytes of a cluster; larger ones were nowhere found to be better."""


def overlay_options(configured: str, size: int) -> str:
    """Return the options (`qemu-img create -o`) of an overlay of `size` bytes, 0 if that is unknown.

    `options` in [overlays] of semishared.conf names them, or says that the size decides. An overlay's tables
    have 16 bytes for each cluster with subclusters, and QEMU keeps 32 MiB of them in memory at most. Clusters
    of 128 KiB, whose subclusters a write of 4 KiB fills, are best as long as the tables of the whole disk fit
    there. Otherwise random writes wait for tables that are read and written again and again, and clusters of
    twice that size have half as many (docs/explanation/overlay-options.md has the measurements).
    """
    if configured != BY_SIZE:
        return configured
    cluster = LARGE if size > CACHED // ENTRY * SMALL else SMALL
    return f"extended_l2=on,cluster_size={cluster >> 10}k"


# The I/O class of a disk: attributes name it, its record keeps it, plan/libvirt/domain.py applies it.
#
#   clone, ln               SEMISHARED_IO_CLASS of the image, else of its datastore
#   mkimage, mkswap         of the system datastore
#   context                 both again, of all disks: OpenNebula calls it before each boot


def noted(host: str, disk: s.DiskRef, io_class: str) -> Plan:
    """Note the class of a new disk, whose record has the usual one."""
    if io_class != NORMAL:
        yield On(host, (s.NoteIoClasses(disk.vm, disk.vm_dir, (disk.disk,), (io_class,)),))


def volatile(place: VmPlace) -> Part[str]:
    """Return the class of the volatile disks in a VM directory, by its system datastore."""
    datastore = yield AskOned("datastore", _system(place))
    return IO_CLASS.value(None, datastore)


def brought_up_to_date(place: VmPlace) -> Plan:
    """Note the present class of each disk of ours; without a valid one from oned, the old one stays."""
    try:
        vm = yield AskOned("vm", place.vm)
        found = yield from _classes(vm, _system(place))
    except (OnedUnavailable, BadAttribute) as e:
        yield warn(f"the I/O classes of the disks of VM {place.vm} stay as they were: {e.detail}")
        return
    if found:
        yield On(place.host, (s.NoteIoClasses(place.vm, place.path, tuple(found), tuple(found.values())),))


def _classes(vm: Vm, system: int) -> Part[dict[int, str]]:
    """Return the class of each disk of ours; oned is asked once for each image and datastore."""
    images: dict[int, Optional[Image]] = {-1: None}
    datastores: dict[int, Datastore] = {}
    found = {}
    for disk in vm.disks:
        if disk.driver != NAME or disk.is_directory:
            continue
        image, store = disk.image_id, system if disk.image_id == -1 else disk.store_id
        if image not in images:
            images[image] = yield AskOned("image", image)
        if store not in datastores:
            datastores[store] = yield AskOned("datastore", store)
        found[disk.id] = IO_CLASS.value(images[image], datastores[store])
    return found


def _system(place: VmPlace) -> int:
    return int(place.path.split("/")[-2])


# Encrypted disks: a raw image with a LUKS header; libvirt has its passphrase (LUKS_SECRET), QEMU decrypts.
#
# A disk's file holds ciphertext; QEMU reads plaintext. So a copy of files or RBD images stays secret, and a
# copy by a running QEMU (snapshot, save-as, backup) would be plaintext. An overlay has no LUKS header: QEMU,
# told to decrypt, would not open it, and it could not keep the guest's writes. Below QEMU, on RBD, a clone is
# as good as a copy.
#
# OpenNebula copies LUKS_SECRET of the image into the VM's DISK, which its user can write. Only where a disk
# is made of an image must it be a secret that libvirt could know; everywhere else any value means encrypted.


UNDER_OVERLAY = (
    "is encrypted (LUKS_SECRET) and cannot be laid under a qcow2 overlay, which QEMU would not open"
)


def secret(disk: Disk, image: Image | None = None) -> str:
    """Return the UUID of the disk's libvirt secret, '' for none; raise BadAttribute."""
    for holder, text in (
        (f"disk {disk.id}", disk.luks_secret),
        (f"image {image.id}" if image else "", image.luks_secret if image else ""),
    ):
        if text:
            LUKS_SECRET.parsed(text, holder)
    return disk.luks_secret or (image.luks_secret if image else "")


def check_clone(disk: Disk, image: Image, place: Place, formats: Container[str]) -> None:
    """Raise EncryptedDisk if a disk made of an encrypted image, in `place`, could not be opened.

    `formats` are those of the image's store: one that has qcow2 clones by an overlay.
    """
    if secret(disk, image) and place.backing != "none" and (place.is_local or "qcow2" in formats):
        raise EncryptedDisk(
            f"image {image.id} {UNDER_OVERLAY}: "
            "set SEMISHARED_LOCAL = copy, without SEMISHARED_PLACE = shared, or make the image persistent"
        )


def check_diff(disk: Disk, image: Image) -> None:
    """Raise EncryptedDisk if the image of a future diff is encrypted."""
    if secret(disk, image):
        raise EncryptedDisk(
            f"image {image.id} {UNDER_OVERLAY}: remove SEMISHARED_PLACE = local, it is then attached in place"
        )


def check_volatile(disk: Disk) -> None:
    """Raise EncryptedDisk for an empty disk with a secret: it has no LUKS header."""
    if secret(disk):
        raise EncryptedDisk(
            f"disk {disk.id} is volatile and has a LUKS_SECRET, but an empty disk is not encrypted"
        )


def check_running(vm: Vm, numbers: Iterable[int], what: str) -> None:
    """Raise EncryptedDisk if a running QEMU is to copy an encrypted disk: the copy would be plaintext."""
    for number in numbers:
        if vm.disk(number).luks_secret:
            raise EncryptedDisk(
                f"disk {number} of VM {vm.id} is encrypted (LUKS_SECRET), and a {what} while it "
                f"runs would be decrypted"
            )


def check_snapshot(vm: Vm, number: int, in_place: bool, is_running: bool) -> None:
    """Raise EncryptedDisk if a snapshot would be plaintext, or leave the guest with an overlay.

    A copy of a disk that is off does neither.
    """
    if is_running:
        check_running(vm, [number], "snapshot")
    if vm.disk(number).luks_secret and not in_place:
        raise EncryptedDisk(
            f"disk {number} of VM {vm.id} is encrypted (LUKS_SECRET): a snapshot would put a "
            f"qcow2 overlay over it, which QEMU "
            "would not open; only a persistent disk can have snapshots, while the VM is off"
        )
