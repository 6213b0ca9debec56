# SPDX-License-Identifier: Apache-2.0
"""What killed actions have left begun in a guest, or in the disks of one that died with them: told by their notes, and ended.

Whoever is to act on the disks has the turn (guest/job_lock.py) and begins with `recover`.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..errors import SemisharedError
from ..guest import block_jobs, rest
from ..model import layout
from ..tools import files, layers, qemu_img
from ..tools.crash_points import point
from . import records


def recover(vm_dir: str, name: str) -> None:
    """End what a killed action has left in the guest: a rest, jobs; `name` is '' when no guest runs."""
    rest.wake(vm_dir, name)
    rest.tidy(vm_dir)
    for note in sorted(left(vm_dir)):
        disk = layout.job_noted(note)
        if disk is None:
            continue
        path = layout.job_note(vm_dir, disk)
        job = files.read_json(path) or {}
        if rest.is_of_this_run(job, name):
            block_jobs.end(vm_dir, name, job)
        else:
            _put_back(vm_dir, disk, job)
        _tidy(vm_dir, disk, job)
        files.unlink(path)
        point("job ended")
    from ..model import layout_delta  # not for every step on a host

    if os.path.lexists(layout_delta.note(vm_dir)):
        from ..guest import active_layer, deltas

        # Also those that only have deltas: one that was to be detached had its lease before.
        noted = [record.disk for record in active_layer.noted(vm_dir)]
        deltas.merge(vm_dir, name)
        _release(vm_dir, noted)


@contextmanager
def ended_on_failure(vm_dir: str, name: str) -> Iterator[None]:
    """End what the block has begun when it fails, if that can be done at once; else whoever comes next does."""
    try:
        yield
    except Exception:
        try:
            recover(vm_dir, name)
        except SemisharedError:
            pass
        raise


def _release(vm_dir: str, disks: list[int]) -> None:
    """Give up the leases of disks that were to lie over bases, and read from their store as before."""
    from ..base import cache

    for disk in disks:
        record = records.read_record(vm_dir, disk)
        if record and record.place.is_remote:
            cache.release(cache.root_of(vm_dir), int(os.path.basename(vm_dir)), disk)


def left(vm_dir: str) -> list[str]:
    """Return the names of the notes that `recover` would see to."""
    try:
        return list(filter(layout.is_unsettled, os.listdir(layout.records(vm_dir))))
    except FileNotFoundError:
        return []


def _put_back(vm_dir: str, disk: int, job: dict[str, object]) -> None:
    """Put a layer back over what it lay over before a pull that its QEMU did not live to finish (guest/block_jobs.py)."""
    below, record = str(job.get("below", "")), records.read_record(vm_dir, disk)
    if "layer" not in job or not record:
        return
    folder = os.path.dirname(record.path)
    layer = f"{folder}/{job['layer']}"
    # The one below is gone only if the pull was over, and the power as well before the note was.
    if files.exists(layer) and os.path.exists(f"{folder}/{below}") and layers.backing_of(layer)[0] != below:
        qemu_img.lay_over(layer, below, str(job.get("below_format", "")))
        point("layer put back")


def _tidy(vm_dir: str, disk: int, job: dict[str, object]) -> None:
    """Remove what a pull has left beside its layer: empty layers for libvirt to look into, and its note on a store."""
    record, numbers = records.read_record(vm_dir, disk), job.get("stand_ins")
    if not record or not isinstance(numbers, list):
        return
    folder = os.path.dirname(record.path)
    files.remove_staged(folder)
    block_jobs.leave(folder, [number for number in numbers if isinstance(number, int)])
    if record.place.is_clone:
        from ..store import dir_clones

        dir_clones.forget_pull(folder)
