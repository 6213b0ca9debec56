# SPDX-License-Identifier: Apache-2.0
"""Look after the base stores of the hosts.

  list     what is there, how large, on which device, which disks have leases on it, when it was last leased
  verify   read bases from the disk and compare them with their hashes; one that differs is taken out of use,
  fetched anew,
           and given to the VMs that have leases on it
  prune    remove bases without leases, oldest generations and least recently leased first, until each host
  keeps its
           size limit and its free-space floor
  evict    remove the bases of images, where no VM has a lease on them

With --dry-run verify compares and says, prune and evict say what would go; nothing is changed on any host.

exit codes: 0 done, all is well; 1 verify: a base was damaged; prune --dry-run: there is something to remove;
evict: a base is leased; 2 a host could not be asked, or something could not be done there
"""

from __future__ import annotations

import argparse
import time
from typing import Callable, Iterable, Sequence

from ..config import Config, load
from ..errors import BadArguments, ImageChanged, SemisharedError
from ..front import trail
from ..front.action import answering, datastore
from ..model.base import steps as base_steps
from ..model.refs import ImageRef
from ..named import to_data
from ..opennebula.xml import Host
from ..plan.base import eviction
from ..plan.image.images import image_ref
from ..units import human
from ..wire.session import Session
from . import command as on
from .command import Row, argument, flag, put

DUE_DAYS, DUE_RATE = 15, 50 << 20
"""Days after which a timer reads a base again, half of those after which it is said; and how fast."""

ARGUMENTS = (
    argument("verb", choices=("list", "verify", "prune", "evict")),
    argument(
        "images", nargs="*", metavar="IMAGE", help="only bases of these images (id or name); evict needs one"
    ),
    *on.HOSTS,
    on.rate_limit("verify: bytes per second and host at most, e.g. 100M"),
    flag("--due", f"verify: those not read for {DUE_DAYS} days, as a timer does it; at 50M without --rate"),
    flag("--dry-run", "verify, prune, evict: change nothing, say what would be done"),
    on.JSON_FOR_LINES,
)


class Command:
    """One run: oned's objects, the hosts, and what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config: Config = load()
        self.oned = on.administrator()
        self.hosts = on.chosen(self.oned.hosts(), arguments)
        self.roots = on.roots(on.ours(self.oned.datastores()))
        self.images = {(image.store_id, image.id): image for image in self.oned.images()}
        named = [on.called(self.images.values(), word, "image") for word in arguments.images]
        self.wanted = {(image.store_id, image.id) for images in named for image in images}
        self.survey = on.Survey()
        self.rate = on.rate(arguments.rate or None)
        if arguments.due and arguments.rate is None:
            self.rate = DUE_RATE

    def about(self, base: base_steps.HeldBase) -> bool:
        store, image, _ = base.name.split("-")
        return not self.arguments.images or (int(store), int(image)) in self.wanted

    def on_hosts(self, work: Callable[[Session, Host, str, base_steps.Listed], list[Row]]) -> list[Row]:
        """List the bases of each host and do `work` there; return all rows, with their hosts."""

        def one(session: Session, host: Host) -> list[Row]:
            lists = [(root, session.ask(base_steps.ListBases(root))) for root in self.roots]
            rows = [row for root, listed in lists for row in work(session, host, root, listed)]
            return [{"host": host.name, **row} for row in rows]

        answers = self.survey.ask(self.hosts, "base", self.config, one)
        return [row for rows in answers.values() for row in rows]


def to_read(
    bases: Sequence[base_steps.HeldBase], is_due: bool, now: float | None = None
) -> list[base_steps.HeldBase]:
    """Return the bases to read, those first that were not read for longest: a run may be ended midway.

    `is_due`: only those that were not read for DUE_DAYS.
    """
    before = (time.time() if now is None else now) - DUE_DAYS * 86400 if is_due else float("inf")
    # Both by the host's clock: a clock that is off has a base read earlier or later, and nothing else.
    read = {base.name: max(base.verified, base.staged) for base in bases}
    return sorted((base for base in bases if read[base.name] < before), key=lambda base: read[base.name])


def check(arguments: argparse.Namespace) -> None:
    """Raise BadArguments for options that a verb does not have: they would be taken for effective."""
    verb = arguments.verb
    if verb == "evict" and not arguments.images:
        raise BadArguments("evict needs an image; `semishared base prune` removes what is over the limits")
    if verb == "prune" and arguments.images:
        raise BadArguments(
            "prune takes no images: it is about the limits of hosts; `semishared base evict` "
            "removes those of an image"
        )
    if arguments.rate is not None and verb != "verify":
        raise BadArguments(f"{verb} has no --rate: only verify reads bases")
    if arguments.due and verb != "verify":
        raise BadArguments(f"{verb} has no --due: only verify reads bases")
    if arguments.dry_run and verb == "list":
        raise BadArguments("list has no --dry-run: it changes nothing")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared base`."""
    on.refuse_root()
    check(arguments)
    command = Command(arguments)
    verbs = {"list": listing, "verify": verify, "prune": prune, "evict": evict}
    rows, line, code = verbs[arguments.verb](command)
    errors = command.survey.errors

    def show() -> None:
        for row in rows:
            put(f"{row['host']}: {title(command, row)}: {line(row)}")

    total = f"{len(rows)} bases on {len({row['host'] for row in rows})} hosts, {len(errors)} errors"
    command.survey.told(arguments, {"bases": rows}, show, total)
    return 2 if errors else code


Result = tuple[list[Row], Callable[[Row], str], int]


def title(command: Command, row: Row) -> str:
    """Return the name of a base for an administrator."""
    store, image, generation = row["name"].split("-")
    known = command.images.get((int(store), int(image)))
    name = f" ({known.name})" if known else " (not in OpenNebula)"
    return f"image {image}{name} of store {store}, generation {generation[:8]}"


def listing(command: Command) -> Result:
    """List what is there."""

    def work(session: Session, host: Host, root: str, listed: base_steps.Listed) -> list[Row]:
        return [{"root": root, **to_data(base)} for base in listed.bases if command.about(base)]

    def line(row: Row) -> str:
        held = row["leases"]
        leases = f"{len(held)} leases ({', '.join(held[:5])})" if held else "no lease"
        state = ", DAMAGED, out of use" if row["damaged"] else ""
        where = f", on {row['device']}" if row["device"] else ""
        used = time.strftime("%F %T", time.localtime(row["used"]))
        return f"{human(row['bytes'])}{where}, {leases}, last used {used}{state}"

    return command.on_hosts(work), line, 0


def verify(command: Command) -> Result:
    """Verify, and mend what is damaged."""
    dry_run = command.arguments.dry_run
    step = base_steps.ReadBase if dry_run else base_steps.VerifyBase

    def work(session: Session, host: Host, root: str, listed: base_steps.Listed) -> list[Row]:
        rows = []
        for base in to_read(list(filter(command.about, listed.bases)), command.arguments.due):
            found = session.ask(step(root, base.name, command.rate))
            row = {"name": base.name, **to_data(found), "mended": False, "why": ""}
            if found.damaged and not dry_run:
                try:
                    mend = base_steps.MendBase(root, reference(command, base.name))
                    with answering(root, host.name, command.config) as answer:
                        session.ask(mend, answer)
                    row["mended"] = True
                    trail.note("mend", f"base {base.name} on {host.name}, leases {' '.join(found.leases)}")
                except SemisharedError as e:
                    row["why"] = e.line()
                    command.survey.failed(host.name, e)
            rows.append(row)
        return rows

    rows = command.on_hosts(work)
    is_wrong = any(row["damaged"] or row.get("wrong_in_memory") for row in rows)
    return rows, lambda row: _verified(dry_run, row), int(is_wrong)


def reference(command: Command, name: str) -> ImageRef:
    """Return how a host finds the generation of a base in the store; raise ImageChanged if it is gone."""
    store, image, generation = name.split("-")
    known = command.images.get((int(store), int(image)))
    if known is None or not known.source:
        raise ImageChanged(f"image {image} is not in OpenNebula any more, its base cannot be fetched anew")
    return image_ref(known, datastore(command.oned, known.store_id))._replace(generation=generation)


def _verified(dry_run: bool, row: Row) -> str:
    if not row["damaged"]:
        speed = row["bytes"] / row["seconds"] if row["seconds"] else 0
        hot = "its copy in memory was DAMAGED, and is removed: power VMs off and on that have read from it"
        said = f"good, {human(row['bytes'])} in {row['seconds']:.1f} s ({human(int(speed))}/s)"
        return f"{said}; {hot}" if row.get("wrong_in_memory") else said
    bad = ("its manifest" if index < 0 else f"extent {index}" for index in row["bad"][:5])
    where = ", ".join(bad) or "found earlier"
    vms = sorted({lease.split("-")[0] for lease in row["leases"]}, key=int)
    who = f"; VMs {', '.join(vms)} have read from it: power them off and on" if vms else ""
    if dry_run:
        return f"DAMAGED ({where}), would be taken out of use and fetched anew{who}"
    mended = "fetched anew" if row["mended"] else f"not fetched: {row['why']}"
    return f"DAMAGED ({where}), taken out of use, {mended}{who}"


def _removed(session: Session, host: Host, root: str, rows: Iterable[Row], is_dry: bool) -> list[Row]:
    """Remove the bases of these rows that have no lease; return the rows, which say so."""
    gone = []
    for row in rows:
        done = not is_dry and session.ask(base_steps.EvictBase(root, row["name"])).evicted
        if done:
            trail.note("evict", f"base {row['name']} on {host.name}")
        gone.append({**row, "evicted": done})
    return gone


def prune(command: Command) -> Result:
    """Remove what is over the limits of each host."""
    dry_run, config = command.arguments.dry_run, command.config

    def work(session: Session, host: Host, root: str, listed: base_steps.Listed) -> list[Row]:
        limit = eviction.limits_of(host, config.bases_size_limit, config.bases_free_floor, listed)
        bytes_of = {base.name: base.bytes for base in listed.bases}
        chosen = eviction.choose(listed.bases, limit, listed.free)
        rows = ({"name": name, "bytes": bytes_of[name]} for name in chosen)
        return _removed(session, host, root, rows, dry_run)

    def line(row: Row) -> str:
        how = "would be removed" if dry_run else "removed" if row["evicted"] else "leased meanwhile: stays"
        return f"{human(row['bytes'])}, {how}"

    rows = command.on_hosts(work)
    return rows, line, int(dry_run and bool(rows))


def evict(command: Command) -> Result:
    """Remove the bases of the named images that have no lease."""
    dry_run = command.arguments.dry_run

    def work(session: Session, host: Host, root: str, listed: base_steps.Listed) -> list[Row]:
        bases = filter(command.about, listed.bases)
        rows = ({"name": base.name, "leases": list(base.leases), "bytes": base.bytes} for base in bases)
        return _removed(session, host, root, rows, dry_run)

    def line(row: Row) -> str:
        leases = ", ".join(row["leases"][:5])
        if dry_run and not leases:
            return f"would be removed, {human(row['bytes'])}"
        went = f"removed, {human(row['bytes'])}"
        return went if row["evicted"] else f"stays: leased by disks {leases or 'taken just now'}"

    rows = command.on_hosts(work)
    stays = [row for row in rows if (row["leases"] if dry_run else not row["evicted"])]
    return rows, line, int(bool(stays))
