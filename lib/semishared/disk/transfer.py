# SPDX-License-Identifier: Apache-2.0
"""Carry a VM directory from machine to machine: tar at both ends, the stream's hash in the middle.

The source is removed after the target has published (OpenNebula's ssh/mv wipes, then copies: a retry loses
data). The removal is a step of its own, before which the plan asks oned whether the move is still wanted.

A crash leaves `.incoming-VM-*` at the target, which the next run removes, or a whole directory at both ends:
the source's counts, and the next run replaces the target's. A remainder is never sent as a whole directory,
as removals begin with a rename (disk/vm_dir_siblings.py). 0.1.0 removed in place; such a remainder does not
replace a directory that has more.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Callable, Iterable, Iterator

from ..base import cache, room
from ..device import systems
from ..errors import (
    ImageChanged,
    MigrationRefused,
    MissingImage,
    Overtaken,
    SameDirectory,
    StoreUnavailable,
    ToolFailed,
    TransferCorrupt,
    WholeDirectoryThere,
)
from ..guest import virsh
from ..model.device.classes import Want
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import (
    ClearVm,
    KeptVm,
    MakeRoom,
    ReceiveFile,
    ReceiveVm,
    ReleaseVm,
    RenamedVm,
    RenameVm,
    SendVm,
    SentVm,
    has_arrived,
    no_records,
)
from ..named import to_data
from ..stage import ensure as stage_ensure
from ..stage.ensure import ensure
from ..tools import beneath, files, progress
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from ..tools.run import piped
from . import (
    epochs,
    guard,
    history,
    on_devices,
    records,
    recovery,
    retained_diffs,
    vm_dir,
    vm_dir_inventory,
    vm_dir_siblings,
)
from .epochs import Planned

if TYPE_CHECKING:
    from ..model.disk.commit_steps import KeepStale, KeptStale

CHUNK = 1 << 20


def send_vm(step: SendVm, tell: Callable[..., None], write: Callable[[bytes], None]) -> SentVm:
    """Send a VM directory and report `sent`: the stream's hash and the directory's fingerprint."""
    vm_dir_inventory.unmark(step.vm_dir, step.token)
    _enter(step.vm, step.vm_dir, step.domain)
    sent = send(step.vm_dir, write, step.deltas)
    tell(event="sent", **to_data(sent))
    point("directory sent")
    return sent


def _enter(vm: int, directory: str, domain: str) -> None:
    """End what makes a VM directory depend on another place (guest/go_over.py), before it is sent."""
    recovery.end_moves(vm, directory)
    if not records.goes_over(directory):
        return
    from ..guest import go_over, job_lock

    if go_over.is_between(directory):
        job_lock.take(vm, directory)
        recovery.check_there(directory)
        go_over.settle(directory, domain)


def send(directory: str, write: Callable[[bytes], None], deltas: Iterable[int] = ()) -> SentVm:
    """Write the directory as a tar stream; return the stream's hash and the content's fingerprint.

    `deltas`: disks whose deltas stay, as their guest writes to them.
    """
    beneath.refuse_link(directory)
    try:
        before, seen = os.stat(directory), vm_dir_inventory.fingerprint(directory)
    except FileNotFoundError:
        raise MissingImage(f"{directory} is not there on {os.uname().nodename}") from None
    # The permission for a live migration from here stays, too, and so do unpublished files.
    stay = [disk_names.migration_note("."), *(disk_names.delta(".", disk) for disk in deltas)]
    excluded = [f"--exclude={disk_names.STAGED}*", "--anchored", *(f"--exclude={path}" for path in stay)]
    argv = [
        "tar",
        "--create",
        "--sparse",
        *excluded,
        "--file=-",
        f"--directory={directory}",
        "--",
        *on_devices.members(directory),
    ]
    digest = hashlib.sha256()
    progress.expect(vm_dir_inventory.allocated(directory))
    with standing_back(), piped(argv, feed=False) as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)
            write(chunk)
            progress.count("sent", len(chunk))
    _check_still(directory, before)
    return SentVm(digest.hexdigest(), seen)


def _check_still(directory: str, before: os.stat_result) -> None:
    """Raise Overtaken if the directory was removed or renamed while it was read."""
    try:
        if os.path.samestat(before, os.stat(directory)):
            return
    except FileNotFoundError:
        pass
    raise Overtaken(f"{directory} on {os.uname().nodename} was removed while it was being moved")


def _begun(vm: int, directory: str, planned: Planned) -> str:
    """Begin one more move of the VM to this machine; of several moves only the latest publishes."""
    with files.enough_space(directory):
        systems.mark(directory)
    with vm_dir.publishing(vm, directory, planned) as file:
        move = epochs.begin_move(file)
    vm_dir_siblings.tidy(directory, cache.root_of(directory), vm)
    return move


def make_room(step: MakeRoom, ask: room.Ask | None) -> None:
    """Make room for an arriving VM directory, also by finishing removals; raise NoSpace if too little."""
    vm_dir_siblings.tidy(step.vm_dir, cache.root_of(step.vm_dir), step.vm)
    disks = {f"{step.vm}-{disk}": size for disk, size in step.sizes.items()}
    room.require_for_vm(step.vm_dir, step.needed, ask, step.bases, disks, step.apart)


def receive(
    step: ReceiveVm,
    chunks: Iterator[bytes],
    sha256: Callable[[], str],
    planned: Planned,
    ask: room.Ask | None,
) -> None:
    """Unpack the stream beside the VM directory; publish it if it is what was sent."""
    move = _begun(step.vm, step.vm_dir, planned)
    with vm_dir_siblings.receiving(step.vm, step.vm_dir, cache.root_of(step.vm_dir)) as staging:
        wants = {
            int(disk): Want(tuple(want["classes"]), want["size"], want["layers"])
            for disk, want in step.wants.items()
        }
        sizes = {int(disk): size for disk, size in step.sizes.items()}
        made = on_devices.prepare(staging, step.vm, sorted(set(step.disks) - set(step.foreign)), wants, sizes)
        progress.expect(sum(sizes.values()))
        received = _unpack(staging, chunks)
        on_devices.arrived(staging, made)
        point("incoming unpacked")
        if sha256() != received:
            raise TransferCorrupt(f"VM {step.vm}: what arrived on {os.uname().nodename} is not what was sent")
        guard.check_received(staging, step.vm, step.vm_dir, step.foreign)
        if step.deltas:
            _add_deltas(staging, step.deltas)
        _publish(staging, step, move, planned, ask)
    vm_dir_siblings.tidy(step.vm_dir, cache.root_of(step.vm_dir), step.vm)


def receive_file(step: ReceiveFile, planned: Planned, chunks: Iterator[bytes]) -> None:
    """Publish a file from its bytes; raise TransferCorrupt unless its hash is right."""
    digest = hashlib.sha256()
    directory, name = os.path.split(step.path)
    with vm_dir.published(step.vm, directory, name, planned) as staged:
        with open(staged, "xb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
                progress.count("received", len(chunk))
        if digest.hexdigest() != step.sha256:
            raise TransferCorrupt(f"{step.path} did not arrive whole on {os.uname().nodename}")


def _add_deltas(staging: str, disks: tuple[int, ...]) -> None:
    """Create new, empty deltas for those that stayed with their guest."""
    from ..guest import active_layer

    for switch in active_layer.noted(staging):
        if switch.after.disk in disks:
            active_layer.create(switch.after)


def _unpack(staging: str, chunks: Iterator[bytes]) -> str:
    """Unpack a tar stream into `staging` and return the stream's sha256."""
    digest = hashlib.sha256()
    # Layers go through the links into their places on devices.
    keep = "--keep-directory-symlink"
    argv = ["tar", "--extract", "--sparse", keep, "--file=-", f"--directory={staging}", "--no-same-owner"]
    with standing_back(), piped(argv, feed=True) as stream:
        for chunk in chunks:
            digest.update(chunk)
            progress.count("received", len(chunk))
            stream.write(chunk)
    return digest.hexdigest()


def _publish(
    staging: str, step: ReceiveVm | RenameVm, move: str, planned: Planned, ask: room.Ask | None
) -> None:
    """Lease the bases of the received disks, then rename their directory to the VM directory."""
    vm, directory = step.vm, step.vm_dir
    for record in records.records(staging):
        _adopt(staging, directory, vm, record, step.keep_bases, ask)
    os.makedirs(disk_names.records(staging), exist_ok=True)
    vm_dir.note_seq(staging, planned.seq)
    with standing_back():
        on_devices.fsync_tree(staging)
    point("incoming adopted")
    with vm_dir.publishing(vm, directory, planned) as file:
        if not epochs.is_latest_move(file, move):
            raise Overtaken(f"another move of VM {vm} to {os.uname().nodename} has begun since this one")
        files.refuse()
        if not files.is_absent(directory):
            _check_may_replace(staging, step, planned)
            os.rename(directory, vm_dir_siblings.new_name("outgoing", directory))
            point("older directory set aside")
        os.rename(staging, directory)
        point("vm directory renamed")
        files.fsync(os.path.dirname(directory))
        point("vm directory published")
        for older in vm_dir_siblings.listed(directory, "outgoing"):
            retained_diffs.keep_stale(vm, older)
            vm_dir_siblings.bury(older, vm)


def _check_may_replace(staging: str, step: ReceiveVm | RenameVm, planned: Planned) -> None:
    """Raise unless what arrived may replace the VM directory here: no guest runs, and nothing is lost."""
    directory, here = step.vm_dir, os.uname().nodename
    there = vm_dir_inventory.inventory(directory)
    if not there:
        return
    seq = history.seq_of(directory)
    arrived = vm_dir_inventory.inventory(staging)
    less = sorted(there - arrived)
    # Nor may an older directory lose a disk: a move that oned saw fail may have made it, after its source
    # was gone.
    lost = [
        disk
        for disk in step.disks
        if disk_names.disk_name(disk) in there and not vm_dir_inventory.names_of(disk) & arrived
    ]
    if less and (lost or not 0 <= seq < planned.seq):
        raise WholeDirectoryThere(f"{directory} on {here} has what did not arrive: {', '.join(less[:5])}")
    why = virsh.why_in_use(step.domain)
    if why:
        raise MigrationRefused(f"{directory} on {here} is not replaced: {why}")


def _adopt(
    staging: str, directory: str, vm: int, record: Record, keep_bases: bool, ask: room.Ask | None
) -> None:
    """Adapt one disk of a received directory to this host: its path and its base."""
    disk, path = record.disk, record.path
    if record.network:
        return  # libvirt opens it, or says why not
    if not record.is_local:
        if keep_bases and not os.path.exists(path):
            raise StoreUnavailable(f"{path} of disk {disk} is not there on {os.uname().nodename}")
        return
    # disk.N itself, or its active layer disk.N.snap/K; layers name one another by relative names.
    here, layer = disk_names.disk(directory, disk), disk_names.layer_of(path)
    here = disk_names.layer(here, layer) if layer else here
    if path != here:
        records.write_record(staging, record._replace(path=here))
    if record.place.leases and keep_bases and record.image:
        arrived = record._replace(path=record.active(disk_names.disk(staging, disk)))
        stage_ensure.take(cache.root_of(directory), vm, arrived)
        try:
            ensure(cache.root_of(directory), record.image, ask, (vm, disk), want=room.FOR_THIS)
        except ImageChanged as e:
            raise ImageChanged(f"disk {disk} of VM {vm} needs the image as it was: {e.detail}") from None
        stage_ensure.drop(arrived)
    elif record.place.is_remote and keep_bases:
        from . import remote_first

        remote_first.check(record)


def rename(step: RenameVm, planned: Planned, ask: room.Ask | None) -> RenamedVm:
    """Copy a VM directory to another system datastore of this host; return the source's fingerprint."""
    _enter(step.vm, step.source, step.domain)
    beneath.refuse_link(step.source)
    source, target = vm_dir_inventory.describe(step.source), vm_dir_inventory.describe(step.vm_dir)
    if has_arrived(source, target, planned.seq):
        return RenamedVm(vm_dir_inventory.fingerprint(step.source))
    if not source.present:
        raise MissingImage(f"{step.source} is not there on {os.uname().nodename}")
    if not source.whole and set(step.disks) - set(step.foreign):
        raise MigrationRefused(no_records(step.source, os.uname().nodename))
    for one, other in (
        (step.source, step.vm_dir),
        (os.path.dirname(step.source), os.path.dirname(step.vm_dir)),
    ):
        if os.path.exists(other) and os.path.samefile(one, other):
            raise SameDirectory(f"{step.source} and {step.vm_dir} on {os.uname().nodename} are one directory")
    move = _begun(step.vm, step.vm_dir, planned)
    # An upper limit: with reflinks the copy takes nothing.
    room.for_disk(
        step.vm_dir,
        vm_dir_inventory.allocated(step.source),
        ask,
        stay=vm_dir_inventory.bases(step.source) if step.keep_bases else (),
    )
    with vm_dir_siblings.receiving(step.vm, step.vm_dir, cache.root_of(step.vm_dir)) as staging:
        before, seen = os.stat(step.source), vm_dir_inventory.fingerprint(step.source)
        with standing_back():
            on_devices.copy(step.source, staging, step.vm)
        _check_still(step.source, before)
        point("directory copied")
        if step.live:
            from ..guest import go_over

            go_over.begin_copy(staging, step.source)
        guard.check_received(staging, step.vm, step.vm_dir, step.foreign)
        _publish(staging, step, move, planned, ask)
    vm_dir_siblings.tidy(step.vm_dir, cache.root_of(step.vm_dir), step.vm)
    return RenamedVm(seen)


def keep_stale(step: KeepStale, planned: Planned) -> KeptStale:
    """Keep the uncommitted diffs of a directory whose VM was taken over, if it is unchanged since `seen`."""
    from ..model.disk.commit_steps import KeptStale

    with vm_dir.publishing(step.vm, step.vm_dir, planned):
        if vm_dir_inventory.fingerprint(step.vm_dir) != step.seen:
            return KeptStale([], step.seen)
        found = retained_diffs.keep_stale(step.vm, step.vm_dir)
        return KeptStale(found, vm_dir_inventory.fingerprint(step.vm_dir) if found else step.seen)


def release(step: ReleaseVm, planned: Planned) -> KeptVm:
    """Remove the source directory of a move; return why it stays."""

    def why_not() -> str:
        if not files.is_absent(step.vm_dir) and vm_dir_inventory.fingerprint(step.vm_dir) != step.seen:
            return "it has changed since it was read"
        return ""

    why = why_not() or virsh.why_in_use(step.domain)
    if why:
        return KeptVm(why)
    try:
        # Also without a directory: a killed run may have removed it and not yet freed its leases.
        return KeptVm(vm_dir.remove(step.vm, step.vm_dir, planned, why_not))
    except ToolFailed as e:
        # The VM runs elsewhere; its move must not fail for ever because of a leftover.
        return KeptVm(e.detail)


def clear(step: ClearVm, planned: Planned) -> KeptVm:
    """Remove a VM directory that a live migration has brought, or left; return why it stays."""

    def why_not() -> str:
        if files.is_absent(step.vm_dir):
            return ""
        seq = history.seq_of(step.vm_dir)
        if step.brought:
            return "" if seq == step.seq else "it is not what this migration has brought"
        return f"the VM came back there at SEQ {seq} of its history" if 0 <= step.seq <= seq else ""

    why = vm_dir.remove(step.vm, step.vm_dir, planned, why_not)
    if why:
        vm_dir_siblings.tidy(step.vm_dir, cache.root_of(step.vm_dir), step.vm)
    return KeptVm(why)
