# SPDX-License-Identifier: Apache-2.0
"""`remote-first` disks of a VM stop reading from the store: overlays over bases of this host.

The lease comes first. Then a running guest's QEMU switches to the base (guest/detach.py); for a VM that is
off, headers and records are changed. The next action on the VM's disks, or its next start, ends what a kill
left (guest/base_switch.py).

oned does not know of a detach and may start any action meanwhile. So the detach never ends an action that
works on the disks; it takes the turn, then asks oned, and an action that oned starts later ends the detach.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import Iterator, Sequence

from ..base import cache, room
from ..device import memory
from ..errors import CannotDetach, ImageChanged, MemoryPromised
from ..guest import active_layer, domain, job_lock
from ..guest import detach as live
from ..model.base.steps import DetachVm
from ..model.disk.place import OVERLAY
from ..model.disk.record import Record
from ..model.steps import DiskRef
from ..stage.ensure import ensure
from ..tools import effects, files, qemu_img
from ..tools.effects import point
from . import epoch_check, guard, layering, records, recovery, remote_first, vm_dir
from .epochs import Planned


def detach(step: DetachVm, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Detach disks of a VM: {"vm", "disks": [{"disk", "generation", "bytes"}], "seconds", "error", "id"}.

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
    return answer


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


def _detach(step: DetachVm, planned: Planned, ask: room.Ask | None) -> list[dict[str, object]]:
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
        active_layer.note(step.vm_dir, [before for before, _ in wanted])
        point("detach noted")
        disks = [
            live.Detached(before, _over_base(step, before, generation, ask)) for before, generation in wanted
        ]
        if step.domain:
            _require_room(step.vm_dir, disks, ask)
            live.detach(step.vm_dir, step.domain, disks, step.rate)
        else:
            live.detach_off(step.vm_dir, disks)
    after = [disk.after for disk in disks]
    return [
        {"disk": record.disk, "generation": record.of_image.generation, "bytes": files.allocated(record.path)}
        for record in after
    ]


@contextmanager
def _memory(before: Sequence[Record]) -> Iterator[None]:
    """Promise memory, within the block, to disks in memory of a running guest: a delta each, and copies."""
    with ExitStack() as promised:
        for record in before:
            folder = layering.folder_of(record)
            try:
                memory.more(folder, layers=1 + len(live.to_copy(record)))
            except MemoryPromised as e:
                raise CannotDetach(
                    f"{e.detail}, while its guest lets go of the store: it does with less when the VM is off"
                ) from None
            promised.callback(memory.settle, folder)
        yield


def _require_room(vm_dir: str, disks: Sequence[live.Detached], ask: room.Ask | None) -> None:
    """Make room for the copies beside the layers, on each file system that has some."""
    needed: dict[int, tuple[str, int]] = {}
    for disk in disks:
        folder = layering.folder_of(disk.before)
        system = os.stat(folder).st_dev
        needed[system] = folder, needed.get(system, (folder, 0))[1] + live.copied_bytes([disk])
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
