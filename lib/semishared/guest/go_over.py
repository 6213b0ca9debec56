# SPDX-License-Identifier: Apache-2.0
"""A running guest goes over from one backing chain to another: begun, finished and settled here alone.

    K <- guest
    K <- delta <- guest                 `begin`: below the delta the guest only reads, and others may copy
    K <- delta <- guest, K' = delta     `offer_...`: the other side is there; `finish`: QEMU mirrors the delta
    K' <- guest                         into it, and all disks of the guest pivot in one moment of rest

    caller                              K'
    live migration                      K itself, on this host or the other: `settle` commits the delta
    change of the datastore             the delta of a copy of the VM directory, where the guest then settles
    detach                              a copy of K over the lease on a base; K keeps a second name, K.kept
    move to another device              a copy of K there, by K's names; the link disk.N.left.snap leads to K

The note (active_layer.py) has no state: the disk's record decides. While it names the delta, `before` counts:
what was made for `after` goes, and the delta is merged into K. When it names a layer, `after` counts, and
what is left of `before` goes. The record changes only while the guest rests and both are equal. QEMU writes
to the source of a mirror first; a delta that no guest has open is a redo log, which can be committed
repeatedly. Without a guest a detach completes: K and its copy have the same content.

libvirt mirrors in units of 64 KiB, hence deltas: it mirrors little. Only a mirror can exchange what lies
below a guest's disk: libvirt exchanges no backing file of a node in use, and does not notice what QEMU is
told by the monitor.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Dict, Iterable, List
from xml.etree import ElementTree

from ..errors import BadRecord, DeviceMissing, GuestNotFrozen, MissingImage, ToolFailed
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, qemu_img
from ..tools.effects import point
from ..tools.run import work
from . import active_layer, block_jobs, domain, freeze, go_over_files, job_events, libvirtd
from .active_layer import DELTA, DEVICE, Switch, delta_of, names_delta, noted, with_delta

METADATA = "http://opennebula.org/xmlns/libvirt/1.0"
"""Namespace of OpenNebula's metadata in a domain: `<one:system_datastore>` is its VM directory."""


def begin(vm_dir: str, name: str, records: Iterable[Record], how: str = DELTA) -> List[Switch]:
    """Put deltas on these disks of a running guest, at one moment; the caller has settled earlier ones.

    `finish` or `settle` ends it, on one side or the other.
    """
    asked = list(records)
    opened = active_layer.opened(vm_dir, name)
    domain.check_plain(
        name, [opened[path] for path in (os.path.realpath(record.path) for record in asked) if path in opened]
    )
    without = [_layered(vm_dir, record) for record in asked]
    # Again, as a plain file has just become a layer, with another name.
    opened = active_layer.opened(vm_dir, name)
    missing = [record.path for record in without if os.path.realpath(record.path) not in opened]
    if missing:
        raise MissingImage(f"domain {name} on {os.uname().nodename} has no disk {missing[0]}")
    switches = [Switch(record, record, how) for record in without]
    active_layer.note(vm_dir, switches)
    point("deltas noted")
    for record in without:
        active_layer.create(record)
    targets = {opened[os.path.realpath(record.path)]: delta_of(record) for record in without}
    for record in without:
        # Before the guest writes both hold its data; from then on records must not name the lower layer.
        active_layer.write(vm_dir, with_delta(record))
    block_jobs.put_over(name, targets)
    point("guest writes to deltas")
    return switches


def _layered(vm_dir: str, record: Record) -> Record:
    """Give a disk that is a plain file the layout with layers; QEMU keeps it open under its old name."""
    if record.layer:
        return record
    path = disk_names.disk(vm_dir, record.disk)
    first = disk_names.layer(path, 0)
    if not os.path.islink(path):
        os.makedirs(disk_names.layers(path), mode=0o755, exist_ok=True)
        files.remove_staged(*os.path.split(first))
        staged = files.staged_name(first)
        os.link(path, staged)
        os.rename(staged, first)
        files.fsync(disk_names.layers(path))
        point("plain disk has a layer")
    layered = record._replace(path=first)
    active_layer.write(vm_dir, layered)
    files.remove_staged(*os.path.split(path))
    files.symlink(disk_names.layer(os.path.basename(path), 0), path)
    point("plain disk has a link")
    return layered


def finish(vm_dir: str, name: str, rate: int = 0, see: Callable[[], None] = lambda: None) -> None:
    """Have QEMU mirror each delta into the layer of the other side, pivot to that, and settle.

    `rate`: bytes per second of a raw layer, which QEMU copies whole; 0 for no limit. An error that `see`
    raises while a mirror works ends the go-over.
    """
    found = _on_deltas(vm_dir, name, vm_dir)
    if len(found) < len(noted(vm_dir)):
        raise ToolFailed(f"domain {name} on {os.uname().nodename} does not write to the deltas of its disks")
    for target, record in found.items():
        mirror = partial(block_jobs.mirror, name, target, record.path, record.format, rate)
        _equalled(name, target, mirror, "layers are being mirrored", see)
    point("layers ready")
    _pivot(vm_dir, name, found, "its disks stay where they are until it runs")
    settle(vm_dir, name)


def _on_deltas(vm_dir: str, name: str, where: str) -> Dict[str, Record]:
    """Return the records of noted disks whose running guest writes to their deltas in `where`, by target."""
    opened, records = active_layer.opened(where, name), [switch.after for switch in noted(vm_dir)]
    deltas = {os.path.realpath(disk_names.delta(where, record.disk)): record for record in records}
    return {target: deltas[path] for path, target in opened.items() if path in deltas}


def _equalled(
    name: str, target: str, begin: Callable[[], object], said: str, see: Callable[[], None] = lambda: None
) -> None:
    """Begin a job that makes another file equal to a disk, instead of any there is; wait until it is."""
    block_jobs.end_job(name, target)
    with job_events.listening(name, target) as job:
        begin()
        point(said)
        job.wait_until_ready(see)


def _pivot(vm_dir: str, name: str, targets: Iterable[str], otherwise: str, origin: str = "") -> None:
    """Pivot the guest to the targets of these disks' jobs, each equal once before; update the records.

    `otherwise`: what the error says becomes of the disks; `origin`: the VM directory that the guest comes
    from, if another. Raise GuestNotFrozen if the guest does not rest, or not long enough: some disks may have
    gone over then.

    All disks pivot in one rest. While the guest rests the records may name either side; once it runs they
    must name what it writes to. So nothing wakes the guest between a pivot and its record (guest/freeze.py
    limits a rest), and after an early wake no further disk is switched.
    """
    with freeze.resting(origin or vm_dir, name, "SUSPEND", copy=vm_dir if origin else "") as rested:
        if rested.how == "NONE":
            # A user has paused it, and may resume it between the pivot and the records.
            how = "was paused by somebody else" if domain.state(name) == "paused" else "does not run any more"
            raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} {how}: {otherwise}")
        for target in targets:
            block_jobs.wait_for_equal(name, target)
        # Metadata of the mirror may still be in QEMU's memory, and its source may be removed.
        block_jobs.write_out(name)
        point("mirrors equal")
        for target in targets:
            with freeze.held(origin or vm_dir, name, rested):
                block_jobs.pivot(name, target)
                point("guest has gone over")
                active_layer.follow(vm_dir, name)


# -- recovery ---------------------------------------------------------------------------------------


def settle(vm_dir: str, name: str) -> None:
    """Complete or roll back what is noted, and merge deltas; `name`: the domain that may run here, or ''."""
    origin = active_layer.origin(vm_dir)
    if not noted(vm_dir) and not origin:
        return
    state = domain.state(name) if name else "absent"
    if state == "unknown":
        raise ToolFailed(
            f"libvirtd on {os.uname().nodename} does not say whether {name} runs: its deltas are not merged"
        )
    guest = name if state in ("running", "paused") else ""
    if guest:
        block_jobs.wait_for_snapshot(guest)
    if origin:
        _enter(vm_dir, origin, guest)
    _decide(vm_dir, guest)
    records = [switch.after for switch in noted(vm_dir)]
    if guest:
        active_layer.follow(vm_dir, guest)
        _commit(vm_dir, guest)
    else:
        for record in records:
            _redo(vm_dir, record)
    for record in records:
        if names_delta(vm_dir, record):
            raise BadRecord(f"disk {record.disk} of {vm_dir} on {os.uname().nodename} still has its delta")
        files.unlink(delta_of(record))
        files.remove_staged(disk_names.layers(disk_names.plain(record.path)))
    active_layer.forget(vm_dir)


def moves(vm_dir: str) -> bool:
    """Return True if a disk moves to another device, of which oned does not know."""
    return any(switch.how == DEVICE for switch in noted(vm_dir))


def keep(vm_dir: str, name: str) -> bool:
    """Settle a killed move to another device, except its delta; return True if the guest writes to that."""
    block_jobs.wait_for_snapshot(name)
    _decide(vm_dir, name)
    active_layer.follow(vm_dir, name)
    return len(_on_deltas(vm_dir, name, vm_dir)) == len(noted(vm_dir))


def is_between(vm_dir: str) -> bool:
    """Return True if a VM directory depends on another place until it is settled."""
    return bool(
        active_layer.origin(vm_dir)
        or any(switch.begun for switch in noted(vm_dir))
        or go_over_files.moving(vm_dir)
    )


def _decide(vm_dir: str, name: str) -> None:
    """Give each disk that has two sides the one that its record names; `name` is '' when no guest runs."""
    switches, moving = noted(vm_dir), go_over_files.moving(vm_dir)
    begun = [switch for switch in switches if switch.begun]
    if name and (begun or moving):
        for target in active_layer.opened(vm_dir, name).values():
            block_jobs.end_job(name, target)
        active_layer.follow(vm_dir, name)
    settled = {switch.after.disk: switch for switch in switches}
    for before, after, how in begun:
        if name and names_delta(vm_dir, after):
            go_over_files.take_back(vm_dir, before)
            settled[after.disk] = Switch(before, before, how)
        else:
            go_over_files.let_go(vm_dir, after)
            settled[after.disk] = Switch(after, after, how)
    if begun:
        active_layer.note(vm_dir, list(settled.values()), active_layer.origin(vm_dir))
        point("switch ended")
    for disk in moving:
        go_over_files.put_back(vm_dir, disk)


def _commit(vm_dir: str, name: str) -> None:
    """Have QEMU commit the deltas of a running guest into the layers below, and pivot to those."""
    targets = _on_deltas(vm_dir, name, vm_dir)
    for target in targets:
        _equalled(name, target, partial(block_jobs.commit, name, target), "delta is being merged")
    if targets:
        point("deltas mirrored")
        _pivot(vm_dir, name, targets, "its deltas are merged when it runs")


def _redo(vm_dir: str, record: Record) -> None:
    """Merge the delta of a disk that no guest has open.

    Raise DeviceMissing if the device of a delta that the record names is not there, also if it is only set
    aside at this moment. A record without its delta is otherwise that of a disk being removed.
    """
    path = delta_of(record)
    if names_delta(vm_dir, record):
        if files.exists(path):
            qemu_img.commit(active_layer.for_qemu_img(record, path))
            files.fsync(record.path)
            point("delta committed")
        elif os.path.islink(os.path.dirname(path)):
            raise DeviceMissing(
                f"{path} on {os.uname().nodename}, which has what its guest has written last: on a "
                f"device that is not there"
            )
    active_layer.write(vm_dir, record)


# -- to a copy of the VM directory ------------------------------------------------------------------


def begin_copy(vm_dir: str, origin: str) -> None:
    """Give a copy of a VM directory, whose guest runs on in `origin`, new deltas, and note its origin."""
    files.unlink(disk_names.migration_note(vm_dir))
    switches = noted(vm_dir)
    for switch in switches:
        files.unlink(delta_of(switch.after))
        active_layer.write(vm_dir, switch.after)
        active_layer.create(switch.after)
    active_layer.note(vm_dir, switches, origin)


def mirror_into_copy(vm_dir: str, origin: str, name: str) -> Dict[str, Record]:
    """Have QEMU mirror the deltas in `origin` into those of the copy; return the records by target.

    The mirrors go on afterwards; each has been equal to its delta once.
    """
    found, ready = _on_deltas(vm_dir, name, origin), domain.mirrors(name)
    for target, record in found.items():
        if ready.get(target) != delta_of(record):
            mirror = partial(_mirror_anew, name, target, record)
            _equalled(name, target, mirror, "delta is being mirrored")
    return found


def _mirror_anew(name: str, target: str, record: Record) -> None:
    active_layer.create(record)
    block_jobs.mirror(name, target, delta_of(record), "qcow2")


def _enter(vm_dir: str, origin: str, name: str) -> None:
    """Pivot the guest to the copy's deltas and media; `name` is '' when no guest runs.

    Until a disk's record in the copy names the delta there, the one in the origin counts, also for a guest
    that died: then it is fetched.
    """
    if name:
        # The pivot notes its rest in the origin, where an action there would find it, too.
        freeze.wake(origin, name)
        found, here = mirror_into_copy(vm_dir, origin, name), os.uname().nodename
        if found:
            _pivot(vm_dir, name, found, f"it goes on in {vm_dir} when it runs", origin)
        there = [record.disk for record in _on_deltas(vm_dir, name, vm_dir).values()]
        for switch in noted(vm_dir):
            if switch.after.disk not in there:
                raise MissingImage(
                    f"domain {name} on {here} has disk {switch.after.disk} open neither in {origin} nor in "
                    f"{vm_dir}"
                )
        domain.change_media(name, origin, vm_dir)
        domain.ask(name, "metadata", partial(_say_where, vm_dir, origin))
    else:
        for switch in noted(vm_dir):
            if not names_delta(vm_dir, switch.after):
                _fetch(vm_dir, origin, switch.after)
    # From here on a record without its delta means that the delta was merged.
    active_layer.note(vm_dir, noted(vm_dir))
    point("copy entered")


def _fetch(vm_dir: str, origin: str, record: Record) -> None:
    """Copy the delta of a guest that died in the origin, if its record there names it, and record it here."""
    there, path = disk_names.delta(origin, record.disk), delta_of(record)
    said = (files.read_json(disk_names.record(origin, record.disk)) or {}).get("path")
    if said != there or not files.exists(there):
        raise MissingImage(
            f"{there} on {os.uname().nodename} is not there, and {vm_dir} has not what its guest has written"
        )
    files.remove_staged(*os.path.split(path))
    with files.published(path) as staged:
        work(["cp", "-a", "--sparse=always", "--reflink=auto", "--", there, staged])
    point("delta fetched")
    active_layer.write(vm_dir, with_delta(record))


def _say_where(vm_dir: str, origin: str, guest: Any) -> None:
    """Set the VM directory in OpenNebula's metadata of the domain: system snapshots and the probe use it."""
    libvirt = libvirtd.binding()
    kind, live = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_LIVE
    try:
        said = ElementTree.fromstring(guest.metadata(kind, METADATA, live))
    except libvirt.libvirtError as e:
        if e.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            return
        raise
    for element in said.iter():
        if (
            element.tag.rpartition("}")[2] == "system_datastore"
            and os.path.normpath(f"/{element.text or ''}".replace("//", "/")) == origin
        ):
            element.text = vm_dir
            guest.setMetadata(kind, ElementTree.tostring(said, "unicode"), "one", METADATA, live)
            point("metadata changed")
