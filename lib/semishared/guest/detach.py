# SPDX-License-Identifier: Apache-2.0
"""A running guest is detached from its image on the store, and goes on over bases of its host.

    store <- K  <- guest
    store <- K  <- delta <- guest              below the delta the guest only reads (deltas.py)
    store <- K. <- delta <- guest              K is now a copy, over the base (base_switch.py)
    base  <- K   = mirror of the delta
    base  <- K  <- guest                       all disks in one moment of rest; delta and K. go

QEMU mirrors only what is in the deltas, into files with all the rest: the faster the layers are copied, the
less that is. Only a mirror can do it: libvirt cannot exchange a backing file below a node in use, and does
not notice what QEMU is told by the monitor.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Dict, List, Sequence
from xml.etree import ElementTree

from ..errors import CannotDetach
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.store import dir_names
from ..named import NamedTuple
from ..tools import extents, files, progress, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import Pace, standing_back
from . import active_layer, base_switch, deltas, domain, job_events, mirror

FICLONE = 0x40049409
"""ioctl_ficlone(2)."""


class Detached(NamedTuple):
    """A disk's record before and after the disk lies over a base."""

    before: Record
    after: Record


def copied_bytes(disks: Sequence[Detached]) -> int:
    """Return an upper limit for the bytes that copies of layers take during a detach."""
    return sum(files.allocated(path) for disk in disks for path in to_copy(disk.before))


def to_copy(record: Record) -> List[str]:
    """Return the layers of a disk to copy: those directly over the image, and the active one."""
    found = [path for path, _ in base_switch.outermost(record)]
    return found if any(os.path.samefile(path, record.path) for path in found) else [*found, record.path]


def detach(vm_dir: str, name: str, disks: Sequence[Detached], rate: int) -> None:
    """Move the guest's disks onto their leased bases; copy at `rate` bytes per second, 0 for no limit.

    Raise CannotDetach if libvirt has a disk open in another way than its record says. An error leaves a note,
    by which disk/recovery.py ends the detach.
    """
    check(name, [disk.before for disk in disks])
    deltas.add(vm_dir, name, [disk.before for disk in disks])
    copies = _copied(vm_dir, disks, Pace(rate))
    base_switch.begin(vm_dir, [disk.before for disk in disks], [disk.after for disk in disks], copies)
    _go_over(vm_dir, name, [disk.after for disk in disks])
    deltas.merge(vm_dir, name)


def detach_off(vm_dir: str, disks: Sequence[Detached]) -> None:
    """Rebase the disks of a VM that is off onto bases, on which they have leases."""
    active_layer.note(vm_dir, [disk.after for disk in disks], remote=[disk.before for disk in disks])
    point("switch noted")
    deltas.merge(vm_dir, "")


def check(name: str, records: Sequence[Record]) -> None:
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


def _chains(name: str) -> List[List[str]]:
    """Return libvirt's backing chain of each disk of a guest: paths, and POOL/IMAGE@SNAPSHOT."""
    found = []
    for disk in ElementTree.fromstring(domain.dumpxml(name)).iterfind("devices/disk"):
        sources = (disk.find("source"), *(below.find("source") for below in disk.iter("backingStore")))
        found.append([_named(source) for source in sources if source is not None])
    return found


def _named(source: ElementTree.Element) -> str:
    path = source.get("file", "")
    if path:
        return "/" + os.path.normpath(path).lstrip("/")
    snapshot = source.find("snapshot")
    return f"{source.get('name', '')}@{'' if snapshot is None else snapshot.get('name', '')}"


def _copied(vm_dir: str, disks: Sequence[Detached], pace: Pace) -> Dict[str, str]:
    """Stage a copy of each layer to replace, over the lease instead of the image; return copies by layer."""
    copies: Dict[str, str] = {}
    for disk in disks:
        outermost = dict(base_switch.outermost(disk.before))
        files.remove_staged(disk_names.layers(disk_names.plain(disk.before.path)))
        for path in to_copy(disk.before):
            copies[path] = files.staged_name(path)
            with files.enough_space(os.path.dirname(path)), standing_back():
                copy(path, copies[path], pace)
                if path in outermost:
                    lease = base_switch.lease_of(vm_dir, disk.after)
                    qemu_img.lay_over(copies[path], lease, disk.after.of_image.format)
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


def _go_over(vm_dir: str, name: str, after: Sequence[Record]) -> None:
    """Have QEMU mirror the deltas into the layers now below them, and pivot to those."""
    opened = active_layer.opened(vm_dir, name)
    targets = {opened[os.path.realpath(active_layer.delta_of(record))]: record for record in after}
    for target, record in targets.items():
        with job_events.listening(name, target) as job:
            mirror.begin(name, target, record.path)
            point("delta is being copied")
            job.wait_until_ready()
    point("layers ready")
    mirror.go_over(vm_dir, name, targets, "it stays as it is until it runs")
