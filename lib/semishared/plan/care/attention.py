# SPDX-License-Identifier: Apache-2.0
"""What waits for an operator: facts of oned, hosts and the front-end into items, each with its command.

A row for each kind, with its message and what to do; docs/how-to/attention.md explains each, and
tests/unit/plan/test_attention.py plants each. No I/O, no clock: `Facts` has the time.
"""

from __future__ import annotations

import re
from typing import Callable, Iterator, Mapping, Sequence

from ...errors import HostOutdated, from_id
from ...model.base import names as base_names
from ...model.base.steps import HeldBase, KeptDisk, Listed, PausedGuest, Reported, ReportedVm
from ...model.device.steps import PoolDevice
from ...model.disk import names as disk_names
from ...model.job_steps import Job
from ...model.store import lost as rows_lost
from ...named import NamedTuple
from ...opennebula.states import LcmState, VmState, name_of
from ...opennebula.xml import Datastore, Host, Image, Vm
from ...units import human
from .checks import Check, rows
from .fence import BEGUN, Mark

CATALOGUE = """
[vm]  A VM as oned has it.
vm-failed: Does an action of ours wait for `onevm recover`?
    broken: VM {vm} ({name}) waits in {state}: {error} -> onevm recover --retry {vm}
guest-paused: Does a guest stand still after an I/O error?
    broken: guest {guest} has stood still since an I/O error{full}
    -> {room}as root on {machine}: virsh --connect qemu:///system resume {guest}
[disk]  A disk of a VM on a machine.
disk-kept: Has a deleted VM left what no image has?
    warning: {size} of disk {disk} of VM {vm}, which is gone, are not committed to image {image}
    -> semishared commit {vm} {disk}{as_new}; or, to lose it: semishared gc --discard {word}
disk-kept-unreadable: Can all of that be read?
    broken: what was kept of disk {disk} of VM {vm} cannot be read: {error}
    -> copy {path} elsewhere first; then, to lose it: semishared gc --discard {word}
record-unreadable: Can all records of disks be read?
    broken: VM {vm}: {error} -> semishared status {vm}: nothing that it is of is removed; copy what there is
system-unreadable: Can all system datastores be read?
    broken: {error} -> as root on {machine}: dmesg; mend or mount its disk
disk-uncommitted: Is there a copy of what guests have written?
    warning: {size} of disk {disk} of VM {vm} ({name}) are on {machine} alone -> semishared commit {vm} {disk}
[base]  A base of a host.
base-damaged: Is each base what it was?
    broken: base of image {image}, generation {generation}, is damaged and out of use
    -> semishared base verify {image} --hosts {machine}
base-mended: Has a guest that runs read a damaged base?
    warning: VM {vm} ({name}) runs since before the base of image {image} was found damaged, and mended
    -> onevm poweroff {vm}; then onevm resume {vm}
bases-unverified: Was each base read of late?
    warning: bases that nothing has read for {days} days: {count} ({size})
    -> semishared base verify --hosts {machine}
[device]  A disk or device of a host.
disk-full: Has the machine's own disk room?
    warning: its disk is {percent} % full: {free} are free
    -> semishared base prune --hosts {machine}; or migrate VMs away
device-full: Has each device of the pool room?
    warning: device {path} is {percent} % full: {free} are free -> semishared pool rebalance {machine}
disk-larger: Can each disk grow as far as its guest may write?
    warning: disk {disk} of VM {vm} may grow to {size}, and {where} has {total} in all
    -> semishared pool list {machine}: give it a larger device (docs/how-to/pool-devices.md), or migrate the
    VM away
[host]  A host as oned has it, or what it answers.
host-build: Has it the front-end's build?
    broken: {error} -> onehost sync --force
host-health: Is all well there, as its monitoring says?
    warning: its monitoring says: {error} -> semishared doctor
fence-begun: Has its fence ended?
    broken: its fencing was begun and did not end: it may still write -> semishared fence {machine}
[datastore]  A datastore.
attributes-lost: Has it all that it said?
    broken: datastore {store} ({name}) has lost {lost}, as by Update in Sunstone -> semishared doctor --fix
"""
"""As doctor's (checks.py): `[facts]`, then rows `name: question`, `severity: message -> command`."""
KINDS: dict[str, Check] = {check.name: check for checks in rows(CATALOGUE).values() for check in checks}
IN_DOCTOR = frozenset(
    (
        "record-unreadable",
        "system-unreadable",
        "disk-full",
        "disk-larger",
        "host-build",
        "host-health",
        "fence-begun",
        "attributes-lost",
    )
)
"""Kinds that doctor finds by checks of its own; and disks that may fill a device, which is no fault yet."""
VERIFIED_S = 30 * 86400
"""Seconds for which a base need not be read."""
UNCOMMITTED_S = 86400
"""Seconds for which what a guest has written may be on its host alone: a disk that is written has some."""
FULL_PERCENT = 90
OURS = re.compile(r"\bSS\d{3}\b.*", re.DOTALL)
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC")


class Item(NamedTuple):
    """One thing that waits for an operator."""

    kind: str
    severity: int
    machine: str
    """Where it is: oned's name of a host, or the front-end."""
    what: str
    """One line."""
    since: str
    """When it began, '' if that is unknown."""
    command: str


class Machine(NamedTuple):
    """What a machine has answered."""

    name: str
    reported: Sequence[Reported] = ()
    listed: Sequence[Listed] = ()
    devices: Sequence[PoolDevice] = ()
    paused: Sequence[PausedGuest] = ()
    jobs: Sequence[Job] = ()
    """What it moves now: no item, but a metric."""


class Facts(NamedTuple):
    """What is known of a cloud."""

    front_end: str
    now: float
    stamp: Callable[[float], str]
    """Seconds since the epoch as a time to be shown."""
    vms: Mapping[int, Vm] = {}
    """All but those that are gone: whole, of those that `in_question` names."""
    images: Mapping[int, Image] = {}
    hosts: Sequence[Host] = ()
    machines: Sequence[Machine] = ()
    since: Mapping[int, float] = {}
    """When uncommitted content of a VM was first seen."""
    outdated: Mapping[str, str] = {}
    """Hosts with another build, and what they said."""
    marks: Mapping[str, Mark] = {}
    lost: Sequence[tuple[Datastore, Mapping[str, str]]] = ()


def item(kind: str, machine: str, about: Mapping[str, object] = {}, since: str = "") -> Item:
    """Return an item by its row; `about`: what stands in its braces."""
    check, fields = KINDS[kind], {"machine": machine, **about}
    what, command = check.what.format(**fields), check.mend.format(**fields)
    return Item(kind, check.severity, machine, " ".join(what.split()), since, command)


def in_question(vms: Sequence[Vm], machines: Sequence[Machine]) -> list[int]:
    """Return the VMs of which oned has to be asked all: the pool has neither errors nor times of them."""
    found = {vm.id for vm in vms if has_failed(vm)}
    for machine in machines:
        found |= {vm.vm for vm, _, _ in _uncommitted(machine)}
        found.update(*map(_reread, _bases(machine)))
    return sorted(found & {vm.id for vm in vms})


def has_failed(vm: Vm) -> bool:
    """Tell whether a VM waits for `onevm recover`."""
    return vm.has_failed or vm.state == VmState.CLONING_FAILURE


def items(facts: Facts) -> list[Item]:
    """Return what waits for an operator, the worst first."""
    found = [*_of_vms(facts), *_of_hosts(facts), *_of_datastores(facts)]
    for machine in facts.machines:
        found += [*_of_guests(machine), *_of_disks(facts, machine)]
        found += [*_of_bases(facts, machine), *_of_room(facts, machine), *_of_large(machine)]
    return sorted(dict.fromkeys(found), key=lambda it: (-it.severity, it.machine, it.kind, it.what))


# -- VMs ----------------------------------------------------------------------------------------------


def _of_vms(facts: Facts) -> Iterator[Item]:
    for vm in facts.vms.values():
        error, since = our_error(vm)
        if error and has_failed(vm):
            state = name_of(vm.lcm_state, LcmState) if vm.is_active else name_of(vm.state)
            about = {"vm": vm.id, "name": vm.name, "state": state, "error": error}
            yield item("vm-failed", vm.host or facts.front_end, about, since)


def our_error(vm: Vm) -> tuple[str, str]:
    """Return the error of ours that a VM has, with what its class says to do, and its time; '' for none."""
    last = vm.text("USER_TEMPLATE/SEMISHARED/LAST_ERROR")
    for text in (vm.text("USER_TEMPLATE/ERROR"), last):
        match = OURS.search(text)
        if match:
            line = " ".join(match.group().split())
            known, stamp = from_id(line[:5], line), STAMP.match(last)
            if known.id == line[:5] and known.remedy not in line:
                line = f"{line}; {known.remedy}"  # oned has cut it off
            return line, stamp.group() if stamp else ""
    return "", ""


def _of_guests(machine: Machine) -> Iterator[Item]:
    for guest in machine.paused:
        full = ": there was no room for what it wrote" if guest.full else ""
        room = f"semishared base prune --hosts {machine.name}; then " if guest.full else ""
        yield item("guest-paused", machine.name, {"guest": _word(guest.name), "full": full, "room": room})


# -- disks --------------------------------------------------------------------------------------------


def _of_disks(facts: Facts, machine: Machine) -> Iterator[Item]:
    for reported in machine.reported:
        for kept in reported.kept:
            yield _kept(facts, machine, kept)
        for error in reported.errors:
            yield item("system-unreadable", machine.name, {"error": error})
        for vm in reported.vms:
            for error in dict.fromkeys([*vm.wrong.values()] or [vm.error] * bool(vm.error)):
                yield item("record-unreadable", machine.name, {"vm": vm.vm, "error": error})
    for told, disk, size in _uncommitted(machine):
        known = facts.vms.get(told.vm)
        since = facts.since.get(told.vm, 0.0)
        # Of a VM that was never published, its own age is all that is known.
        began = since or (known.number("STIME", 0) if known else 0)
        if known and 0 < began <= facts.now - UNCOMMITTED_S:
            about = {"vm": told.vm, "name": known.name, "disk": disk, "size": human(size)}
            yield item("disk-uncommitted", machine.name, about, facts.stamp(since) if since else "")


def _uncommitted(machine: Machine) -> Iterator[tuple[ReportedVm, int, int]]:
    """Yield VMs with the disks that have what their images have not, and how many bytes."""
    for reported in machine.reported:
        for vm in reported.vms:
            for disk in vm.disks:
                if disk.uncommitted:
                    yield vm, disk.disk, disk.uncommitted


def _kept(facts: Facts, machine: Machine, kept: KeptDisk) -> Item:
    name = kept.path.rpartition("/")[2]
    # The word is to be copied into a shell, and a host has named it.
    word = name if disk_names.beside_named(name) else "NAME"
    number = kept.image.get("id") if isinstance(kept.image, dict) else None
    image = facts.images.get(number) if type(number) is int else None
    is_open = image is not None and image.is_persistent and not image.vms - {kept.vm}
    about = {"vm": kept.vm, "disk": kept.disk, "image": "?" if number is None else number, "word": word}
    # A host knows the image from the record alone.
    error = kept.error or ("" if kept.image else "no record says of which image it is")
    if error:
        return item("disk-kept-unreadable", machine.name, {**about, "error": error, "path": _path(kept.path)})
    as_new = "" if is_open else " --as-new-image NEW"
    return item("disk-kept", machine.name, {**about, "size": human(kept.bytes), "as_new": as_new})


# -- bases and room -----------------------------------------------------------------------------------


def _bases(machine: Machine) -> Iterator[HeldBase]:
    for listed in machine.listed:
        yield from listed.bases


def _of_bases(facts: Facts, machine: Machine) -> Iterator[Item]:
    old: list[HeldBase] = []
    for base in _bases(machine):
        said = base_names.named(base.name)
        if said is None:
            continue
        about = {"image": said.image, "generation": said.generation[:8]}
        if base.damaged:
            yield item("base-damaged", machine.name, about)
            continue
        for vm in sorted(_reread(base)):
            known = facts.vms.get(vm)
            if known and _runs_since_before(known, machine.name, base.mended):
                more = {**about, "vm": vm, "name": known.name}
                yield item("base-mended", machine.name, more, facts.stamp(base.mended))
        if max(base.verified, base.staged) < facts.now - VERIFIED_S:
            old.append(base)
    if old:
        since = min(max(base.verified, base.staged) for base in old)
        size = human(sum(base.bytes for base in old))
        about = {"count": len(old), "days": VERIFIED_S // 86400, "size": size}
        yield item("bases-unverified", machine.name, about, facts.stamp(since))


def _reread(base: HeldBase) -> set[int]:
    """Return the VMs that had leases when the base was mended, and have them still."""
    held = set(base.reread) & set(base.leases) if base.mended else set()
    return {found[0] for found in map(base_names.leased_to, held) if found}


def _runs_since_before(vm: Vm, machine: str, when: float) -> bool:
    """Tell whether the guest of a VM is the one of before a time: each start, and each move, opens anew."""
    began = max(vm.number(f"HISTORY_RECORDS/HISTORY[last()]/{name}", 0) for name in ("STIME", "RSTIME"))
    return vm.is_active and vm.host == machine and began < when


def _of_room(facts: Facts, machine: Machine) -> Iterator[Item]:
    for host in facts.hosts:
        if host.name == machine.name:
            pool = [device for device in machine.devices if device.total and not device.state]
            for device in pool:
                if _is_full(device.total, device.free):
                    about = {"path": device.path, **_room(device.total, device.free)}
                    yield item("device-full", machine.name, about)
            # On a host with a pool what the bases' step says is the sum of that.
            own = [(listed.total, listed.free) for listed in machine.listed[:1]]
            sizes = [_told(host)] if pool else own
            for total, free in sizes:
                if _is_full(total, free):
                    yield item("disk-full", machine.name, _room(total, free))


def _of_large(machine: Machine) -> Iterator[Item]:
    """Yield disks that are larger than what they lie on: thin ones, which grow as their guests write."""
    totals = {device.path: device.total for device in machine.devices if device.total and not device.state}
    own = 0 if totals else max((listed.total for listed in machine.listed), default=0)
    for reported in machine.reported:
        for vm in reported.vms:
            for disk in vm.disks:
                total = totals.get(disk.device, 0) if disk.device else own
                if 0 < total < disk.size:
                    where = f"device {disk.device}" if disk.device else "its host's disk"
                    about = {"vm": vm.vm, "disk": disk.disk, "size": human(disk.size)}
                    yield item("disk-larger", machine.name, {**about, "where": where, "total": human(total)})


def _told(host: Host) -> tuple[int, int]:
    """Return total and free bytes of a host's own disk, as its monitoring has told them last."""
    total, free = (host.number(f"TEMPLATE/SEMISHARED/{name}_MB", 0) for name in ("TOTAL", "FREE"))
    return total << 20, free << 20


def _is_full(total: int, free: int) -> bool:
    return total > 0 and (total - free) * 100 >= total * FULL_PERCENT


def _room(total: int, free: int) -> dict[str, object]:
    return {"percent": (total - free) * 100 // total, "free": human(free)}


# -- hosts and datastores -----------------------------------------------------------------------------


def _of_hosts(facts: Facts) -> Iterator[Item]:
    for machine, error in facts.outdated.items():
        yield item("host-build", machine, {"error": f"{HostOutdated.id} {error}"})
    for host in facts.hosts:
        health = host.attribute("HEALTH_SEMISHARED")
        if health not in ("", "OK"):
            yield item("host-health", host.name, {"error": health})
        mark = facts.marks.get(host.name, Mark())
        if mark.state == BEGUN and not mark.strange:
            yield item("fence-begun", host.name, since=facts.stamp(mark.since) if mark.since else "")


def _of_datastores(facts: Facts) -> Iterator[Item]:
    for store, lost in facts.lost:
        if lost:
            names = ", ".join(sorted(name for name in lost if rows_lost.is_name(name)))
            yield item(
                "attributes-lost", facts.front_end, {"store": store.id, "name": store.name, "lost": names}
            )


def _word(text: str) -> str:
    """Return a guest's name as it may stand in a command; a host says it."""
    return text if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) else "GUEST"


def _path(text: str) -> str:
    """Return a path in the same way."""
    return text if re.fullmatch(r"[A-Za-z0-9._/-]{1,400}", text) else "PATH"
