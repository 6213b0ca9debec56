# SPDX-License-Identifier: Apache-2.0
"""Find what killed actions left on front-end, hosts and stores, and remove it.

Nothing goes that is younger than an hour, that a VM known to oned or a domain of libvirt uses, that a process
has open, or that is not understood. What might be the only copy of data is listed as kept.

exit codes: 0 nothing is left (over), 1 with --dry-run, or answered with no: there is something to remove, 2 a
machine or oned could not be asked, or something could not be removed
"""

from __future__ import annotations

import argparse
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Callable, Iterable, Iterator, Optional, Sequence

from ..config import Config, load
from ..errors import BadArguments, HostUnreachable, OnedUnavailable, SemisharedError, from_id
from ..front import noted_datastores, trail
from ..model import steps as s
from ..model.attributes import CLOUD, STORE
from ..model.disk import commit_steps as c
from ..model.leftover_steps import LookAround
from ..model.share import share
from ..model.share.steps import ListKeys, ListShares
from ..model.store import access, image_steps, rbd_names, template
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Image
from ..plan.care import gc as plan
from ..plan.care import gc_places, gc_stores
from ..plan.disk.disks import running_domain
from ..tools import context_iso
from ..tools.this_machine import are_one, is_here
from ..units import human
from ..wire.session import Session, first_answer
from . import command as on
from . import same_directories
from .command import AT_ONCE, Row, argument, flag, put

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
ARGUMENTS = (
    *on.consent(),
    on.JSON_FOR_LINES,
    argument(
        "--discard",
        metavar="NAME",
        action="append",
        default=[],
        help="remove these kept disks (`.kept-...`) too: what was not committed is lost",
    ),
    argument("--older-than", metavar="AGE", help="e.g. 90s, 30m, 2h, 7d (default: 1h)", one_of="age"),
    flag("--now", "whatever its age; for a cloud where nothing is under way", one_of="age"),
)


def seconds(text: str) -> int:
    """Return an age like 90s, 30m, 2h or 7d in seconds; raise BadArguments."""
    match = re.match(r"([0-9]{1,9})([smhd]?)\Z", text)
    if not match:
        raise BadArguments(f"not an age: {text!r}; 90s, 30m, 2h, 7d are")
    return int(match.group(1)) * UNITS[match.group(2)]


class Survey(on.Survey):
    """The machines' facts, and the machines that could not be asked."""

    where = "machine"

    def __init__(self) -> None:
        super().__init__()
        self.machines: list[plan.Machine] = []
        self.known = plan.Known({}, frozenset(), frozenset())
        self.pools: list[gc_stores.Pool] = []
        self.shares: list[gc_stores.Shares] = []


class _Question(NamedTuple):
    host: str
    step: LookAround
    is_near: bool
    """VMs of ours may run there. Other machines may have nothing of ours, and need not answer."""


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared gc`."""
    on.refuse_root()
    if not arguments.dry_run:
        context_iso.remove_stale()
    config, older_than = load(), 0 if arguments.now else seconds(arguments.older_than or "1h")
    survey = survey_cloud(Oned(), config)
    survey.known = replace(survey.known, discarded=frozenset(arguments.discard))
    found = plan.of_any_age(survey.machines, survey.known, not survey.errors)
    findings, young = plan.aged(found, older_than)
    kept = {item.path.rpartition("/")[2] for item in findings if item.kind == "kept"}
    unknown = set(arguments.discard) - kept
    if unknown:
        raise BadArguments(f"no kept disk is called {min(unknown)!r}")
    more, younger = plan.aged(elsewhere(survey, config), older_than)
    findings, young = findings + more, young + younger
    going = [item for item in findings if not item.keep]
    asked = [f"{item.machine}: {item.kind} {item.path}: {item.reason}: would be removed" for item in going]
    is_refused = bool(going) and not arguments.dry_run and not on.agreed(arguments, asked)
    if is_refused and not arguments.json:
        return 1
    would = ["" if item.keep or is_refused else "would remove" for item in findings]
    results = would if arguments.dry_run or is_refused else remove(findings, config, survey)
    report(arguments, findings, results, survey, young, older_than)
    return 2 if survey.errors else int(is_refused or arguments.dry_run and bool(going))


def survey_cloud(oned: Oned, config: Config) -> Survey:
    """Look around on all machines at once; only then ask oned which VMs and images there are."""
    oned.require_admin()
    survey, front_end = Survey(), os.uname().nodename
    asked = questions(oned, survey) + of_front_ends(oned, config)
    answers = on.at_once("gc: machines", asked, lambda it: on.ask(it.host, "gc", config, it.step))
    for (host, step, is_near), answer in answers:
        counts = is_near or host == front_end
        if isinstance(answer, SemisharedError):
            if counts:
                survey.failed(host, answer)
            continue
        survey.machines.append(plan.Machine(host, step.location, answer, step.libvirt, is_near))
        for refused in answer.refused if counts else ():
            survey.failed(host, from_id(*refused))
        if answer.domains.error and is_near:
            survey.failed(host, SemisharedError(f"libvirt: {answer.domains.error}"))
    ours = whole(oned.datastores(), survey)
    survey.pools = pools_listed(ours, config, survey.failed)
    survey.shares = shares_listed(ours, config, survey.failed)
    survey.known = known(oned, ours, survey.machines, survey.pools)
    return survey


def whole(datastores: Iterable[Datastore], survey: Optional[Survey] = None) -> list[Datastore]:
    """Return ours that still say which store is their own: in others nothing is looked for."""
    found = []
    for store in on.ours(datastores):
        try:
            found.append(noted_datastores.whole(store))
        except SemisharedError as e:
            if survey:
                survey.failed(os.uname().nodename, e)
    return found


def elsewhere(survey: Survey, config: Config) -> list[plan.Finding]:
    """Return what is left over in pools of Ceph and in datastores of shares, of whatever age."""
    found = [one for shares in survey.shares for one in gc_stores.find_in_shares(shares, survey.known)]
    return left_in_pools(survey.pools, survey.known, config, survey.failed) + found


def questions(oned: Oned, survey: Survey) -> list[_Question]:
    """Return the questions: per place of datastores to the front-end (with the stores) and every host."""
    datastores, hosts = whole(oned.datastores()), {}
    for host in oned.hosts():
        is_near = host.is_near(datastores)
        if not host.is_offline:
            hosts[host.name] = is_near
        elif is_near:
            survey.offline(host)
    places: dict[str, list[Datastore]] = {}
    for store in datastores:
        places.setdefault(on.location(store), []).append(store)
    here = [name for name in hosts if is_here(name)]
    are_near = not here or any(hosts[name] for name in here)
    found = []
    for location, stores in sorted(places.items()):
        systems = tuple(sorted(store.id for store in stores if store.is_system))
        looked = _mounted_at(stores, [name for name in hosts if name not in here])
        found.append(
            _Question(os.uname().nodename, _look(location, systems, looked.pop("", []), bool(here)), are_near)
        )
        for name, is_near in hosts.items():
            if name not in here:
                bridged = looked.pop(name, [])
                found.append(
                    _Question(name, _look(location, systems, bridged, True), is_near or bool(bridged))
                )
        # A bridge that is no host of OpenNebula's has stores alone.
        found += [
            _Question(name, _look(location, (), bridged, False), True) for name, bridged in looked.items()
        ]
    return found


def of_front_ends(oned: Oned, config: Config) -> list[_Question]:
    """Return the questions to the other front-ends of an HA group, of what only they have of VMs at rest.

    One that does not answer, or is not set up, holds nothing up: none of its files are wanted by a host.
    """
    systems = [store for store in on.ours(oned.datastores()) if store.is_system]
    found = []
    for machine, said in same_directories.of_front_ends(oned, systems, config).items():
        if isinstance(said, str):
            on.warn(f"front-end {machine} was not searched: {said}")
            continue
        places: dict[str, list[int]] = {}
        for store in same_directories.apart(said, systems):
            places.setdefault(on.location(store), []).append(store.id)
        found += [
            _Question(machine, _look(location, tuple(sorted(numbers)), (), False), False)
            for location, numbers in sorted(places.items())
        ]
    return found


def _mounted_at(stores: Iterable[Datastore], hosts: Sequence[str]) -> dict[str, list[Datastore]]:
    """Return mounted stores by the machine that looks into them: '' the front-end, else a bridge."""
    found: dict[str, list[Datastore]] = {}
    for store in stores:
        if store.is_system or template.is_shares(store):
            continue
        names = [] if template.kind(store).machine else template.bridges(store)
        known = [host for name in names for host in hosts if are_one(name, host)]
        machine = next(iter((*known, *names)), "")
        found.setdefault("" if not machine or is_here(machine) else machine, []).append(store)
    return found


def _look(location: str, systems: tuple[int, ...], stores: Iterable[Datastore], libvirt: bool) -> LookAround:
    marked = sorted((absolute(one.base_path, "BASE_PATH"), STORE.text(one)) for one in stores)
    return LookAround(
        location, systems, tuple(path for path, _ in marked), libvirt, tuple(id_ for _, id_ in marked)
    )


def known(
    oned: Oned,
    datastores: Sequence[Datastore],
    machines: Sequence[plan.Machine],
    pools: Sequence[gc_stores.Pool],
) -> plan.Known:
    """Return oned's facts about what the machines and pools hold; raise OnedUnavailable."""
    images, hosts = oned.images(), {vm.id: vm.host for vm in oned.vms()}
    stored = [image for image in images if not access.is_path(image.source)]
    strangers = sorted(set(_strangers(machines, pools)) - set(hosts))
    items = [(machine.name, item) for machine in machines for item in machine.facts.vms]
    places = {vm: place_now(oned, vm) for vm in sorted(gc_places.in_question(items, hosts))}
    return plan.Known(
        hosts,
        frozenset((image.number("DATASTORE_ID"), image.id) for image in images),
        frozenset(absolute(image.source, "SOURCE") for image in images if access.is_path(image.source)),
        frozenset(image.source for image in stored),
        frozenset(image.source for image in stored if is_idle(image)),
        min({CLOUD.text(store) for store in datastores} - {""}, default=""),
        max(oned.newest_vm(max(hosts, default=0)), max(hosts, default=-1)),
        frozenset(row for vm in strangers for row in _disks(oned, vm)),
        {vm: found for vm, found in places.items() if found},
        {image.id: image.number("REGTIME") for image in images},
        cloned=frozenset(image.id for image in images if not image.is_persistent),
        holders={image.id: image.vms for image in images if image.vms},
    )


def is_idle(image: Image) -> bool:
    return image.number("RUNNING_VMS") == 0


def place_now(oned: Oned, vm: int) -> Optional[gc_places.Place]:
    """Return where the files of a VM are, None if that is not certain."""
    try:
        return gc_places.place_of(oned.vm(vm), os.uname().nodename, is_here)
    except OnedUnavailable:
        return None


def _strangers(machines: Sequence[plan.Machine], pools: Sequence[gc_stores.Pool]) -> Iterator[int]:
    """Yield the VMs of clones that do not name their cloud."""
    for machine in machines:
        for store in machine.facts.stores:
            for side in store.sides:
                yield from (clone.vm for clone in side.clones if not clone.cloud)
    for pool in pools:
        yield from (said.vm for said in map(rbd_names.named, pool.images) if said and said.vm is not None)


def _disks(oned: Oned, number: int) -> Iterator[tuple[int, int, str]]:
    """Yield the disks that a VM has or had, as far as oned knows it."""
    try:
        vm = oned.vm(number)
    except OnedUnavailable:
        return  # never there, or purged
    for disk in vm.disks:
        source = disk.source
        yield vm.id, disk.id, absolute(source, "SOURCE") if access.is_path(source) else source


Failed = Callable[[str, SemisharedError], None]
"""Called with each machine that could not be asked, and the error."""


def shares_listed(datastores: Iterable[Datastore], config: Config, failed: Failed) -> list[gc_stores.Shares]:
    """Return the shares of datastores of ours that have a root; to be asked before oned is."""
    found = []
    for datastore in datastores:
        if not template.is_shares(datastore) or not STORE.text(datastore):
            continue
        machine = f"datastore {datastore.id}"
        try:
            tree, machine = share.tree(datastore), share.bridge(datastore)
            with Session(machine, "gc", config) as session:
                listed, has = session.run([ListShares(tree), ListKeys(tree)])
            rows, keys = tuple(listed.shares), tuple(has.keys)
            found.append(gc_stores.Shares(machine, datastore.id, tree, rows, keys, listed.cloud))
        except SemisharedError as e:
            failed(machine, e)
    return found


def pools_listed(datastores: Iterable[Datastore], config: Config, failed: Failed) -> list[gc_stores.Pool]:
    """Return the pools of image datastores of ours, with the names in them; to be asked before oned is."""
    found = []
    for datastore in datastores:
        machine = ""
        try:
            machine = "" if datastore.is_system else template.machine(datastore, 0)
            if machine:
                found.append(_pool_listed(datastore, config))
        except SemisharedError as e:
            failed(machine or f"datastore {datastore.id}", e)
    return found


def _pool_listed(datastore: Datastore, config: Config) -> gc_stores.Pool:
    """Return the pool of a datastore as the first of its bridges lists it that answers."""
    how, pool = template.access(datastore), template.pool(datastore)

    def ask(machine: str) -> gc_stores.Pool:
        names = on.ask(machine, "gc", config, image_steps.ListPool(how, pool))
        return gc_stores.Pool(machine, datastore.id, pool, how, tuple(names))

    return first_answer(
        template.changers(datastore, 0),
        ask,
        lambda name, e: on.warn(f"bridge {name} of datastore {datastore.id}: {e.line()}"),
    )


def left_in_pools(
    pools: Iterable[gc_stores.Pool], known: plan.Known, config: Config, failed: Failed
) -> list[plan.Finding]:
    """Return what is left over in the pools, of whatever age.

    Each pool is looked into through its datastore's bridge (plan/care/gc_stores.py).
    """
    found: list[plan.Finding] = []
    for pool in pools:
        names, others = gc_stores.suspicious(pool, known), gc_stores.with_snapshots(pool)
        if not names and not others:
            continue
        try:
            look = image_steps.LookAtImages(pool.access, pool.name, tuple(names))
            find = image_steps.FindSnapshots(pool.access, pool.name, tuple(others))
            with Session(pool.machine, "gc", config) as session:
                looks, snapshots = session.run([look, find])
        except SemisharedError as e:
            failed(pool.machine, e)
            continue
        found += gc_stores.find_in_pool(pool, looks, known)
        found += gc_stores.snapshots(pool, snapshots, looks, known)
    return found


def remove_strays(
    session: Session, item: plan.Finding, place: gc_places.Place, config: Config, failed: Failed
) -> str:
    """Remove a stray directory on the machine of `session`; return why it is kept, `gone` if it is not.

    It checks again that the directory is not the VM's own one, that the VM's own is whole, and that oned
    still has the VM there and is not at work on it. The removal itself looks for the domain and for changes.
    `failed` gets the machine of the VM's own directory if that cannot be asked any more.
    """
    location = item.path.rsplit("/", 2)[0]
    home = f"{location}/{place.system}/{item.vm}"
    found = session.ask(s.MarkVm(item.vm, item.path))
    try:
        looked = on.ask(place.machine, "gc", config, s.LookForVm(item.vm, home, found.token, found.seen))
    except SemisharedError as e:
        failed(place.machine, e)
        return f"{place.machine}, where VM {item.vm} belongs, cannot be asked: {e.detail}"
    finally:
        session.run([s.UnmarkVm(item.vm, item.path, found.token)])
    if looked.same:
        shared = "the system datastore is shared, which none of ours may be"
        return f"it is the directory of {place.machine}: {shared}"
    if not looked.whole or (found.disks and not looked.disks):
        return f"there is no whole directory of VM {item.vm} on {place.machine}"
    if found.seq > looked.seq:
        return f"it is of SEQ {found.seq} of the VM's history, what is on {place.machine} is older"
    oned = Oned()
    now = place_now(oned, item.vm)
    if now is None or (now.machine, now.system) != (place.machine, place.system):
        return "oned is at work on the VM"
    domain = running_domain(oned.vm(item.vm)) if item.libvirt else ""
    stale = session.ask(c.KeepStale(item.vm, item.path, found.seen))
    return session.ask(s.ReleaseVm(item.vm, item.path, domain, stale.seen)).kept or gone(stale.kept)


REMOVED = "removed"


def gone(kept: Sequence[str] = ()) -> str:
    """Return the result of a removal; `kept`: where what was not committed of it is now."""
    return f"{REMOVED}, but for what is not committed: kept in {', '.join(kept)}" if kept else REMOVED


def remove(findings: list[plan.Finding], config: Config, survey: Survey) -> list[str]:
    """Remove findings, all machines at once; return `gone` or why not for each, '' for kept ones."""

    def result_of(session: Session, item: plan.Finding) -> str:
        if item.kind == "stray":
            return remove_strays(session, item, survey.known.places[item.vm], config, survey.failed)
        # A snapshot that no host read may be wanted by a VM of now.
        if item.kind == "lent" and item.image and not is_idle(Oned().image(item.image.id)):
            return "it is wanted by now"
        answer = session.run(item.steps())[-1]
        if isinstance(answer, s.RemovedVm):
            return gone(answer.kept)
        return gone() if getattr(answer, "removed", True) else "it has changed meanwhile"

    def one(machine: str) -> dict[int, str]:
        done: dict[int, str] = {}
        with Session(machine, "gc", config) as session:
            for number, item in enumerate(findings):
                if item.machine != machine or item.keep:
                    continue
                what = f"{item.kind} {item.path} on {machine}"
                try:
                    done[number] = said = result_of(session, item)
                    trail.note("gc removal", what, trail.OK if said.startswith(REMOVED) else "stays")
                except SemisharedError as e:
                    survey.failed(machine, e)
                    done[number] = e.line()
                    trail.note("gc removal", what, e.id)
                    if isinstance(e, HostUnreachable):
                        break  # the rest was not reached
        return done

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(one, sorted({item.machine for item in findings if not item.keep}))
        done = {number: text for part in found for number, text in part.items()}
    return [done.get(number, "" if item.keep else "not reached") for number, item in enumerate(findings)]


def report(
    arguments: argparse.Namespace,
    findings: list[plan.Finding],
    results: list[str],
    survey: Survey,
    young: Sequence[plan.Finding] = (),
    older_than: int = 0,
) -> None:
    """Print the whole outcome: JSON, or a line per finding and the totals; `young` is only counted."""
    going = [item for item in findings if not item.keep]
    totals = {
        "found": len(going),
        "bytes": sum(item.bytes for item in going),
        "removed": sum(text.startswith(REMOVED) for text in results),
        "kept": len(findings) - len(going),
        "young": len(young),
        "young_bytes": sum(item.bytes for item in young),
        "young_for_s": max((older_than - item.age for item in young), default=0),
    }
    rows = [row(item, result) for item, result in zip(findings, results)]
    answer = {"dry_run": arguments.dry_run, "findings": rows, "errors": [], "totals": totals}

    def show() -> None:
        for item, result in zip(findings, results):
            verb = f"kept ({item.keep})" if item.keep else result
            size = f", {human(item.bytes)}" if item.bytes else ""
            put(f"{item.machine}: {item.kind} {item.path}: {item.reason}{size}: {verb}")

    found, removed = totals["found"], totals["removed"]
    verb = f"{found} to remove" if arguments.dry_run else f"{removed} of {found} removed"
    total = f"{verb} ({human(totals['bytes'])}), {totals['kept']} kept, {len(survey.errors)} errors"
    if young:
        size, left = human(totals["young_bytes"]), spell(totals["young_for_s"])
        total += f"; {len(young)} younger than {spell(older_than)} ({size}): all of it can go in {left}"
    survey.told(arguments, answer, show, total)


def spell(seconds_: int) -> str:
    """Return a time in words, rounded up: 50 s, 42 min, 3 h 5 min."""
    if seconds_ < 60:
        return f"{seconds_} s"
    minutes = -(-seconds_ // 60)
    hours, rest = divmod(minutes, 60)
    return " ".join([*([f"{hours} h"] if hours else []), *([f"{rest} min"] if rest or not hours else [])])


def row(item: plan.Finding, result: str) -> Row:
    """Return a finding and its result as JSON data."""
    said = {name: getattr(item, name) for name in ("machine", "kind", "path", "reason", "bytes")}
    return {"host": item.machine, **said, "age_s": item.age, "keep": item.keep, "result": result}
