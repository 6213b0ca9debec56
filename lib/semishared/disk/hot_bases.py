# SPDX-License-Identifier: Apache-2.0
"""Bases that a guest needs to boot: copies in memory (SEMISHARED_BASES = ram), lost ones made again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable

from ..base import cache
from ..device import hot
from ..errors import BadRecord, SemisharedError
from ..model.base.steps import HotBase
from ..model.disk.record import Record
from . import records

if TYPE_CHECKING:
    from ..base import room


def before_boot(vm: int, vm_dir: str, ask: room.Ask | None, warn: Callable[[str], None]) -> None:
    """Fetch lost bases of a VM's disks again, and copy into memory those that its guest reads there."""
    from . import create

    create.replace_lost_bases(vm, vm_dir, ask, warn)
    provide(vm, vm_dir, warn)


def provide(vm: int, vm_dir: str, warn: Callable[[str], None]) -> None:
    """Copy the bases that the VM's disks want into memory; call `warn` with why one is read from disk."""
    try:
        found = [record for record in records.records(vm_dir) if record.reads_hot]
    except BadRecord:
        return  # deploy reports it
    for record in found:
        base = _base(vm_dir, record)
        lease = base.lease(vm, record.disk)
        if os.path.exists(lease):
            try:
                why = hot.provide(
                    cache.root_of(vm_dir), os.path.basename(base.directory), lease, record.of_image.format
                )
            except (SemisharedError, OSError) as e:
                # The base on disk is good: the VM boots in any case.
                why = e.detail if isinstance(e, SemisharedError) else str(e)
            if why:
                warn(f"the base of disk {record.disk} is read from disk, not from memory: {why}")


def _base(vm_dir: str, record: Record) -> cache.Base:
    return cache.named(cache.root_of(vm_dir), record.of_image, record.of_image.generation)


def see(vm_dir: str, record: Record, lease: str) -> str:
    """Return the copy in memory of the base with the lease `lease`; '' if there is none."""
    return _copy(vm_dir, record, lease, hot.found)


def hold(vm_dir: str, record: Record, lease: str) -> str:
    """Return the same copy, which is kept until this process ends."""
    return _copy(vm_dir, record, lease, hot.hold)


def _copy(vm_dir: str, record: Record, lease: str, find: Callable[[str, str], str]) -> str:
    base, vm = _base(vm_dir, record), os.path.basename(vm_dir)
    # oned writes paths with a double slash.
    if not vm.isdigit() or os.path.normpath(lease) != os.path.normpath(base.lease(int(vm), record.disk)):
        return ""
    return find(cache.root_of(vm_dir), os.path.basename(base.directory))


def said(vm_dir: str, record: Record) -> HotBase | None:
    """Return where the copy is, or why there is none; None for a disk that wants no copy."""
    if not record.reads_hot:
        return None
    root, base = cache.root_of(vm_dir), _base(vm_dir, record)
    path = hot.found(root, os.path.basename(base.directory))
    try:
        size = os.stat(base.lease(int(os.path.basename(vm_dir)), record.disk)).st_size
    except OSError:
        return HotBase(path, "" if path else "the base is not here")
    return HotBase(path, "" if path else hot.why_not(root, size) or "from the next boot on")
