# SPDX-License-Identifier: Apache-2.0
"""Live migration: what lies on a shared store stays there, what is local goes along.

                   source                          target
premigrate         records are read                there is room, and a base for each overlay;
                                                   and disks on the network are within reach
                   every store is probed  ----->   and seen to be the same
                   local disks get deltas
                   the directory is read  ----->   VM directory with leases, and new deltas
(vmm/migrate)      libvirt moves the guest, and what it has written to its deltas
postmigrate        directory removed               deltas merged
failmigrate        deltas merged                   directory removed
each removal only where the domain is known not to run.

A VM that stays on its host changes its system datastore: plan/vm/datastore_change.py.

oned may not call failmigrate: so premigrate undoes what it did, and every later action on the disks begins
with what it finds (disk/recovery.py).

And the options of kvmrc and semishared.conf in libvirt's terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping, Sequence, Union

from ...errors import (
    BadArguments,
    BadAttribute,
    MigrationRefused,
    NotSupported,
    SameDirectory,
    SemisharedError,
)
from ...model import steps as s
from ...model.exchange import End, On, Part, Plan, Relay, Say, agree, ask, warn
from ...model.vm.live_steps import MigrateOptions
from ...named import NamedTuple
from ...opennebula.args import Migrate, VmPlace
from ...opennebula.xml import Vm
from ..disk.disks import DRIVER, running_domain
from . import checklist

if TYPE_CHECKING:
    # Every action imports the plans of all.
    from ...model.disk.acquired import Given
    from .checklist import Luggage


def premigrate(asked: Migrate, vm: Vm, token: str, given: Mapping[int, Given], address: str = "") -> Plan:
    """Plan premigrate: make the target ready, or refuse. `given`: the disks that oned has given the VM.

    `token`: a text that no other process would write into a store. `address`: where the target takes bulk
    data.
    """
    from ...model.disk import acquired
    from ...model.disk.record import described
    from .checklist import of_others, packed

    if asked.source_host == asked.target.host:
        from . import datastore_change

        yield from datastore_change.premigrate(asked, vm)
        return
    place, here = asked.target, asked.source_host
    left = vm.system_datastores[-1] if vm.system_datastores else -1
    source_dir = f"{place.datastore_location}/{left}/{place.vm}"
    yield agree(here)
    yield agree(place.host)
    seen: s.MarkedVm
    machine: s.GuestMachine
    found, seen, machine = yield On(
        here,
        (
            s.DescribeVm(place.vm, source_dir),
            s.LookAtVm(place.vm, source_dir),
            s.SeeMachine(place.vm, source_dir, running_domain(vm)),
        ),
    )
    if int(place.path.split("/")[-2]) != left:
        raise MigrationRefused(f"VM {vm.id} cannot change host and system datastore at once")
    opened: Mapping[str, s.OpenedDisk] = {}
    records = acquired.records(described(found), given, vm.id)
    if of_others(vm, records):
        opened = yield from ask(here, s.LookAtGuest(vm.id, source_dir, running_domain(vm)))
    luggage = packed(vm, records, place.path, opened)
    if luggage.stores or luggage.places:
        yield from _same_stores(here, place.host, luggage, token)
    fits = checklist.can_run(vm, machine)
    yield On(place.host, (*fits, *luggage.network, checklist.room_for_arrival(place, seen), *luggage.bases))
    try:
        wanted = {record.disk: record.classes for record in records if record.classes}
        took = yield from _brought(asked, vm, source_dir, luggage, wanted, seen.sizes)
        proof = (luggage.stores, took, luggage.files, address)
        yield On(here, (s.AllowMigration(place.vm, source_dir, place.host, *proof),))
    except SemisharedError:
        yield from _undone(asked, vm, source_dir)
        raise


def _brought(
    asked: Migrate,
    vm: Vm,
    source_dir: str,
    luggage: Luggage,
    classes: Mapping[int, Sequence[str]],
    sizes: dict[str, int],
) -> Part[str]:
    """Have the VM's directory at the target, with what its guest has written until now; return what that
    took, '' for nothing.

    `classes`: of devices, for the disks that want some. `sizes`: the bytes that come with each disk, by its
    number.
    """
    place, here, domain = asked.target, asked.source_host, running_domain(vm)
    same, unmark = yield from _one_directory(here, place.host, vm.id, source_dir, place.path)
    if same:
        yield On(here, (unmark,))
        if luggage.own:
            raise SameDirectory(f"{source_dir} on {here} and {place.path} on {place.host} are one directory")
        return ""
    if luggage.own:
        yield On(here, (s.AddDeltas(vm.id, source_dir, domain, luggage.own),))
    ids = tuple(sorted(disk.id for disk in vm.disks))
    foreign = tuple(sorted(disk.id for disk in vm.disks if disk.driver not in ("", DRIVER)))
    receive = s.ReceiveVm(vm.id, place.path, True, domain, ids, foreign, luggage.own, sizes=sizes)
    if classes:
        from ..device import choose

        receive = receive._replace(wants=choose.travelling(vm, classes, more=1))
    send = s.SendVm(vm.id, source_dir, unmark.token, luggage.own, domain)
    sent: s.SentVm = yield Relay(On(here, (send,)), On(place.host, (receive,)), checklist.most_bytes(vm))
    yield End(place.host, sent.sha256)
    return f"{sent.bytes >> 20} MiB of files in {sent.seconds} s"


def _undone(asked: Migrate, vm: Vm, source_dir: str) -> Plan:
    """Undo premigrate, as far as possible."""
    place, here = asked.target, asked.source_host
    try:
        yield On(here, (s.MergeDeltas(vm.id, source_dir, running_domain(vm)),))
        yield from _clear(place.host, here, place, vm, brought=True)
    except SemisharedError as e:
        yield warn(f"not all that was made ready for VM {vm.id} on {place.host} is undone: {e.detail}")


def _same_stores(source: str, target: str, luggage: Luggage, token: str) -> Plan:
    """Check that both hosts have the same stores, and the same directories of other drivers."""
    text, answer = f"{token} {source}", f"{token} {target}"
    places = [(store, True) for store in luggage.stores] + [(place, False) for place in luggage.places]
    written: list[s.WrittenProbe] = yield On(
        source, tuple(s.WriteProbe(place, text, side) for place, side in places)
    )
    probes = [(place, found.name) for (place, _), found in zip(places, written)]
    checks = tuple(s.CheckProbe(place, name, answer) for place, name in probes)
    try:
        yield On(target, tuple(s.AnswerProbe(place, name, text, answer) for place, name in probes))
    except SemisharedError:
        for check in checks:
            try:
                # The source finds no answer, and removes the probe.
                yield On(source, (check,))
            except SemisharedError:
                pass
        raise
    yield On(source, checks)


def postmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan postmigrate: remove what is left at the source, and merge what the guest has written meanwhile."""
    place = asked.target
    if asked.source_host == place.host:
        from . import datastore_change

        yield from datastore_change.postmigrate(asked, vm)
        return
    yield from _ended(asked.source_host, place.host, place.path, place, vm, brought=False)


def failmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan failmigrate: remove what was made at the target, and merge the guest's deltas."""
    place = asked.target
    if asked.source_host == place.host:
        from . import datastore_change

        yield from datastore_change.failmigrate(asked, vm)
    else:
        left = vm.system_datastores[-1] if vm.system_datastores else -1
        yield from _ended(
            place.host,
            asked.source_host,
            f"{place.datastore_location}/{left}/{vm.id}",
            place,
            vm,
            brought=True,
        )


def _ended(left: str, runs: str, vm_dir: str, place: VmPlace, vm: Vm, *, brought: bool) -> Plan:
    """Clear the host that is `left`, and merge deltas where the guest `runs`, which does not depend on that:
    it may be lost.
    """
    lost: SemisharedError | None = None
    try:
        yield from _clear(left, runs, place, vm, brought=brought)
    except SemisharedError as e:
        lost = e
    yield On(runs, (s.MergeDeltas(vm.id, vm_dir, running_domain(vm)),))
    if lost:
        raise lost


def _one_directory(
    host: str, other: str, vm: int, path: str, other_path: str
) -> Part[tuple[bool, s.UnmarkVm]]:
    """Return whether both hosts share the VM's directory; it is marked on `host` until UnmarkVm."""
    marked = yield from ask(host, s.MarkVm(vm, path))
    unmark = s.UnmarkVm(vm, path, marked.token)
    try:
        looked = yield from ask(other, s.LookForVm(vm, other_path, unmark.token, marked.seen))
    except SemisharedError:
        yield On(host, (unmark,))
        raise
    return looked.same, unmark


def _clear(host: str, other: str, place: VmPlace, vm: Vm, *, brought: bool) -> Plan:
    """Remove the VM's directory on `host`, unless the VM runs there, or `other` has that very directory.

    Nor is anything removed but what this migration has `brought` there, or has come from.
    """
    not_running = s.CheckNotRunning(running_domain(vm))
    found = yield from ask(host, s.LookAtVm(vm.id, place.path), after=(not_running,))
    before: tuple[s.Step, ...] = (not_running,)
    if host != other:
        yield agree(other)
    if found.present and host != other:
        same, unmark = yield from _one_directory(host, other, vm.id, place.path, place.path)
        if same:
            yield On(host, (unmark,))
            yield warn(f"{place.path} is one directory on {host} and {other}: nothing was removed")
            return
        before = (unmark, not_running)
    cleared = yield from ask(host, s.ClearVm(vm.id, place.path, vm.seq, brought), before)
    yield Say(s.why_kept, (place.path, host, cleared))


# The options of a live migration in libvirt's terms.
#
# kvmrc's MIGRATE_OPTIONS are words of `virsh migrate`, [migration] of semishared.conf are ours. What only one
# of the two says holds; where both say something of the same, they have to agree.
#
# Names of flags and parameters are those of libvirt's constants without VIR_MIGRATE_ and VIR_MIGRATE_PARAM_.


Value = Union[int, str, "list[str]"]
FLAGS = {
    "--live": "LIVE",
    "--offline": "OFFLINE",
    "--p2p": "PEER2PEER",
    "--tunnelled": "TUNNELLED",
    "--persistent": "PERSIST_DEST",
    "--undefinesource": "UNDEFINE_SOURCE",
    "--suspend": "PAUSED",
    "--change-protection": "CHANGE_PROTECTION",
    "--unsafe": "UNSAFE",
    "--compressed": "COMPRESSED",
    "--auto-converge": "AUTO_CONVERGE",
    "--rdma-pin-all": "RDMA_PIN_ALL",
    "--abort-on-error": "ABORT_ON_ERROR",
    "--postcopy": "POSTCOPY",
    "--postcopy-resume": "POSTCOPY_RESUME",
    "--parallel": "PARALLEL",
    "--tls": "TLS",
    "--zerocopy": "ZEROCOPY",
}
NUMBERS = {
    "--bandwidth": "BANDWIDTH",
    "--postcopy-bandwidth": "BANDWIDTH_POSTCOPY",
    "--parallel-connections": "PARALLEL_CONNECTIONS",
    "--auto-converge-initial": "AUTO_CONVERGE_INITIAL",
    "--auto-converge-increment": "AUTO_CONVERGE_INCREMENT",
    "--comp-mt-level": "COMPRESSION_MT_LEVEL",
    "--comp-mt-threads": "COMPRESSION_MT_THREADS",
    "--comp-mt-dthreads": "COMPRESSION_MT_DTHREADS",
    "--comp-xbzrle-cache": "COMPRESSION_XBZRLE_CACHE",
}
TEXTS = {
    "--migrateuri": "URI",
    "--graphicsuri": "GRAPHICS_URI",
    "--listen-address": "LISTEN_ADDRESS",
    "--tls-destination": "TLS_DESTINATION",
}
IGNORED = ("--verbose",)
"""Words without effect: no terminal shows their output."""


def parsed(words: list[str]) -> MigrateOptions:
    """Return what words of `virsh migrate` mean; raise NotSupported, BadArguments."""
    flags: dict[str, None] = {}
    values: dict[str, Value] = {}
    found = MigrateOptions()
    rest = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while rest:
        word = rest.pop(0)
        if word in FLAGS:
            flags[FLAGS[word]] = None
        elif word in NUMBERS:
            values[NUMBERS[word]] = _number(word, rest)
        elif word in TEXTS:
            values[TEXTS[word]] = _text(word, rest)
        elif word == "--comp-methods":
            values["COMPRESSION"] = _text(word, rest).split(",")
        elif word == "--timeout":
            found = found._replace(limit_s=_number(word, rest))
        elif word in ("--timeout-suspend", "--timeout-postcopy"):
            found = found._replace(at_limit=word.rpartition("-")[2])
        elif word == "--postcopy-after-precopy":
            found = found._replace(after_precopy=True)
        elif word not in IGNORED:
            raise NotSupported(f"MIGRATE_OPTIONS of kvmrc contains {word}, which semishared has no use for")
    return found._replace(flags=tuple(flags), values=values)


class Settings(NamedTuple):
    """[migration] of semishared.conf (config.py); by default it says nothing."""

    rate: int = 0
    """Bytes per second."""
    downtime_ms: int = 0
    auto_converge: str = "no"
    timeout_s: int = 0
    at_timeout: str = "abort"


def with_settings(options: MigrateOptions, settings: Settings) -> MigrateOptions:
    """Return the options with what [migration] says; raise BadAttribute if kvmrc says otherwise."""
    flags, values, rate = list(options.flags), dict(options.values), settings.rate >> 20
    at_limit = settings.at_timeout.replace("-", "")
    if rate:
        _agreed("--bandwidth", values.get("BANDWIDTH", rate), "rate", rate)
        values["BANDWIDTH"] = rate
    if settings.auto_converge == "yes":
        flags.append("AUTO_CONVERGE")
    if settings.timeout_s:
        said = (options.limit_s, options.at_limit) if options.limit_s else (settings.timeout_s, at_limit)
        _agreed("--timeout", "{} ({})".format(*said), "timeout_s", f"{settings.timeout_s} ({at_limit})")
        options = options._replace(limit_s=settings.timeout_s, at_limit=at_limit)
        if at_limit == "postcopy":
            flags.append("POSTCOPY")
    if rate and "POSTCOPY" in flags:
        values.setdefault("BANDWIDTH_POSTCOPY", rate)
    return options._replace(
        flags=tuple(dict.fromkeys(flags)), values=values, downtime_ms=settings.downtime_ms, memory_mib_s=rate
    )


def _agreed(word: str, said: object, key: str, wanted: object) -> None:
    if said != wanted:
        raise BadAttribute(
            f"MIGRATE_OPTIONS of kvmrc has {word} {said}, [migration] of semishared.conf {key} = "
            f"{wanted}: only one of them can hold"
        )


def with_disks(options: MigrateOptions, targets: list[str]) -> MigrateOptions:
    """Return the options by which libvirt copies the active layers of these disks, and no others."""
    if not targets:
        return options
    values = {**options.values, "MIGRATE_DISKS": targets}
    if options.memory_mib_s:
        # libvirt lets each disk take that much, all at once.
        values["BANDWIDTH"] = max(1, options.memory_mib_s // len(targets))
    return options._replace(flags=(*options.flags, "NON_SHARED_INC"), values=values)


def with_address(options: MigrateOptions, host: str, address: str) -> MigrateOptions:
    """Return the options by which memory and disks go to this address of the target, '' for to its name.

    What kvmrc says of addresses comes first; tunnelled, all goes where libvirtd is.
    """
    if not address or "URI" in options.values or "TUNNELLED" in options.flags:
        return options
    at = f"[{address}]" if ":" in address else address
    values: dict[str, Value] = {"LISTEN_ADDRESS": address, **options.values, "URI": f"tcp://{at}"}
    if "TLS" in options.flags:
        values.setdefault("TLS_DESTINATION", host)  # certificates have names
    return options._replace(values=values)


def _text(word: str, rest: list[str]) -> str:
    if not rest:
        raise BadArguments(f"MIGRATE_OPTIONS of kvmrc: nothing follows {word}")
    return rest.pop(0)


def _number(word: str, rest: list[str]) -> int:
    text = _text(word, rest)
    if not (text.isascii() and text.isdigit()):
        raise BadArguments(f"MIGRATE_OPTIONS of kvmrc: {word} is {text!r}")
    return int(text)
