# SPDX-License-Identifier: Apache-2.0
"""Marks of disks on the network (model/disk/marks.py): snapshots in their store, from which copies are made.

A snapshot shows the moment of its backup for as long as it lives. So the copy of such a disk is no job of the
guest's QEMU, and a backup that failed is made again from the snapshot before.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from typing import Callable, Collection, Iterator, Mapping, Sequence

from .. import store
from ..errors import SemisharedError
from ..model.disk.marks import Increment
from ..model.disk.network_disk import NetworkDisk
from ..model.disk.record import Record
from ..model.refs import ImageRef
from ..tools import copy_on_read, qemu_img
from . import records

GONE = "its snapshot of that increment is gone: it was restored, went back to a snapshot, or was made anew"


def _parts(record: Record) -> tuple[ImageRef, NetworkDisk]:
    """Return the image that a disk on the network is, and how QEMU opens it."""
    assert record.network
    return record.of_image._replace(source=record.network.name), record.network


def refused(record: Record) -> str:
    """Return why the disk cannot have a mark, '' if it can."""
    image, _ = _parts(record)
    return store.bridged(image.access).refuses_marks(image)


def is_there(vm: int, record: Record, mark: str) -> bool:
    """Tell whether the disk has a mark."""
    image, _ = _parts(record)
    return store.bridged(image.access).has_mark(image, vm, mark)


def drop(vm: int, record: Record, keep: Collection[str] = ()) -> None:
    """Remove all marks of a VM from one of its disks but some."""
    image, _ = _parts(record)
    store.bridged(image.access).drop_marks(image, vm, keep)


def drop_all(vm: int, vm_dir: str, disks: Collection[int], keep: Collection[str]) -> None:
    """Do so for `disks`, and for others of the VM if their stores answer.

    A snapshot of a disk that is not backed up any more takes room in its pool.
    """
    for record in records.records(vm_dir):
        if not record.network or record.readonly:
            continue
        try:
            drop(vm, record, keep)
        except SemisharedError:
            if record.disk in disks:
                raise


@contextmanager
def marking(vm: int, disks: Mapping[int, Record], mark: str) -> Iterator[Callable[[], None]]:
    """Yield what marks the disks; what can be done before their guest rests is done."""
    with ExitStack() as stack:
        made = []
        for record in disks.values():
            image, _ = _parts(record)
            made.append(stack.enter_context(store.bridged(image.access).marking(image, vm, mark)))

        def take() -> None:
            for one in made:
                one()

        yield take


def changed_bytes(vm: int, record: Record, since: str) -> int:
    """Return how many bytes a copy of what has changed until now takes at most."""
    image, _ = _parts(record)
    parts = store.bridged(image.access).changed(image, vm, since)
    return sum(length for _, length in copy_on_read.clusters(parts, sys.maxsize))


def copy(
    vm: int,
    disk: int,
    record: Record,
    increment: Increment,
    target: str,
    within: Sequence[str] = (),
    rate: int = 0,
) -> None:
    """Write to the new file `target` what a disk held when it was marked, or what had changed of it.

    `within`: words of programs that start the one that copies; `rate`: bytes per second, 0 for no limit.
    """
    image, network = _parts(record)
    at = store.bridged(image.access)
    node = at.marked(network, vm, increment.mark.name).node
    source = "json:" + json.dumps(node)
    if increment.number == 0:
        qemu_img.convert(source, "raw", target, "qcow2", direct=True, rate=rate, within=within)
        return
    qemu_img.create(target, "qcow2", qemu_img.virtual_size(source, "raw"))
    if increment.since and disk in increment.changed:
        parts = at.changed(image, vm, increment.since.name, increment.mark.name)
        copy_on_read.copy(node, target, parts, within, rate=rate)
    else:
        qemu_img.convert_whole(source, "raw", target, within, rate=rate)
