# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM with a disk of ours: may it move, by which options, which host has it afterwards.

Disks on shared storage stay there, and of local disks libvirt copies deltas alone (guest/go_over.py):
premigrate has brought the rest. The stock script would create empty images over the disks, so every doubt
here is a refusal.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...errors import BadArguments, HostUnreachable, MigrationRefused, NotSupported, SemisharedError
from ...model.disk import names as disk_names
from ...model.exchange import Here, Lines, Part, Plan, Say, here, warn
from ...model.steps import State
from ...model.vm import live_steps as h
from ...named import NamedTuple
from ...opennebula.args import HOST, Location, VmPlace, absolute
from ...opennebula.xml import View, Vm, parse
from ...opennebula.xml_edit import Element, Markup
from ..libvirt.domain import Chain, Records, chain_of, disk_number, lay_over
from .migration import Settings, parsed, with_address, with_disks, with_settings

DEPLOY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*\Z")
PAUSE_S = 5
"""Seconds between two tries, and between two looks at domains that change hands."""
COPIES = ("--copy-storage", "--migrate-disks")
"""Options that would make QEMU write a disk onto itself through the shared store."""


class Move(NamedTuple):
    """The request of `migrate`."""

    domain: str
    target: str
    source: str
    vm: Vm
    auto_converge: str
    compressed: str
    vm_dir: str = ""
    """The VM directory at the target."""

    @classmethod
    def parse(cls, argv: Sequence[str], stdin: bytes) -> Move:
        """Return what `DEPLOY_ID TARGET_HOST SOURCE_HOST VM_ID HOST` and the driver message ask for; raise
        BadArguments.
        """
        if len(argv) < 4 or not DEPLOY_ID.match(argv[0]):
            raise BadArguments(f"not the arguments of migrate: {list(argv)}")
        if not re.match(HOST, argv[1]):
            raise BadArguments(f"not a host name: {argv[1]!r}")
        message = View(parse(stdin, "VMM_DRIVER_ACTION_DATA"))
        vm, features = message.element.find("VM"), "VM/TEMPLATE/FEATURES/MIGRATE_"
        if vm is None:
            raise BadArguments("the driver message has no VM")
        wanted = message.text(f"{features}AUTO_CONVERGE"), message.text(f"{features}COMPRESSED")
        return cls(argv[0], argv[1], argv[2], Vm(vm), *wanted, message.text("DISK_TARGET_PATH"))


def moved(move: Move, vm_dir: str, records: Records) -> Plan:
    """Move a running VM, whose disks have `records`, to another host."""
    domain, host = move.domain, move.target
    seen = yield from here(h.SeeDomain(domain))
    proof = yield from here(h.TakeProof(vm_dir))
    disks = moving(seen.xml.encode(), vm_dir, records, move.vm.context_disk, handed_over(proof, host))
    if move.source == host:
        yield from _copied(move, vm_dir, proof)
        return
    if seen.snapshots:
        raise MigrationRefused(
            f"VM {move.vm.id} has {len(seen.snapshots)} system snapshots, libvirt does not move them"
        )
    if disks.mirrored and not is_proved((), proof, host):
        raise MigrationRefused(
            f"premigrate has made nothing ready on {host} for the local disks of VM {move.vm.id}"
        )
    if isinstance(proof, dict) and proof.get("brought"):
        # oned logs premigrate's own output only if it fails.
        yield Say(_brought, (str(proof["brought"]),))
    proved = is_proved(disks.in_place, proof, host)
    if not proved:
        yield warn(
            f"premigrate has not seen {host} share the disks of VM {move.vm.id}: libvirt decides "
            f"if it is safe"
        )
    site = yield from here(h.ReadSite(host))
    chosen = options(list(site.migrate_options), move.auto_converge, move.compressed, seen.persistent, proved)
    before = State((yield from here(h.SeeState(domain, host))))
    if before is State.UNKNOWN:
        raise HostUnreachable(f"libvirtd of {host} does not answer at {site.target}")
    if before is not State.ABSENT:
        raise MigrationRefused(f"{host} already has a domain {domain} ({before.value})")
    settled = with_settings(parsed(["--live", *chosen]), Settings(**site.migration))
    wanted = with_address(with_disks(settled, disks.mirrored), host, bulk_address(proof))
    chains = yield from _chains(records)
    yield from _handed_over(h.MigrateDomain(domain, host, wanted, chains), site.tries)
    # As the stock script does; success does not depend on it.
    if site.sync_time:
        yield Here(h.SyncTime(domain, host))
    if site.compact_memory:
        yield Here(h.CompactMemory())


def _copied(move: Move, vm_dir: str, proof: object) -> Plan:
    """Have what the guest writes in the copy of its VM directory, which premigrate has made in another
    datastore of this host.
    """
    place = VmPlace.at(Location(move.target, absolute(move.vm_dir, "VM directory")), str(move.vm.id))
    if not is_proved((), proof, move.target) or place.path == vm_dir:
        raise MigrationRefused(f"premigrate has not made VM {move.vm.id} ready for {place.path}")
    yield Here(h.CopyDeltas(place.vm, place.path, vm_dir, move.domain))


def _chains(records: Records) -> Part[dict[str, Chain]]:
    """Return the backing chains of disks with layers, by the paths of their active ones.

    libvirt does not know them: when a layer below the active one is merged, and so replaced, QEMU goes on
    with the files that it had open.
    """
    from ...model.vm.hypervisor_steps import ReadChain

    found: dict[str, Chain] = {}
    for record in records.values():
        if record.format == "qcow2" and record.path and not record.place.is_image:
            chain = yield from here(ReadChain(record.path, record))
            found[record.path] = chain_of(record, chain)
    return found


def arriving(domain: bytes, chains: Mapping[str, Chain]) -> bytes:
    """Return the XML of a domain for the host that it moves to, with disks over what `chains` says."""
    markup = Markup(domain, "domain")
    for disk in markup.root.find("devices", "disk"):
        source = disk.first("source")
        chain = chains.get(_plain(_source(disk)))
        if source is not None and chain is not None:
            lay_over(markup, disk, source, chain)
    return markup.result()


def _handed_over(migrate: h.MigrateDomain, tries: int) -> Plan:
    """Have libvirt move the domain; on failure ask both libvirtds, and clean up only what never ran."""
    for left in range(tries, 0, -1):
        try:
            took = yield from here(migrate)
        except SemisharedError as e:
            if "active block job" in e.detail and left > 1:
                yield Here(h.Wait(PAUSE_S))
                continue
            if not (yield from _has_arrived(migrate.domain, migrate.host)):
                raise
            yield warn(f"libvirt failed after the VM had moved: {e.detail}")
        else:
            yield Say(_told, (migrate.host, took))
        return


def _brought(what: str) -> Lines:
    return [("info", f"premigrate has brought {what}")]


def _told(host: str, took: str) -> Lines:
    return [("info", f"moved to {host}: {took}")] if took else []


def _has_arrived(domain: str, host: str) -> Part[bool]:
    """Find out which host has the domain after a failure; tell whether it is the target after all."""
    for look in range(3):
        if look:
            yield Here(h.Wait(PAUSE_S))
        own = State((yield from here(h.SeeState(domain))))
        there = State((yield from here(h.SeeState(domain, host))))
        found = outcome(own, there)
        if found in (Outcome.MOVED, Outcome.STAYED):
            return found is Outcome.MOVED
    if found is Outcome.IN_DOUBT:
        in_doubt = f"it is {own.value} here and {there.value} on {host}: nothing was cleaned up"
        yield Say(lambda: [("error", in_doubt)])
        return False
    try:
        yield Here(h.RemoveArrival(domain, host, "destroy" if found is Outcome.REMOVE_TARGET else "undefine"))
        removed = "info", f"removed the half-started domain on {host}, which never ran there"
    except SemisharedError as e:
        removed = "warn", f"the half-started domain on {host} is still there: {e.detail}"
    yield Say(lambda: [removed])
    return False


class Moving(NamedTuple):
    """What becomes of a running guest's disks: paths that the target has too, and targets of those that
    libvirt is to mirror.
    """

    in_place: list[str]
    mirrored: list[str]


def moving(
    domain: bytes, vm_dir: str, records: Records, context_disk: int, others: Collection[str] = ()
) -> Moving:
    """Return what is to become of the disks; raise MigrationRefused if one would be left behind.

    `others`: files of other drivers' disks that both hosts are known to see.
    """
    known = {
        absolute(record.path, "path") for record in records.values() if record.path and not record.is_local
    }
    own = {record.path: record for record in records.values() if record.is_local}
    found, mirrored = [], []
    for disk in Markup(domain, "domain").root.find("devices", "disk"):
        path = _source(disk)
        if (
            disk.attributes.get("type") == "network"
            or not path
            or (disk.attributes.get("type") == "file" and path in others)
        ):
            continue
        named = disk_number(path, vm_dir)
        if named is not None and named == context_disk and disk.first("readonly"):
            continue
        plain = _plain(path)
        if plain in own:
            record = own.pop(plain)
            if not disk_names.is_delta(plain):
                raise MigrationRefused(
                    f"disk {record.disk} ({record.how}) lies on this host alone: premigrate has "
                    f"not prepared its move"
                )
            mirrored.append(_target_of(disk))
            continue
        plain = plain if named is None or named not in records else _plain(records[named].path)
        if disk.attributes.get("type") != "file" or plain not in known:
            name = (
                f"disk {named}"
                if named is not None
                else f"disk {_target_of(disk)}"
                if _target_of(disk)
                else "a disk"
            )
            raise MigrationRefused(f"{name} ({path}) is not on a shared store that semishared knows")
        found.append(plain)
    for path, record in own.items():
        raise MigrationRefused(
            f"disk {record.disk} ({record.how}) lies on this host alone, and the guest does not "
            f"have {path} open"
        )
    return Moving(found, mirrored)


def _source(disk: Element) -> str:
    source = disk.first("source")
    attributes = source.attributes if source else {}
    return next(
        (attributes[key] for key in ("file", "dev", "dir", "volume", "name") if attributes.get(key)), ""
    )


def _target_of(disk: Element) -> str:
    target = disk.first("target")
    return target.attributes.get("dev", "") if target else ""


def is_proved(paths: Iterable[str], proof: object, host: str) -> bool:
    """Tell whether `proof` (of premigrate) says that `host` saw the same files as we at all `paths`."""
    if not isinstance(proof, dict) or proof.get("version") != 1 or proof.get("to") != host:
        return False
    checked = proof.get("shared_checked")
    if not isinstance(checked, list) or not all(isinstance(place, str) for place in checked):
        return False
    places = [_parts(place) for place in checked if place.startswith("/")]
    return all(any(place and _parts(path)[: len(place)] == place for place in places) for path in paths)


def handed_over(proof: object, host: str) -> list[str]:
    """Return the files of other drivers' disks of which premigrate has seen that `host` has the same."""
    found = proof.get("foreign") if isinstance(proof, dict) and is_proved((), proof, host) else None
    return [path for path in found if isinstance(path, str)] if isinstance(found, list) else []


def bulk_address(proof: object) -> str:
    """Return where the target takes bulk data, '' for by its name, as premigrate says."""
    found = proof.get("address") if isinstance(proof, dict) else ""
    return found if isinstance(found, str) else ""


def _plain(path: str) -> str:
    return "/" + "/".join(_parts(path))


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def options(
    site: list[str], auto_converge: str, compressed: str, persistent: bool, proved: bool
) -> list[str]:
    """Return the options of `virsh migrate`: the site's, the VM's, ours; raise NotSupported, BadArguments."""
    for option in site:
        if option.startswith(COPIES):
            raise NotSupported(
                f"MIGRATE_OPTIONS of kvmrc contains {option}, which would overwrite disks in place"
            )
    chosen = list(site)
    if auto_converge:
        steps = [step.strip() for step in auto_converge.split(",")]
        if len(steps) > 2 or not all(step.isascii() and step.isdigit() for step in steps):
            raise BadArguments(f"MIGRATE_AUTO_CONVERGE is {auto_converge!r}")
        chosen += ["--auto-converge", "--auto-converge-initial", steps[0]]
        chosen += ["--auto-converge-increment", steps[1]] if len(steps) == 2 else []
    if compressed == "YES":
        chosen.append("--compressed")
    if persistent:
        chosen += ["--persistent", "--undefinesource"]
    if proved and "--unsafe" not in chosen:
        chosen.append("--unsafe")
    return chosen


class Outcome(enum.Enum):
    """Which host has the VM after `virsh migrate` has failed, and what may be cleaned up."""

    MOVED = "moved"
    STAYED = "stayed"
    REMOVE_TARGET = "remove target"
    """It runs here; on the target stands a half-started domain that never ran."""
    UNDEFINE_TARGET = "undefine target"
    IN_DOUBT = "in doubt"


def outcome(source: State, target: State) -> Outcome:
    """Return what both libvirtds' answers mean. Only a VM seen running here allows changes on the target."""
    if source in (State.ABSENT, State.OFF) and target is State.RUNNING:
        return Outcome.MOVED
    if source is not State.RUNNING:
        return Outcome.STAYED if source is State.PAUSED and target is State.ABSENT else Outcome.IN_DOUBT
    return {
        State.ABSENT: Outcome.STAYED,
        State.OFF: Outcome.UNDEFINE_TARGET,
        State.PAUSED: Outcome.REMOVE_TARGET,
    }.get(target, Outcome.IN_DOUBT)
