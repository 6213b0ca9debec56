# SPDX-License-Identifier: Apache-2.0
"""Create the disks of a VM: stage, record, rename under the VM's lock. Each step may run twice.

And find the diff of a lost host, when oned recreates its VM (`onevm recover --recreate`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable, ContextManager

from .. import store
from ..base import cache, room
from ..device import folders
from ..errors import BadRecord, ImageChanged, NotSupported, SemisharedError, ToolFailed, UnknownClaim
from ..model.disk import names as disk_names
from ..model.disk.place import COPY, IN_PLACE, OVERLAY, PLACES, REMOTE_FIRST, STORE_CLONE, VOLATILE
from ..model.disk.record import Record
from ..model.steps import (
    AdoptClone,
    CloneOnStore,
    CopyFile,
    CopyImage,
    CreateOverlay,
    CreateRemote,
    CreateVolatile,
    DiskRef,
    ImageRef,
    LinkInPlace,
)
from ..stage.ensure import ensure
from ..store.dir import clones
from ..store.dir import image as dir_image
from ..tools import beneath, extents, files, inspection, layers, qemu_img
from ..tools.effects import Undo, point
from ..tools.rate_limit import standing_back
from . import epochs, on_devices, records, vm_dir
from .epochs import Planned

# A diff whose VM oned recreates elsewhere (`onevm recover --recreate`) may still lie on the lost host.
#
# The image is reserved for that very disk, at an earlier SEQ. If the host comes back, its directory looks
# like a leftover of a move, which may be removed; the uncommitted data would be lost. The epoch prevents
# that: it is noted before the image is reserved for another disk, or for none.


if TYPE_CHECKING:
    from ..model.device.steps import AllocateDisk
    from ..model.disk.commit_steps import FoundDiff
    from ..model.refs import Owner


def look(disk: DiskRef, image: ImageRef, seq: int) -> FoundDiff | None:
    """Return such a disk, and the epoch to note; None if the image is reserved for none."""
    before = owner(disk, image, seq)
    if before is None:
        return None
    from ..model.disk.commit_steps import FoundDiff

    return FoundDiff(before, seq)


def owner(disk: DiskRef, image: ImageRef, seq: int) -> Owner | None:
    """Return the older diff of the same disk that the image is reserved for; `seq`: the VM's SEQ now."""
    try:
        before = store.of(image.access).owner(image)
    except UnknownClaim:
        return None  # the claim itself is refused later, with the reason
    if before is None or before.epoch >= seq:
        return None
    return (
        before if (before.vm, before.disk, before.cloud) == (disk.vm, disk.disk, image.access.cloud) else None
    )


if TYPE_CHECKING:
    from ..model.store.image_steps import RecordNetwork


def publishing(
    disk: DiskRef,
    planned: Planned,
    record: Record,
    expected: int = 0,
    near: str = "",
    first: Callable[[], None] | None = None,
) -> ContextManager[str]:
    """Return a context that yields a staged name for the disk; at its end the disk is recorded and published.

    `expected`: about how many bytes the disk will take; `near`: its base; `first` runs before,
    under the VM's lock.
    """

    def write() -> None:
        if first:
            first()
        path = disk_names.record(disk.vm_dir, disk.disk)
        if not files.is_absent(path) and files.hint(path) != record.to_data():
            # Another generation lay here: no record may ever describe another disk than the one beside it.
            files.unlink(disk.path)
        records.write_record(disk.vm_dir, record)

    layered = vm_dir.Layered(expected, near) if record.is_local and record.layer else None
    return vm_dir.published(disk.vm, disk.vm_dir, disk_names.disk_name(disk.disk), planned, write, layered)


def first_layer(disk: DiskRef) -> str:
    """Return the path of a new disk's only layer."""
    return disk_names.layer(disk.path, 0)


def create_overlay(step: CreateOverlay, planned: Planned, ask: room.Ask | None) -> None:
    """Publish an overlay over a leased base.

    disk.N -> disk.N.snap/0, over the lease leases/VM-N, a hard link to bases/.../image.
    """
    disk, image = step.disk, step.image
    root = cache.root_of(disk.vm_dir)
    base, lease = ensure(root, image, ask, (disk.vm, disk.disk))
    is_first = files.is_absent(disk.path)
    record = Record(
        disk.disk, OVERLAY, "qcow2", first_layer(disk), image=image._replace(generation=base.generation)
    )
    with Undo() as undo:
        if is_first:
            undo.add(lambda: vm_dir.release(disk, planned))
        with publishing(
            disk,
            planned,
            record,
            growth(lease, step.min_size),
            base.directory,
            lambda: have_lease(base, disk),
        ) as staged:
            size = grown(lease, image, step.min_size)
            qemu_img.create_overlay(staged, lease, image.format, size, step.options)
        undo.keep()
    # The lease of an older overlay over another generation is not needed any more.
    vm_dir.release(disk, planned, but=base.directory)


def have_lease(base: cache.Base, disk: DiskRef) -> None:
    """Lease the base again, under the VM's lock; raise ToolFailed if the base was evicted.

    A late action on an older disk of this number may have freed the lease.
    """
    if not cache.lease(base, disk.vm, disk.disk):
        raise ToolFailed(
            f"the base of disk {disk.disk} of VM {disk.vm} went on {os.uname().nodename} while "
            f"the disk was being made"
        )


def create_remote(step: CreateRemote, planned: Planned) -> None:
    """Publish an overlay over the image on the store (disk.N -> disk.N.snap/0); copy nothing."""
    from ..model.disk.network_disk import NetworkDisk
    from . import remote_first

    disk, image, at = step.disk, step.image, store.of(step.image.access)
    over = None
    if step.snapshot:
        over = NetworkDisk.below(image.source, step.snapshot, image.access)
    else:
        at.check(image)
        at.attach(image)
        content = at.content(image)
        image = image._replace(generation=content.generation(content.see()))
    record = Record(disk.disk, REMOTE_FIRST, "qcow2", first_layer(disk), image=image, over=over)
    remote_first.check(record)
    size = max(remote_first.size(record), step.min_size)
    with publishing(disk, planned, record, size // GROWTH) as staged:
        qemu_img.create_overlay(
            staged, remote_first.backing_name(record), image.format, size, step.options, look=False
        )
    # The disk may have lain elsewhere before, over a base.
    vm_dir.release(disk, planned)


GROWTH = 10
"""The expected growth of an overlay is its size divided by this."""


def growth(path: str, min_size: int) -> int:
    """Estimate the bytes that an overlay over the file `path` will take."""
    return max(os.stat(path).st_size, min_size) // GROWTH


def grown(path: str, image: ImageRef, min_size: int) -> int:
    """Return the size of a new overlay: 0 (its backing file's) unless the image is below `min_size`."""
    return min_size if min_size and qemu_img.virtual_size(path, image.format) < min_size else 0


def copy_image(step: CopyImage, planned: Planned, ask: room.Ask | None) -> None:
    """Publish a full copy, from the base if it is here; verify it if the image's generation is known."""
    from ..stage.manifests import check_unchanged

    disk, image = step.disk, step.image
    content = store.content(image)
    seen = content.see()
    current = content.generation(seen)
    record = Record(
        disk.disk, COPY, image.format, first_layer(disk), image=image._replace(generation=current)
    )
    base = cache.named(cache.root_of(disk.vm_dir), image, current)
    needed = content.allocated(seen)
    with publishing(disk, planned, record, needed) as staged:
        room.for_disk(disk.vm_dir, needed, ask, (os.path.basename(base.directory),), os.path.dirname(staged))
        with standing_back():
            if current and not files.is_absent(base.image, follow=True):
                found = extents.copy(base.image, staged, image.format, "base_read")
            else:
                found = content.copy(seen, staged, image.format)
        check_unchanged(image, content, seen)
        if current and found.generation != current:
            raise ImageChanged(f"{image.source} was written to while it was copied")
        inspection.check(staged, image.format, image.source)
        if step.min_size and qemu_img.virtual_size(staged, image.format) < step.min_size:
            qemu_img.resize(staged, image.format, step.min_size)
        os.chmod(staged, 0o660)


def copy_file(step: CopyFile, planned: Planned) -> None:
    """Publish a plain copy of a kernel or initrd."""
    directory, name = os.path.split(step.path)
    with (
        dir_image.opened(step.source) as source,
        vm_dir.published(step.vm, directory, name, planned) as staged,
    ):
        extents.copy(source, staged, "raw", "store_read")
        os.chmod(staged, 0o644)


def clone_on_store(step: CloneOnStore, planned: Planned) -> None:
    """Publish a clone on the store: disk.N -> clones/VM-N -> VM-N.snap/0, an overlay over the image."""
    disk, image, at = step.disk, step.image, store.of(step.image.access)
    # First: nothing may be written below an unmounted mount point.
    at.check(image)
    clone = at.clone_of(image, disk.vm, disk.disk)
    record = Record(
        disk.disk, STORE_CLONE, "qcow2", disk_names.layer(clone, 0), image=image._replace(generation="")
    )
    with clones.made(
        dir_image.Stored(image.source), image.format, clone, step.min_size, planned.seq
    ) as publish:

        def publish_first() -> None:
            # If a kill leaves no record, the removal of the disk finds the clone by this note.
            files.remove_staged(*os.path.split(vm_dir.intended(disk)))
            files.write_json(vm_dir.intended(disk), {"clone": clone})
            publish()

        # A recreated VM's clone has the same name. So the clone gets it under the VM's lock, and a failure
        # does not take it back.
        with publishing(disk, planned, record, first=publish_first) as staged:
            os.symlink(clone, staged)


def adopt_clone(step: AdoptClone, planned: Planned) -> None:
    """Publish the link to a clone of a lost host, and its record; the clone is on the store already."""
    disk, image = step.disk, step.image
    store.of(image.access).check(image)
    clone = disk_names.plain(step.layer)
    clones.take_over(dir_image.Stored(image.source), clone, planned.seq)
    clones.put_back(dir_image.Stored(image.source), clone)
    record = Record(disk.disk, STORE_CLONE, "qcow2", step.layer, image=image._replace(generation=""))
    with publishing(disk, planned, record) as staged:
        os.symlink(clone, staged)
    active = disk_names.layer(os.path.basename(clone), disk_names.layer_of(step.layer))
    if os.readlink(clone) != active:
        # The lost host recorded a snapshot, and died before it switched the link.
        files.symlink(active, clone)
    point("clone adopted")


def link_in_place(step: LinkInPlace, planned: Planned) -> None:
    """Link the disk to the image (disk.N -> .semishared/NAME/image -> ../../NAME).

    A session ends the image's generation first.
    """
    disk, image, at = step.disk, step.image, store.of(step.image.access)
    at.check(image)
    vm_dir.check_wanted(disk, planned)
    if step.session and not step.shareable:
        # Refuse while another VM writes to the image, before this VM's session is noted.
        at.writers(image)
    path, network = at.attach(image)
    if step.session:
        if owner(disk, image, planned.seq):
            at.note_epoch(image, disk.vm, planned.seq)
        at.begin_session(image)
    record = Record(
        disk.disk, IN_PLACE, image.format, path, step.readonly, image._replace(generation=""), network
    )
    with publishing(disk, planned, record) as staged:
        os.symlink(path, staged)


def create_volatile(step: CreateVolatile, planned: Planned, ask: room.Ask | None) -> None:
    """Publish an empty disk; one with a file system, or swap, is made raw first, then converted."""
    disk = step.disk
    if step.fs and step.fs not in qemu_img.MKFS:
        raise NotSupported(
            f"file system {step.fs!r} of disk {disk.disk} is none of {', '.join(sorted(qemu_img.MKFS))}"
        )
    record, written = Record(disk.disk, VOLATILE, step.format, disk.path), _written_empty(step)
    if folders.takes_layers(disk.vm_dir):
        # Only layers lie on devices. Without a pool the disk is a plain file until its VM migrates live
        # (guest/go_over.py).
        record = record._replace(path=first_layer(disk))
    with publishing(disk, planned, record, max(step.size // GROWTH, written)) as staged:
        room.for_disk(disk.vm_dir, written, ask, where=os.path.dirname(staged))
        qemu_img.make_empty(staged, step.format, step.size, step.fs, options=step.fs_options)
        os.chmod(staged, 0o660)


def allocate(step: AllocateDisk, planned: Planned) -> None:
    """Allocate the blocks of a disk's file up to its size, by SPARSE = no of its DISK or image.

    Raise NoSpace. What a move brings elsewhere is its data alone.
    """
    disk = step.disk
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        record = records.record_of(disk)
        if record.network or (record.place.is_image and record.place is not STORE_CLONE):
            return
        if record.is_local:
            fd = os.open(record.path, os.O_RDWR | os.O_CLOEXEC)
        else:
            root = record.of_image.root
            store.of(record.of_image.access).check(record.of_image)
            fd = beneath.open_file(root, record.path[len(root) + 1 :], os.O_RDWR)
    try:
        size = qemu_img.virtual_size(beneath.path_of(fd), record.format)
        with files.enough_space(os.path.dirname(record.path)):
            os.posix_fallocate(fd, 0, qemu_img.file_length(size) if record.format == "qcow2" else size)
    finally:
        os.close(fd)
    point("disk allocated")


def _written_empty(step: CreateVolatile) -> int:
    """Estimate the bytes of an empty disk: a journal of at most 1 GiB, and few tables at first."""
    return (
        min(step.size >> 4, 1 << 30) + (step.size >> 12) + room.LITTLE
        if step.fs not in ("", "swap")
        else room.LITTLE
    )


def record_network(step: RecordNetwork, planned: Planned) -> None:
    """Record a disk that libvirt opens over the network; it has no file here."""
    disk = step.disk
    record = Record(
        disk.disk, PLACES[step.how], step.image.format, "", step.readonly, step.image, step.network
    )
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk) as file:
        epochs.note_made(file, str(disk.disk))
        # Another disk lay here: no record may ever describe another disk than the one beside it.
        folders.at(disk_names.layers(disk.path)).take_off()
        layers.remove(disk.path)
        records.write_record(disk.vm_dir, record)
    vm_dir.release(disk, planned)
    point("disk recorded")


# Before a VM boots: bases of its disks whose device is missing are fetched again, onto another device.
#
# The generation of such a base is the hash of its content. So the store, or any host, can deliver it, and
# each extent is verified. The new lease has the old name, so no header changes.
#
# An error is only a warning here: the VM may be running, and oned only renew its CONTEXT. The deploy action
# refuses to boot without the base (vmm/records.py).


def replace_lost_bases(vm: int, vm_dir: str, ask: room.Ask | None, warn: Callable[[str], None]) -> None:
    """Fetch the lost bases below a VM's disks again; call `warn` with the reason for each that fails."""
    root = cache.root_of(vm_dir)
    try:
        found = records.records(vm_dir)
    except BadRecord:
        return  # deploy reports it
    if any(on_devices.is_away(disk_names.disk(vm_dir, record.disk)) for record in found):
        return  # the VM cannot boot without those layers
    for record in found:
        if _is_lost(root, vm, record):
            try:
                ensure(root, record.of_image, ask, (vm, record.disk), want=room.FOR_THIS)
            except SemisharedError as e:
                warn(
                    f"the base of disk {record.disk} lay on a device that is not there, and "
                    f"cannot be had again: {e.line()}"
                )
            if files.is_absent(vm_dir):
                # The VM was deleted meanwhile.
                cache.release(root, vm, record.disk)


def _is_lost(root: str, vm: int, record: Record) -> bool:
    """Return True if a disk has no lease on its base, and that base is, or was, on a missing device."""
    if not record.place.leases or record.image is None:
        return False
    base = cache.named(root, record.image, record.image.generation)
    return bool(folders.at(base.directory).uuid) and files.is_absent(base.lease(vm, record.disk))
