# SPDX-License-Identifier: Apache-2.0
"""`remote-first` disks of a VM stop reading from the store: overlays over bases of this host.

The lease comes first. Then a running guest goes over to copies of its layers that lie over the base
(guest/go_over.py); for a VM that is off, headers and records are changed. The next action on the VM's disks,
or its next start, ends what a kill left.

oned does not know of a detach and may start any action meanwhile. So the detach never ends an action that
works on the disks; it takes the turn, then asks oned, and an action that oned starts later ends the detach.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Iterator, Sequence

from ..base import cache, room
from ..device import memory
from ..errors import CannotDetach, ImageChanged, MemoryPromised
from ..guest import active_layer, domain, go_over, go_over_files, job_lock
from ..guest.active_layer import BASE, Switch
from ..model.base.steps import DetachedDisk, DetachedVm, DetachVm
from ..model.disk import names as disk_names
from ..model.disk.place import OVERLAY
from ..model.disk.record import Record
from ..model.steps import DiskRef
from ..model.store import dir_names
from ..stage.ensure import ensure
from ..tools import effects, extents, files, progress, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import Pace, standing_back
from . import epoch_check, guard, layering, records, recovery, remote_first, vm_dir
from .epochs import Planned

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

FICLONE = 0x40049409
"""ioctl_ficlone(2)."""


def detach(step: DetachVm, planned: Planned, ask: room.Ask | None) -> DetachedVm:
    """Detach disks of a VM.

    An error is not raised, but reported as a line in `error`, with its `id`.
    """
    with effects.told(vm=step.vm, disks=[]) as answer:
        if not job_lock.take_if_free(step.vm, step.vm_dir):
            raise CannotDetach(f"VM {step.vm} on {os.uname().nodename} is being acted upon")
        try:
            _check_wanted(step, ask)
            # A killed action may have left the guest frozen or suspended.
            recovery.recover(step.vm_dir, step.domain)
            _check_state(step)
            answer["disks"] = _detach(step, planned, ask)
        finally:
            job_lock.leave(step.vm, step.vm_dir)
    return DetachedVm(**answer)


def _check_wanted(step: DetachVm, ask: room.Ask | None) -> None:
    """Raise CannotDetach unless oned still has the VM as planned, and no other host has taken it over."""
    why = str(ask(question="vm", vm=step.vm).get("why", "")) if ask else ""
    if why:
        raise CannotDetach(f"VM {step.vm}: {why}")
    epoch_check.check(step.vm, step.vm_dir)
    for disk in step.disks:
        guard.check_below(step.vm_dir, step.vm, disk)


def _check_state(step: DetachVm) -> None:
    state, wanted = (domain.state(step.domain) if step.domain else "off"), "running" if step.domain else "off"
    if state != wanted:
        raise CannotDetach(f"domain {step.domain} of VM {step.vm} is {state} on {os.uname().nodename}")


def _detach(step: DetachVm, planned: Planned, ask: room.Ask | None) -> list[DetachedDisk]:
    found = {disk: records.record_of(DiskRef(step.vm, disk, step.vm_dir)) for disk in step.disks}
    wanted = [
        (found[disk], generation)
        for disk, generation in zip(step.disks, step.generations)
        if found[disk].place.is_remote
    ]
    with vm_dir.publishing(step.vm, step.vm_dir, planned):
        pass  # a step of an older plan is refused if the VM was deleted since
    if not wanted:
        return []
    with (
        _memory([before for before, _ in wanted] if step.domain else []),
        recovery.ended_on_failure(step.vm_dir, step.domain),
    ):
        # Before the first lease: with this note, recovery frees leases that no disk lies over.
        active_layer.note(step.vm_dir, [Switch(before, before, BASE) for before, _ in wanted])
        point("detach noted")
        switches = [
            Switch(before, _over_base(step, before, generation, ask), BASE) for before, generation in wanted
        ]
        if step.domain:
            _require_room(step.vm_dir, switches, ask)
            go_over_live(step.vm_dir, step.domain, switches, step.rate)
        else:
            active_layer.note(step.vm_dir, switches)
            point("switch noted")
            go_over.settle(step.vm_dir, "")
    return [
        DetachedDisk(switch.after.disk, switch.after.of_image.generation, files.allocated(switch.after.path))
        for switch in switches
    ]


@contextmanager
def _memory(before: Sequence[Record]) -> Iterator[None]:
    """Promise memory, within the block, to disks in memory of a running guest: a delta each, and copies."""
    with ExitStack() as promised:
        for record in before:
            folder = layering.folder_of(record)
            try:
                memory.more(folder, layers=1 + len(_to_copy(record)))
            except MemoryPromised as e:
                raise CannotDetach(
                    f"{e.detail}, while its guest lets go of the store: it does with less when the VM is off"
                ) from None
            promised.callback(memory.settle, folder)
        yield


def _require_room(vm_dir: str, switches: Sequence[Switch], ask: room.Ask | None) -> None:
    """Make room for the copies beside the layers, on each file system that has some."""
    needed: dict[int, tuple[str, int]] = {}
    for before, _, _ in switches:
        folder = layering.folder_of(before)
        system, size = os.stat(folder).st_dev, sum(map(files.allocated, _to_copy(before)))
        needed[system] = folder, needed.get(system, (folder, 0))[1] + size
    for folder, size in needed.values():
        room.require(vm_dir, size, ask, where=folder)


def _over_base(step: DetachVm, before: Record, generation: str, ask: room.Ask | None) -> Record:
    """Lease the image's base; return the disk's record over it. Raise if the content differs."""
    layering.folder_of(before)
    remote_first.check(before)
    remote_first.check_unchanged(before)
    _check_system_snapshots(step, before)
    image = before.of_image
    if image.generation and generation and image.generation != generation:
        raise ImageChanged(
            f"disk {before.disk} lies over generation {image.generation[:8]} of its image, and "
            f"{generation[:8]} is staged"
        )
    ref = image._replace(generation=image.generation or generation)
    base, _ = ensure(cache.root_of(step.vm_dir), ref, ask, (step.vm, before.disk))
    return before._replace(place=OVERLAY, image=image._replace(generation=base.generation), over=None)


def _check_system_snapshots(step: DetachVm, record: Record) -> None:
    """Raise CannotDetach if libvirt keeps snapshots of the VM: they name the disks' backing files."""
    if step.domain:
        count = len(domain.snapshots(step.domain))
    else:
        kept = qemu_img.info(record.path, record.format).get("snapshots")
        count = len(kept) if isinstance(kept, list) else 0
    if count:
        raise CannotDetach(
            f"disk {record.disk}: the VM has {count} system snapshots, which count on what it "
            f"lies over: delete them first"
        )


# -- under a running guest ----------------------------------------------------------------------------


def go_over_live(vm_dir: str, name: str, switches: Sequence[Switch], rate: int) -> None:
    """Move the guest's disks onto their leased bases; copy at `rate` bytes per second, 0 for no limit.

    QEMU mirrors only what is in the deltas, into files with all the rest: the faster the layers are copied,
    the less that is. Raise CannotDetach if libvirt has a disk open in another way than its record says. An
    error leaves a note, by which disk/recovery.py ends the detach.
    """
    _check_chains(name, [switch.before for switch in switches])
    go_over.begin(vm_dir, name, [switch.before for switch in switches], BASE)
    go_over_files.offer_base(vm_dir, switches, _copied(vm_dir, switches, Pace(rate)))
    go_over.finish(vm_dir, name)


def _to_copy(record: Record) -> list[str]:
    """Return the layers of a disk to copy: those directly over the image, and the active one."""
    found = [path for path, _ in go_over_files.outermost(record)]
    return found if any(os.path.samefile(path, record.path) for path in found) else [*found, record.path]


def _check_chains(name: str, records: Sequence[Record]) -> None:
    """Raise CannotDetach unless the guest has each disk open from the recorded layer down to the image."""
    found = _chains(name)
    here = os.uname().nodename
    for record in records:
        chain = next((chain for chain in found if chain and _is_same(chain[0], record.path)), None)
        if chain is None:
            raise CannotDetach(f"disk {record.disk}: domain {name} on {here} does not write to {record.path}")
        wanted = (
            f"{record.over.name}@{record.over.snapshot}"
            if record.over
            else dir_names.link_of(record.of_image.source)
        )
        if len(chain) < 2 or not _is_same(chain[-1], wanted):
            shown = " over ".join(chain)
            raise CannotDetach(
                f"disk {record.disk}: domain {name} on {here} has {shown} open, which does not "
                f"end at {wanted}"
            )


def _is_same(path: str, wanted: str) -> bool:
    if path == wanted:
        return True
    return (
        path.startswith("/") and wanted.startswith("/") and os.path.realpath(path) == os.path.realpath(wanted)
    )


def _chains(name: str) -> list[list[str]]:
    """Return libvirt's backing chain of each disk of a guest: paths, and POOL/IMAGE@SNAPSHOT."""
    found = []
    for _, disk in domain.elements(name):
        sources = (disk.find("source"), *(below.find("source") for below in disk.iter("backingStore")))
        found.append([_named(source) for source in sources if source is not None])
    return found


def _named(source: Element) -> str:
    path = source.get("file", "")
    if path:
        return "/" + os.path.normpath(path).lstrip("/")
    snapshot = source.find("snapshot")
    return f"{source.get('name', '')}@{'' if snapshot is None else snapshot.get('name', '')}"


def _copied(vm_dir: str, switches: Sequence[Switch], pace: Pace) -> dict[str, str]:
    """Stage a copy of each layer to replace, over the lease instead of the image; return copies by layer."""
    copies: dict[str, str] = {}
    layers = [path for before, _, _ in switches for path in _to_copy(before)]
    progress.expect(sum(map(files.allocated, layers)))
    for before, after, _ in switches:
        outermost = dict(go_over_files.outermost(before))
        files.remove_staged(disk_names.layers(disk_names.plain(before.path)))
        for path in _to_copy(before):
            copies[path] = files.staged_name(path)
            with files.enough_space(os.path.dirname(path)), standing_back():
                copy(path, copies[path], pace)
                if path in outermost:
                    lease = go_over_files.lease_of(vm_dir, after)
                    qemu_img.lay_over(copies[path], lease, after.of_image.format)
                os.chmod(copies[path], 0o660)
                files.fsync(copies[path])
            point("layer copied")
    return copies


def copy(source: str, target: str, pace: Pace) -> None:
    """Copy a file without writers, with its holes: by reflink if possible, else at a limited rate."""
    with open(source, "rb", buffering=0) as old, open(target, "xb", buffering=0) as new:
        try:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            return
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS):
                raise
        size = os.fstat(old.fileno()).st_size
        os.ftruncate(new.fileno(), size)
        for index, content in extents.data(old.fileno(), size):
            pace.wait(len(content))
            progress.count("layers_copied", len(content))
            for at, data in extents.blocks(content):
                extents.pwrite(new.fileno(), data, index * extents.EXTENT + at)
