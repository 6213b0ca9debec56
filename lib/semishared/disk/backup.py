# SPDX-License-Identifier: Apache-2.0
"""Copies of a VM's disks for OpenNebula's backup drivers, whole or of what changed since one that it has.

For a running VM, QEMU runs one backup job over all disks, begun in one transaction. QEMU copies each block
before the guest overwrites it, so the copies show one moment, and the VM's own layers stay as they are.
Increments of disks on Ceph are copied from snapshots of that moment, for which the guest stands still.
Without FS_FREEZE a restored guest finds what a power cut leaves; with FS_FREEZE = AGENT, what a clean unmount
leaves.

A crash leaves `.staged-backup` (no backup driver looks there) or `backup`, which `end`, the next backup and
the removal of the VM delete; a job in QEMU, which `end` ends; a frozen guest, noted before, which `end` thaws
(guest/freeze.py).
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Callable, Collection, ContextManager, Sequence

from ..base import room
from ..errors import MissingImage
from ..guest import backup_job, block_jobs, domain, freeze, job_lock
from ..model.disk import marks as model
from ..model.disk import names as disk_names
from ..model.disk.marks import Asked, Increment
from ..model.disk.record import Record
from ..model.steps import BackUp, DiskRef, EndBackup
from ..named import NamedTuple
from ..tools import files, progress, qemu_img, storage_daemon
from ..tools.effects import point
from ..tools.rate_limit import in_slice, priority, standing_back
from . import backup_marks, firmware, records, recovery, snapshot_marks, sum_marks, vm_dir
from .epochs import Planned
from .save_as import opened


class _Disk(NamedTuple):
    """A disk: its file ('' on the network), format, libvirt's name of its source, and its record."""

    path: str
    format: str
    listed: str
    record: Record


def _recorded(vm: int, directory: str, disk: int) -> _Disk:
    record = records.record_of(DiskRef(vm, disk, directory))
    if record.network:
        return _Disk("", record.format, record.network.name, record)
    path = record.path
    if not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    return _Disk(path, record.format, os.path.realpath(path), record)


def back_up(
    step: BackUp, planned: Planned, ask: room.Ask | None, warn: Callable[[str], None] = lambda text: None
) -> None:
    """Copy the disks, or what has changed in them, and publish the copies by one rename."""
    staged = disk_names.staged_backup(step.directory)
    job_lock.take(step.vm, step.vm_dir)
    job_lock.check_not_ended(step.vm, step.vm_dir, planned.known)
    _put_right(step.vm_dir, step.domain, step.directory)
    files.remove_staged(step.vm_dir, "backup.xml")
    files.remove_tree(staged)
    files.remove_tree(step.directory)
    if not os.path.isdir(step.vm_dir):
        raise MissingImage(f"{step.vm_dir} is not there on {os.uname().nodename}")
    disks = {int(disk): _recorded(step.vm, step.vm_dir, int(disk)) for disk in step.disks}
    with _checkpoints(step):
        _back_up(step, disks, staged, planned, ask, warn)


def _checkpoints(step: BackUp) -> ContextManager[None]:
    """Have libvirt forget at the end the marks that it has to know within; a full backup has none."""
    if not step.domain or step.since is None:
        return nullcontext()
    from ..guest import marks

    return marks.known(step.domain)


def _back_up(
    step: BackUp,
    disks: dict[int, _Disk],
    staged: str,
    planned: Planned,
    ask: room.Ask | None,
    warn: Callable[[str], None],
) -> None:
    increment = _increment(step, disks)
    if increment:
        for disk, why in sorted(increment.whole.items()):
            warn(f"all of disk {disk} is in increment {increment.number}, not what changed alone: {why}")
    changed = increment.changed if increment else ()
    needed = _needed(step, disks, increment)
    room.require(step.vm_dir, needed, ask, where=os.path.dirname(staged))
    copies = not step.domain or (increment and (increment.mark.snapshots or increment.mark.sums))
    within = _within(step, warn) if copies else []
    try:
        with files.enough_space(staged):
            os.makedirs(staged)
            point("backup begun")
            firmware.save(step, staged, warn)
            if step.domain:
                _copy_running(step, staged, disks, increment, within)
            else:
                if not changed:
                    # The copies are one after the other, and together one movement.
                    progress.expect(needed - room.LITTLE)
                _copy_off(step, staged, disks, increment, within)
            files.write(f"{staged}/vm.xml", step.xml.encode())
            files.fsync_tree(staged)
            progress.count(
                "backed_up", sum(files.allocated(f"{staged}/{name}") for name in os.listdir(staged))
            )
            with vm_dir.publishing(step.vm, step.vm_dir, planned):
                os.rename(staged, step.directory)
        point("backup published")
    except BaseException:
        # The copies may be what fills the file system.
        files.remove_tree(staged)
        raise


def _within(step: BackUp, warn: Callable[[str], None]) -> list[str]:
    """Return the words before each program that copies."""
    if not step.limits:
        return priority(step.nice, step.io_level)
    found = in_slice(step.slice, step.limits)
    if not found:
        warn(
            f"{os.uname().nodename} has no systemd of oneadmin's (`loginctl enable-linger oneadmin`): copies "
            f"for the backup of VM {step.vm} run without {', '.join(step.limits)}"
        )
    return found or priority(step.nice, step.io_level)


def _needed(step: BackUp, disks: dict[int, _Disk], increment: Increment | None) -> int:
    """Return how many bytes the copies take at most; what changed lies in a disk's own layers."""
    needed = room.LITTLE
    since = increment.since if increment else None
    for number, found in disks.items():
        if increment and since and number in increment.changed:
            if number in since.snapshots:
                needed += snapshot_marks.changed_bytes(step.vm, found.record, since.name)
                continue
            if number not in since.sums:
                needed += sum(map(files.allocated, backup_marks.own_layers(found.record)))
                continue
        with opened(found.record, found.path, found.format) as source:
            needed += qemu_img.measure(source, found.format)
    return needed


# -- increments -------------------------------------------------------------------------------------

UNUSABLE = "its mark is not whole: its QEMU was killed, or its layers were made anew"


def _increment(step: BackUp, disks: dict[int, _Disk]) -> Increment | None:
    """Decide what is copied of each disk, and note the new mark before it is made; None: a full backup."""
    marks = backup_marks.read(step.vm_dir)
    if step.since is None:
        if marks:
            _drop_marks(step, disks, ())
            backup_marks.write(step.vm_dir, ())
        return None
    asked = Asked(step.since, step.chain, step.newest)
    able = {number: backup_marks.refused(found.record) for number, found in disks.items()}
    name = model.name(os.urandom(8).hex(), asked.number)
    on_ceph = [number for number, found in disks.items() if found.record.network]
    raw = [number for number, found in disks.items() if not found.record.network and found.format == "raw"]
    increment = model.decide(marks, asked, able, name, on_ceph, raw)
    backup_marks.write(step.vm_dir, tuple(one for one in (increment.since, increment.mark) if one))
    _drop_marks(step, disks, [increment.since.name] if increment.since else [])
    return increment.with_whole(_unusable(step, disks, increment))


def _drop_marks(step: BackUp, disks: dict[int, _Disk], keep: Collection[str]) -> None:
    snapshot_marks.drop_all(step.vm, step.vm_dir, disks, keep)
    sum_marks.drop(step.vm_dir, keep)
    if step.domain:
        from ..guest import marks

        marks.drop(step.domain, keep)
        return
    for found in disks.values():
        backup_marks.drop(found.record, keep)


def _unusable(step: BackUp, disks: dict[int, _Disk], increment: Increment) -> dict[int, str]:
    """Return the disks whose marks are not whole, and why."""
    if not increment.since:
        return {}
    name, snapshots, sums = increment.since.name, increment.since.snapshots, increment.since.sums
    marked = {disk: disks[disk] for disk in increment.changed}
    on_ceph = {disk: found.record for disk, found in marked.items() if disk in snapshots}
    gone = [disk for disk, record in on_ceph.items() if not snapshot_marks.is_there(step.vm, record, name)]
    forgotten = [disk for disk in marked if disk in sums and not sum_marks.is_there(step.vm_dir, disk, name)]
    with_bitmaps = {disk: found for disk, found in marked.items() if disk in increment.since.bitmaps}
    if not step.domain:
        broken = [
            disk for disk, found in with_bitmaps.items() if not backup_marks.is_whole(found.record, name)
        ]
    elif with_bitmaps:
        from ..guest import marks

        devices = _devices(step, with_bitmaps)
        valid = marks.define(step.domain, name, devices.values())
        broken = [disk for disk, device in devices.items() if device not in valid]
    else:
        broken = []
    return {
        **dict.fromkeys(gone, snapshot_marks.GONE),
        **dict.fromkeys(forgotten, sum_marks.GONE),
        **dict.fromkeys(broken, UNUSABLE),
    }


def _target(staged: str, disk: int, increment: Increment | None) -> str:
    return disk_names.backup_copy(staged, disk, increment.number if increment else 0)


def _copy_off(
    step: BackUp, staged: str, disks: dict[int, _Disk], increment: Increment | None, within: Sequence[str]
) -> None:
    """Copy disks that no guest has open; what is copied is what is marked."""
    snapshots = _on_ceph(disks, increment)
    if increment:
        for disk in increment.mark.bitmaps:
            backup_marks.add(disks[disk].record, increment.mark.name)
        with snapshot_marks.marking(step.vm, snapshots, increment.mark.name) as mark:
            mark()
        _copy_snapshots(step, staged, snapshots, increment, within)
    for disk, found in disks.items():
        if disk in snapshots:
            continue
        target = _target(staged, disk, increment)
        with opened(found.record, found.path, found.format) as source, standing_back():
            parts = []
            if increment and disk in increment.mark.sums:
                parts = sum_marks.mark(step.vm_dir, disk, source, found.format, increment, step.rate)
            if increment is None or increment.number == 0:
                qemu_img.convert(
                    source, found.format, target, "qcow2", direct=True, rate=step.rate, within=within
                )
            else:
                # `qemu-img info` does not open what is named with all it lies over.
                size = qemu_img.virtual_size(found.path or source, found.format)
                qemu_img.create(target, "qcow2", size)
                if disk not in increment.changed:
                    qemu_img.convert_whole(source, found.format, target, within, rate=step.rate)
                elif disk in increment.mark.sums:
                    sum_marks.copy_changed(source, found.format, target, parts, within, step.rate)
                elif increment.since:
                    active = os.path.realpath(source) if source.startswith("/") else source
                    storage_daemon.copy_changed(active, increment.since.name, target, within, rate=step.rate)
            files.fsync(target)
        point("disk copied")


def _on_ceph(disks: dict[int, _Disk], increment: Increment | None) -> dict[int, Record]:
    """Return the disks of an increment that are marked by snapshots."""
    return {disk: disks[disk].record for disk in increment.mark.snapshots} if increment else {}


def _copy_snapshots(
    step: BackUp,
    staged: str,
    snapshots: dict[int, Record],
    increment: Increment,
    within: Sequence[str],
) -> None:
    for disk, record in snapshots.items():
        target = _target(staged, disk, increment)
        with standing_back():
            snapshot_marks.copy(step.vm, disk, record, increment, target, within, step.rate)
            files.fsync(target)
        point("disk copied")


def _rest(step: BackUp, disks: dict[int, _Disk], snapshots: dict[int, Record]) -> str:
    """Return how the guest rests: snapshots are made one after another, and of one moment all the same."""
    if not snapshots or len(disks) == 1:
        return step.freeze
    return {"NONE": "SUSPEND", "AGENT": freeze.BOTH}.get(step.freeze, step.freeze)


def _copy_running(
    step: BackUp, staged: str, disks: dict[int, _Disk], increment: Increment | None, within: Sequence[str]
) -> None:
    devices, snapshots = _devices(step, disks), _on_ceph(disks, increment)
    targets = {}
    for disk, device in devices.items():
        if disk in snapshots:
            continue
        target = _target(staged, disk, increment)
        # libvirt would create it as root, and QEMU, which runs as another user, could not open it.
        qemu_img.create(target, "qcow2", block_jobs.capacity(step.domain, device))
        os.chmod(target, 0o660)
        targets[device] = target
    since, mark = {}, ""
    if increment:
        from ..guest import marks

        if increment.since:
            changed = [disk for disk in increment.changed if disk in increment.since.bitmaps]
            since = {devices[disk]: increment.since.name for disk in changed}
        marked = [devices[disk] for disk in increment.mark.bitmaps]
        others = set(domain.disks(step.domain)) - set(marked)
        mark = marks.checkpoint(increment.mark.name, marked, sorted(others)) if marked else ""
    try:
        name = increment.mark.name if increment else ""
        with backup_job.listening(step.domain) as job:
            with (
                snapshot_marks.marking(step.vm, snapshots, name) as take,
                freeze.resting(step.vm_dir, step.domain, _rest(step, disks, snapshots)),
            ):
                take()
                if targets:
                    job.begin(targets, since, mark)
                    point("backup job begun")
            if targets:
                job.limit(targets, step.rate)
                job.wait()
        point("backup job done")
        if increment:
            for disk in increment.mark.sums:
                with standing_back():
                    sum_marks.thin(step.vm_dir, disk, _target(staged, disk, increment), increment, within)
            _copy_snapshots(step, staged, snapshots, increment, within)
    except BaseException:
        _end_job(step.domain, step.directory)
        raise


def _devices(step: BackUp, disks: dict[int, _Disk]) -> dict[int, str]:
    """Return libvirt's target name (vda) of each disk."""
    opens = domain.disks(step.domain).items()
    known = {os.path.realpath(source) if source.startswith("/") else source: name for name, source in opens}
    found = {}
    for disk, recorded in disks.items():
        device = known.get(recorded.listed)
        if not device:
            raise MissingImage(f"domain {step.domain} has no disk {recorded.listed}")
        found[disk] = device
    return found


def _end_job(name: str, directory: str) -> None:
    backup_job.end(name, [disk_names.staged_backup(directory), directory])


def _put_right(vm_dir: str, name: str, directory: str) -> None:
    """Recover what an earlier backup, or another action, has left in the guest."""
    try:
        recovery.recover(vm_dir, name)
    finally:
        if name:
            _end_job(name, directory)
            _forget_checkpoints(vm_dir, name)


def _forget_checkpoints(vm_dir: str, name: str) -> None:
    """Have libvirt forget what a killed backup has told it of marks."""
    if backup_marks.read(vm_dir) and domain.state(name) in ("running", "paused"):
        from ..guest import marks

        marks.forget(name)


def end(step: EndBackup) -> None:
    """Leave nothing of a backup: end its process and its job, thaw the guest, remove the copies."""
    job_lock.take(step.vm, step.vm_dir)
    job_lock.note_end(step.vm, step.vm_dir)
    point("backup ended")
    try:
        _put_right(step.vm_dir, step.domain, step.directory)
    finally:
        for directory in (disk_names.staged_backup(step.directory), step.directory):
            files.remove_tree(directory)
            point("copies removed")
        files.remove_staged(step.vm_dir, "backup.xml")
        parent = os.path.dirname(step.directory)
        if parent != step.vm_dir:
            _remove_if_empty(parent)


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass  # the administrator may keep other files below BACKUP_BASE_PATH
