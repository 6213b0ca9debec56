# SPDX-License-Identifier: Apache-2.0
"""Marks of raw disks (model/disk/marks.py): the sums of all their blocks at the moment of a backup.

They say what changed whatever changed it, also while no QEMU was there to note it. The price is that all of
the disk is read; and of a running guest's, whose blocks change while they are read, the backup job copies all
before what has not changed is left out.
"""

from __future__ import annotations

import os
from typing import Collection, Iterable, Sequence

from ..model.disk import names as disk_names
from ..model.disk.marks import Increment
from ..tools import block_sums, copy_on_read, files, qemu_img
from ..tools.effects import point

GONE = "the sums of its blocks at that increment are gone"


def is_there(vm_dir: str, disk: int, mark: str) -> bool:
    """Tell whether the disk has a mark."""
    return block_sums.is_whole(disk_names.sums(vm_dir, mark, disk))


def drop(vm_dir: str, keep: Collection[str] = ()) -> None:
    """Remove all marks of a VM's disks but some, and those that were not written to their end."""
    directory = disk_names.records(vm_dir)
    for entry in os.listdir(directory):
        mark = disk_names.summed(entry)
        is_cut_off = disk_names.is_staged(entry) and f"{disk_names.SUMS}." in entry
        if is_cut_off or (mark and mark not in keep):
            files.unlink(f"{directory}/{entry}")
            point("mark dropped")


def mark(
    vm_dir: str, disk: int, image: str, format: str, increment: Increment, rate: int = 0
) -> list[block_sums.Part]:
    """Mark a disk as `image` has it, read at `rate`; return what has changed, all if that is not known."""
    since = increment.since if disk in increment.changed else None
    before = disk_names.sums(vm_dir, since.name, disk) if since else ""
    return block_sums.take(image, format, disk_names.sums(vm_dir, increment.mark.name, disk), before, rate)


def copy_changed(
    source: str,
    format: str,
    target: str,
    parts: Iterable[block_sums.Part],
    within: Sequence[str] = (),
    rate: int = 0,
) -> None:
    """Write to the empty qcow2 file `target` what has changed; `within`, `rate` as of copy_on_read."""
    node = {"driver": format, "file": {"driver": "file", "filename": source}}
    copy_on_read.copy(node, target, parts, within, rate=rate)


def thin(vm_dir: str, disk: int, copied: str, increment: Increment, within: Sequence[str]) -> None:
    """Mark a disk of which a backup job has left all in `copied`, and leave there what has changed alone.

    A copy of which little could be left out, or for which there is no room beside it, stays as it is.
    """
    parts = mark(vm_dir, disk, copied, "qcow2", increment)
    changed = sum(length for _, length in parts)
    _, free = files.space(copied)
    if disk not in increment.changed or changed > min(files.allocated(copied), free) // 2:
        return
    whole = f"{copied}.whole"
    os.rename(copied, whole)
    qemu_img.create(copied, "qcow2", qemu_img.virtual_size(whole, "qcow2"))
    copy_changed(whole, "qcow2", copied, parts, within)
    files.unlink(whole)
    point("copy thinned")
