# SPDX-License-Identifier: Apache-2.0
"""Plans of the hypervisor actions for VMs with a record: what must differ, then the stock script.

All of it happens on the VM's host. Its process becomes the stock script instead of calling it: the script's
output and exit code are what OpenNebula gets.

Why the other actions that see a disk are plain forwarders:

    resize_disk               addresses the disk by its target (vda), never by its path
    snapshot_delete           libvirt keeps system snapshots inside the disks, whatever those are called

Nothing is planned for them.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Optional

from ...errors import BadArguments, BadRecord, NotSupported, SemisharedError
from ...model.disk import names as disk_names
from ...model.disk.record import Record, described
from ...model.exchange import Here, Part, Plan, here, warn
from ...model.vm import hypervisor_steps as h
from ...named import NamedTuple
from ..libvirt.domain import (
    DRIVER,
    Chain,
    Chains,
    Domain,
    Limits,
    Records,
    chain_of,
    check_system_snapshot,
    disk_number,
    disks_of_ours,
    io_limits,
)

if TYPE_CHECKING:
    from ...opennebula.args import Subject


def over_copy(vm_dir: str, record: Record, chain: Chain) -> Part[Chain]:
    """Return what a disk lies over, with the copy in memory in the place of its base, if there is one.

    A guest that starts reads its base from the memory of its host (device/hot.py).
    """
    if not chain:
        return chain
    (lease, format), above = chain[-1], chain[:-1]
    copy = yield from here(h.HoldHot(vm_dir, record, str(lease)))
    return [*above, (copy, format)] if copy else chain


class Asked(NamedTuple):
    """What OpenNebula gives a hypervisor action; `stdin` is b'' for one that does not look at it."""

    action: str
    argv: tuple[str, ...]
    stdin: bytes = b""

    def at_least(self, count: int) -> None:
        """Raise BadArguments unless there are so many arguments."""
        if len(self.argv) < count:
            raise BadArguments(f"{len(self.argv)} arguments where at least {count} belong")

    @property
    def vm_dir(self) -> str:
        """Return the VM's directory as oned spells it; raise BadArguments."""
        if self.action in ON_STDIN:
            from ...opennebula.args import absolute, number
            from ...opennebula.xml import View, parse

            self.at_least(4)
            location = View(parse(self.stdin, "VMM_DRIVER_ACTION_DATA")).text("DATASTORE/BASE_PATH")
            vm = self.argv[3] if self.action == "migrate" else self.argv[-2]
            return absolute(f"{location}/{number(vm, 'VM id')}", "VM directory")
        at = 1 if self.action in ("attach_disk", "detach_disk", "save") else 0
        self.at_least(at + 1)
        return posixpath.dirname(self.argv[at])

    def subject(self, known: Mapping[str, str]) -> Subject | None:
        """Return what the action is about, None if its words do not say; `known`: what is at paths."""
        from ...opennebula.args import Subject

        try:
            vm = posixpath.basename(self.vm_dir)
        except BadArguments:
            return None
        if not vm.isascii() or not vm.isdigit():
            return None
        names = {**known, **dict.fromkeys((self.vm_dir, posixpath.normpath(self.vm_dir)), f"VM {vm}")}
        return Subject(f"VM {vm}", int(vm), names)


def planned(asked: Asked) -> Plan:
    """Return the plan of an action for a VM with records; raise BadArguments for a forwarded one."""
    if asked.action not in PLANNERS:
        raise BadArguments(f"{asked.action!r} is none of {', '.join(PLANNERS)}")
    return PLANNERS[asked.action](asked)


def forwarded(asked: Asked) -> Plan:
    """Plan the same for a VM without a record: our forwarders become the stock script at once."""
    yield from _stock(asked)


def _stock(asked: Asked, stdin: bytes = b"") -> Plan:
    yield Here(h.BecomeStock(asked.action, asked.argv, stdin.decode()))


def deploy(asked: Asked) -> Plan:
    """Boot the VM whose domain XML is on stdin, with its disks where and what their records say."""
    vm_dir = asked.vm_dir
    yield from _not_overtaken(vm_dir)
    told = yield from _told_by_oned(vm_dir)
    ours = None if told is None else disks_of_ours(told)
    domain = Domain(asked.stdin, vm_dir, ours)
    if domain.has_unknown:
        raise BadRecord(f"which disks of {vm_dir} are on Ceph cannot be told without vm.xml")
    found = yield from here(h.ReadRecords(vm_dir, tuple(domain.disk_numbers)))
    records: Records = {record.disk: record for record in described(found)}
    # oned's format may be wrong for it, and a qcow2 overlay taken for raw is destroyed by its guest.
    _refuse_unrecorded(vm_dir, set(ours or ()) & set(domain.disk_numbers) - set(records))
    if records:
        check_versions((yield from here(h.SeeVersions())))
    if (yield from _settled(vm_dir)):
        records = yield from _recorded(vm_dir, tuple(domain.disk_numbers))
    if found.marked:
        yield Here(h.TidyMarks(vm_dir))
    for record in records.values():
        yield Here(h.CheckDisk(vm_dir, record))
    chains = yield from _chains(domain.sources(records), records, vm_dir)
    limits = yield from _io_limits(records)
    text = domain.with_records(records, chains, limits)
    if DIRECTORY in text or (told and SHARE in told):
        text = yield from _given_shares(vm_dir, text, told)
    yield from _stock(asked, text)


FLOORS = {
    "QEMU": (5, 2),  # extended_l2 of qcow2 (docs/explanation/overlay-options.md)
    "libvirt": (7, 0),  # the oldest that a guest of ours has run under: Debian 11's
}
"""The oldest of each that starts guests of ours."""


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def check_versions(found: Mapping[str, str]) -> None:
    """Raise NotSupported if a host's QEMU or libvirt is too old; what is unknown is not judged."""
    for name, floor in FLOORS.items():
        if found.get(name) and version(found[name]) < floor:
            oldest = ".".join(map(str, floor))
            raise NotSupported(
                f"{name} {found[name]} is older than {oldest}: no VM of ours starts on this host. "
                f"Update it, or deploy the VM to another host"
            )


def attach_disk(asked: Asked) -> Plan:
    """Attach a disk to a running VM under the name and format that deploy would give it."""
    from ...opennebula.values import decode
    from ..libvirt.domain import AttachMessage

    asked.at_least(MESSAGE + 1)
    vm_dir, path = asked.vm_dir, asked.argv[1]
    number = disk_number(path, vm_dir)
    message = AttachMessage(decode(asked.argv[MESSAGE].encode()))
    if number is None or number != message.number:
        raise BadArguments(f"{path} is not disk {message.number} of the driver message")
    record = (yield from _recorded(vm_dir, (number,))).get(number)
    if record is None:
        _refuse_unrecorded(vm_dir, {number} if message.is_ours else ())
        yield from _stock(asked)
        return
    if record.over:
        raise NotSupported(
            f"disk {number} (remote-first) reads from Ceph, and OpenNebula's script has no words "
            f"for as whom when it attaches to a "
            "running VM: power the VM off before, or attach an image without SEMISHARED_LOCAL = remote-first"
        )
    source = record.source(path)
    yield Here(h.CheckDisk(vm_dir, record))
    # libvirt finds its backing chain, and tells AppArmor; the stock script has no words for it.
    yield from _chains({number: source}, {number: record})
    limits = yield from _io_limits({number: record})
    argv = (asked.argv[0], source, *asked.argv[2:MESSAGE], "", *asked.argv[MESSAGE + 1 :])
    yield Here(
        h.BecomeStock(asked.action, argv, message=message.with_record(record, limits[number]).decode())
    )


def detach_disk(asked: Asked) -> Plan:
    """Detach the disk at target `argv[2]` of the running VM `argv[0]`, or say that it is done.

    The transfer action comes after this one and may fail; oned then has the disk still, and detaches it once
    more.
    """
    asked.at_least(3)
    domain, target = asked.argv[0], asked.argv[2]
    yield from _settled_if_possible(asked.vm_dir, domain)
    try:
        targets = (yield from here(h.ListTargets(domain))) if target else [target]
    except SemisharedError:
        targets = [target]  # nothing is seen: what is wrong is the stock script's to say
    if target not in targets:
        yield warn(f"{domain} has no disk {target} any more: it was detached before")
    else:
        yield from _stock(asked)


def migrate(asked: Asked) -> Plan:
    """Move the running VM to another host; the stock script moves no VM with a disk of ours."""
    from . import live_migration

    move = live_migration.Move.parse(asked.argv, asked.stdin)
    vm_dir = asked.vm_dir
    ours = [disk for disk in move.vm.disks if disk.driver == DRIVER]
    if any(disk.is_directory for disk in ours):
        raise NotSupported(SHARE_STAYS)
    records = yield from _recorded(vm_dir)
    _refuse_unrecorded(vm_dir, {disk.id for disk in ours} - set(records))
    if records:
        yield from live_migration.moved(move, vm_dir, records)
    else:
        yield from _stock(asked)


def restore(asked: Asked) -> Plan:
    """Resume the VM from the checkpoint `argv[0]`, over the layers that are active now, and their chains."""
    yield from _not_overtaken(asked.vm_dir)
    yield from _settled(asked.vm_dir)
    from .checkpoint import Told, check, with_active_layers

    vm_dir, told = asked.vm_dir, Told.parse(asked.stdin)
    records = yield from _recorded(vm_dir)
    # Else the host that wrote the checkpoint would decide what is opened for such a disk.
    _refuse_unrecorded(vm_dir, set(told.ours if told else ()) - set(records))
    xml = (yield from here(h.ReadCheckpoint(asked.argv[0]))) if records else None
    if xml is not None:
        text = xml.encode()
        check(text, records, vm_dir, told)
        named = {
            number: record.source(disk_names.disk(vm_dir, number))
            for number, record in records.items()
            if not record.network
        }
        chains = yield from _chains(named, records, vm_dir)
        changed = with_active_layers(text, records, chains, told.context if told else -1)
        if changed != text:
            yield Here(h.WriteCheckpoint(asked.argv[0], changed.decode()))
    yield from _stock(asked)


def save(asked: Asked) -> Plan:
    """Write the memory of the VM `argv[0]` to the checkpoint `argv[1]`, and end it.

    The checkpoint holds the XML that deploy and attach_disk made, so paths and formats are right. What
    snapshots change while the VM is suspended, and what an attached disk lies over (libvirt does not keep
    what it has found by itself), our restore puts right; the stock one replaces `<datastores>/<n>/<vm>/`
    only, which paths on a shared store never contain.
    """
    asked.at_least(2)
    yield from _settled_if_possible(asked.vm_dir, asked.argv[0])
    yield from _stock(asked)


def snapshot_create(asked: Asked) -> Plan:
    """Do `snapshot_create DEPLOY_ID SNAPSHOT VM_ID HOST` of the whole VM, unless a disk cannot take part."""
    # libvirt puts it into what the guest writes to: of a layer that is there for a while nothing would be
    # left.
    yield from _settled(asked.vm_dir, asked.argv[0])
    check_system_snapshot((yield from _recorded(asked.vm_dir)))
    yield from _stock(asked)


def snapshot_revert(asked: Asked) -> Plan:
    """Do `snapshot_revert DEPLOY_ID SNAPSHOT VM_ID HOST`, with no bitmap in the guest's disks: that would
    end it.
    """
    yield from _settled(asked.vm_dir, asked.argv[0])
    yield Here(h.LoseMarks(asked.vm_dir, asked.argv[0]))
    yield from _stock(asked)


def _settled(vm_dir: str, domain: str = "") -> Part[bool]:
    """End unfinished work on the VM's disks, also of commands unknown to oned; tell if there was any."""
    if not (yield from here(h.SeeNotes(vm_dir))):
        return False
    yield Here(h.Recover(vm_dir, domain))
    return True


def _settled_if_possible(vm_dir: str, domain: str) -> Plan:
    """End it if possible: libvirt can neither save a guest nor detach a disk that is being copied."""
    try:
        yield from _settled(vm_dir, domain)
    except SemisharedError as e:
        yield warn(e.line())


def _told_by_oned(vm_dir: str) -> Part[Optional[bytes]]:
    """Return vm.xml, written just before deploy; without a readable one (None) the records alone count."""
    try:
        text = yield from here(h.ReadVm(vm_dir))
        told = None if text is None else text.encode("utf-8", "surrogateescape")
        disks_of_ours(told or b"<VM/>")
        return told
    except BadArguments as e:
        yield warn(f"vm.xml is of no use: {e}")
        return None


def _given_shares(vm_dir: str, text: bytes, told: Optional[bytes]) -> Part[bytes]:
    """Return the domain XML with the VM's shares; raise BadRecord if it has other directories of ours."""
    from ..libvirt.filesystems import given, shares_of

    shares, programs = None if told is None else shares_of(told), {}
    # This host need not have shares that the guest mounts itself, and must not give them.
    clients = (yield from here(h.ReadClients(vm_dir))) if shares else ()
    for share in shares or ():
        if share.disk not in clients:
            check = h.CheckShare(share.image, share.source, share.readonly, vm_dir)
            programs[share.disk] = yield from here(check)
    return given(text, shares, programs)


def _recorded(vm_dir: str, disks: Optional[tuple[int, ...]] = None) -> Part[Records]:
    found = yield from here(h.ReadRecords(vm_dir, disks))
    return {record.disk: record for record in described(found)}


def _not_overtaken(vm_dir: str) -> Plan:
    """Check that no other host has taken the VM over since."""
    unknown = yield from here(h.CheckEpoch(vm_dir))
    if unknown:
        yield warn(unknown)


def _refuse_unrecorded(vm_dir: str, disks: Iterable[int]) -> None:
    for number in sorted(disks):
        raise BadRecord(f"disk {number} of {vm_dir} has no record")


def _io_limits(records: Records) -> Part[Mapping[int, Limits]]:
    """Return the limits of each disk."""
    of_class = io_limits((yield from here(h.ReadIoLimits()))) if records else {}
    return {number: of_class[record.io_class] for number, record in records.items()}


def _chains(sources: Mapping[int, str], records: Records, vm_dir: str = "") -> Part[Chains]:
    """Return what each of the qcow2 files `sources` lies over; for a guest that starts from `vm_dir` also
    over copies in memory.
    """
    found = {}
    for number, path in sources.items():
        if records[number].format == "qcow2":
            chain = yield from here(h.ReadChain(path, records[number]))
            found[number] = chain_of(records[number], chain)
            if vm_dir and records[number].reads_hot:
                found[number] = yield from over_copy(vm_dir, records[number], found[number])
    return found


SHARE = b"FILESYSTEM"
"""TYPE of a disk that is a directory for the guest."""
DIRECTORY = b"<filesystem"
"""Where the domain XML has one."""
SHARE_STAYS = (
    "a VM with a share does not move while it runs: what its virtiofsd knows of open files would "
    "stay behind, and libvirt refuses it; "
    "power the VM off, migrate it, and resume it"
)

PLANNERS = {
    planner.__name__: planner
    for planner in (
        deploy,
        attach_disk,
        detach_disk,
        migrate,
        restore,
        save,
        snapshot_create,
        snapshot_revert,
    )
}
READ = ("deploy", "migrate", "restore", "snapshot_create", "snapshot_revert")
"""Actions that read stdin."""
ON_STDIN = ("migrate", "snapshot_create", "snapshot_revert")
"""Actions whose VM directory is only in the driver message there."""
MESSAGE = 4
"""The argument of attach_disk that is its driver message, in base64."""
