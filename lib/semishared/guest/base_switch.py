# SPDX-License-Identifier: Apache-2.0
"""Disks over an image on its store come to lie over a base of their host, under deltas (detach.py).

    disk.N.snap/K         the copy of a layer; its backing chain ends at the disk's lease on the base
    disk.N.snap/K.kept    the layer itself, which QEMU has open until the guest goes over

A layer and its copy have the same content. The copy of the active layer also has what QEMU has mirrored into
it, which the delta has, too. So while a disk's record names its delta, the delta may lie over either. An
action that finds the former records noted (active_layer.py: "remote") ends the switch by what the guest does:

    the guest writes to its delta    the layers get their names back; QEMU opens one when the delta is merged
    the guest writes to a layer      it has gone over
    no guest runs                    its disks go over: no process has them open
"""

from __future__ import annotations

import os
from typing import Dict, Iterator, Mapping, Sequence, Tuple

from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import active_layer, block_jobs
from .active_layer import delta_of, with_delta


def lease_of(vm_dir: str, record: Record) -> str:
    """Return the path of a disk's lease on the base of its record; it need not exist."""
    base = base_names.base(disk_names.base_store_of(vm_dir), record.of_image.base_name)
    return base_names.lease(base, int(os.path.basename(vm_dir)), record.disk)


def outermost(record: Record) -> Iterator[Tuple[str, str]]:
    """Yield path and backing name of each layer of a disk that lies over no other layer."""
    folder = disk_names.layers(disk_names.plain(record.path))
    for number in layers.numbered(folder):
        name, _ = layers.backing_of(f"{folder}/{number}")
        if not disk_names.is_number(name):
            yield f"{folder}/{number}", name


def begin(vm_dir: str, before: Sequence[Record], after: Sequence[Record], copies: Mapping[str, str]) -> None:
    """Give the staged `copies` the names of their layers; the records become those `after`, with deltas."""
    active_layer.note(vm_dir, list(after), remote=before)
    point("switch noted")
    for path, staged in copies.items():
        _replace(path, staged)
    for record in after:
        active_layer.write(vm_dir, with_delta(record))
    point("layers lie over bases")


def _replace(path: str, staged: str) -> None:
    """Give a staged file all names of a layer; the layer keeps a second name for each."""
    folder = os.path.dirname(path)
    numbers = [name for name in sorted(os.listdir(folder)) if disk_names.is_number(name)]
    names = [name for name in numbers if os.path.samefile(f"{folder}/{name}", path)]
    for name in names:
        files.unlink(disk_names.with_second_name(f"{folder}/{name}"))
        os.link(f"{folder}/{name}", disk_names.with_second_name(f"{folder}/{name}"))
        point("layer kept")
    for name in names[1:]:
        again = files.staged_name(f"{folder}/{name}")
        os.link(staged, again)
        os.rename(again, f"{folder}/{name}")
    os.rename(staged, f"{folder}/{names[0]}")
    files.fsync(folder)
    point("layer replaced")


def end(vm_dir: str, name: str) -> None:
    """Complete or roll back a switch, by what the guest writes to; `name` is '' when no guest runs."""
    before, opened = active_layer.leaving(vm_dir), _at_rest(vm_dir, name)
    settled = {record.disk: record for record in active_layer.noted(vm_dir)}
    for record in before:
        if os.path.realpath(delta_of(record)) in opened:
            _take_back(vm_dir, record)
            settled[record.disk] = record
        else:
            _go_over(vm_dir, settled[record.disk])
    active_layer.note(vm_dir, list(settled.values()))
    point("switch ended")


def _at_rest(vm_dir: str, name: str) -> Dict[str, str]:
    """Return the target of each open file, after all jobs have ended: a pivot may be under way."""
    if not name:
        return {}
    for target in active_layer.opened(vm_dir, name).values():
        block_jobs.end_job(name, target)
    return active_layer.opened(vm_dir, name)


def _take_back(vm_dir: str, before: Record) -> None:
    for path, layer in _kept(before):
        os.rename(path, layer)
        # rename() does nothing if both names are of one file.
        files.unlink(path)
        files.fsync(os.path.dirname(path))
        point("layer taken back")
    active_layer.write(vm_dir, with_delta(before))


def _go_over(vm_dir: str, after: Record) -> None:
    lease = lease_of(vm_dir, after)
    for path, name in outermost(after):
        if name != lease:
            qemu_img.lay_over(path, lease, after.of_image.format)
            files.fsync(path)
            point("layer laid over its base")
    has_delta = (files.read_json(disk_names.record(vm_dir, after.disk)) or {}).get("path") == delta_of(after)
    active_layer.write(vm_dir, with_delta(after) if has_delta else after)
    for path, _ in _kept(after):
        files.unlink(path)
        point("layer let go")


def _kept(record: Record) -> Sequence[Tuple[str, str]]:
    """Return the second names of a disk's layers, each with the first one."""
    folder = disk_names.layers(disk_names.plain(record.path))
    paths = [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    return [(path, disk_names.of_second_name(path)) for path in paths if disk_names.of_second_name(path)]
