# SPDX-License-Identifier: Apache-2.0
"""Look after the base stores of the hosts.

  list     what is there, how large, on which device, who has leases on it, when it was last leased
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
import os
import sys
import time
from functools import partial
from typing import Any, Callable

from .. import NAME
from ..config import Config, load
from ..errors import BadArguments, ImageChanged, SemisharedError
from ..front.answering import answering
from ..model.base import steps as base_steps
from ..model.refs import ImageRef
from ..opennebula.oned import Oned
from ..opennebula.xml import Host, Image
from ..plan.base import eviction
from ..plan.image.images import image_ref
from ..units import amount, human
from ..wire.session import Session
from . import command as on
from .command import put, put_json

Row = dict[str, Any]
VERBS = ("list", "verify", "prune", "evict")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument(
        "images", nargs="*", metavar="IMAGE", help="only bases of these images (id or name); evict needs one"
    )
    on.add_arguments(parser)
    parser.add_argument("--rate", metavar="R", help="verify: bytes per second and host at most, e.g. 100M")
    parser.add_argument(
        "--dry-run", action="store_true", help="verify, prune, evict: change nothing, say what would be done"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of lines")


class Command:
    """One run: what oned knows, which hosts, and what was found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.config: Config = load()
        self.oned = Oned()
        self.oned.require_admin()
        self.hosts = on.chosen(self.oned.hosts(), arguments)
        self.roots = on.roots(self.oned)
        self.images = {(image.store_id, image.id): image for image in self.oned.images()}
        self.wanted = {(image.store_id, image.id) for word in arguments.images for image in self._named(word)}
        self.survey = on.Survey()
        self.rate = rate(arguments.rate or "0")

    def _named(self, word: str) -> list[Image]:
        found = [image for image in self.images.values() if word in (str(image.id), image.name)]
        if not found:
            raise BadArguments(f"no image {word!r} in OpenNebula")
        return found

    def about(self, base: Row) -> bool:
        """Tell whether the command is about this base."""
        store, image, _ = base["name"].split("-")
        return not self.arguments.images or (int(store), int(image)) in self.wanted

    def on_hosts(self, work: Callable[[Session, Host, str, Row], list[Row]]) -> list[Row]:
        """List the bases of each host and do `work` there; return all rows, with their hosts."""

        def one(session: Session, host: Host) -> list[Row]:
            rows = []
            for root in self.roots:
                (listed,) = session.run([base_steps.ListBases(root)])
                assert isinstance(listed, dict)
                rows += [{"host": host.name, **row} for row in work(session, host, root, listed)]
            return rows

        answers = self.survey.ask(self.hosts, "base", self.config, one)
        return [row for rows in answers.values() for row in rows]


def rate(text: str) -> int:
    """Return bytes per second; raise BadArguments."""
    try:
        return amount(text)
    except ValueError:
        raise BadArguments(f"not a rate: {text!r}; 40M (bytes per second) is one") from None


def check(arguments: argparse.Namespace) -> None:
    """Raise BadArguments for what a verb cannot do: an option without effect would be taken for one that
    has.
    """
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
    if arguments.dry_run and verb == "list":
        raise BadArguments("list has no --dry-run: it changes nothing")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared base`."""
    if os.geteuid() == 0:
        put(f"{NAME} base: run this as oneadmin: files of root would be in the drivers' way", to=sys.stderr)
        return 2
    check(arguments)
    command = Command(arguments)
    rows, line, code = {"list": listing, "verify": verify, "prune": prune, "evict": evict}[arguments.verb](
        command
    )
    errors = command.survey.errors
    if arguments.json:
        put_json({"bases": rows, "errors": errors})
    else:
        for row in rows:
            put(f"{row['host']}: {title(command, row)}: {line(row)}")
        for error in errors:
            put(f"{error['host']}: {error['error']}", to=sys.stderr)
        put(f"{len(rows)} bases on {len({row['host'] for row in rows})} hosts, {len(errors)} errors")
    return 2 if errors else code


Result = tuple[list[Row], Callable[[Row], str], int]


def title(command: Command, row: Row) -> str:
    """Return a base as an operator knows it."""
    store, image, generation = row["name"].split("-")
    known = command.images.get((int(store), int(image)))
    name = f" ({known.name})" if known else " (not in OpenNebula)"
    return f"image {image}{name} of store {store}, generation {generation[:8]}"


def listing(command: Command) -> Result:
    """List what is there."""

    def work(session: Session, host: Host, root: str, listed: Row) -> list[Row]:
        return [{"root": root, **base} for base in listed["bases"] if command.about(base)]

    def line(row: Row) -> str:
        leases = (
            f"{len(row['leases'])} leases ({', '.join(row['leases'][:5])})" if row["leases"] else "no lease"
        )
        state = ", DAMAGED, out of use" if row["damaged"] else ""
        where = f", on {row['device']}" if row["device"] else ""
        return (
            f"{human(row['bytes'])}{where}, {leases}, last used "
            f"{time.strftime('%F %T', time.localtime(row['used']))}{state}"
        )

    return command.on_hosts(work), line, 0


def verify(command: Command) -> Result:
    """Verify, and mend what is damaged."""
    dry_run = command.arguments.dry_run

    def work(session: Session, host: Host, root: str, listed: Row) -> list[Row]:
        rows = []
        for base in filter(command.about, listed["bases"]):
            (found,) = session.run(
                [
                    (base_steps.ReadBase if dry_run else base_steps.VerifyBase)(
                        root, base["name"], command.rate
                    )
                ]
            )
            assert isinstance(found, dict)
            row = {"name": base["name"], **found, "mended": False, "why": ""}
            if found["damaged"] and not dry_run:
                try:
                    mend = base_steps.MendBase(root, reference(command, base["name"]))
                    with answering(root, host.name, command.config) as answer:
                        session.run([mend], answer=answer)
                    row["mended"] = True
                except SemisharedError as e:
                    row["why"] = e.line()
                    command.survey.failed(host.name, e)
            rows.append(row)
        return rows

    rows = command.on_hosts(work)
    return (
        rows,
        partial(_verified, dry_run),
        int(any(row["damaged"] or row.get("wrong_in_memory") for row in rows)),
    )


def reference(command: Command, name: str) -> ImageRef:
    """Return how a host finds the generation of a base in the store; raise ImageChanged if the image is
    gone.
    """
    store, image, generation = name.split("-")
    known = command.images.get((int(store), int(image)))
    if known is None or not known.source:
        raise ImageChanged(f"image {image} is not in OpenNebula any more, its base cannot be fetched anew")
    return image_ref(known, command.oned.datastore(known.store_id))._replace(generation=generation)


def _verified(dry_run: bool, row: Row) -> str:
    if not row["damaged"]:
        speed = row["bytes"] / row["seconds"] if row["seconds"] else 0
        said = f"good, {human(row['bytes'])} in {row['seconds']:.1f} s ({human(int(speed))}/s)"
        if row.get("wrong_in_memory"):
            said += (
                "; its copy in memory was DAMAGED, and is removed: power VMs off and on that have "
                "read from it"
            )
        return said
    where = (
        ", ".join("its manifest" if index < 0 else f"extent {index}" for index in row["bad"][:5])
        or "found earlier"
    )
    vms = sorted({lease.split("-")[0] for lease in row["leases"]}, key=int)
    who = f"; VMs {', '.join(vms)} have read from it: power them off and on" if vms else ""
    if dry_run:
        return f"DAMAGED ({where}), would be taken out of use and fetched anew{who}"
    return (
        f"DAMAGED ({where}), taken out of use, "
        f"{'fetched anew' if row['mended'] else 'not fetched: ' + row['why']}{who}"
    )


def prune(command: Command) -> Result:
    """Remove what is over the limits of each host."""
    dry_run = command.arguments.dry_run

    def work(session: Session, host: Host, root: str, listed: Row) -> list[Row]:
        limit = eviction.limits_of(
            host, command.config.bases_size_limit, command.config.bases_free_floor, listed
        )
        bases = {base["name"]: base for base in listed["bases"]}
        chosen = eviction.choose([eviction.Held.of(row) for row in listed["bases"]], limit, listed["free"])
        rows = []
        for name in chosen:
            gone = not dry_run and session.run([base_steps.EvictBase(root, name)])[0]["evicted"]  # type: ignore[index]
            rows.append({"name": name, "bytes": bases[name]["bytes"], "evicted": gone})
        return rows

    rows = command.on_hosts(work)
    verb = "would be removed" if dry_run else "removed"
    return (
        rows,
        lambda row: f"{human(row['bytes'])}, "
        f"{verb if dry_run or row['evicted'] else 'leased meanwhile: stays'}",
        int(dry_run and bool(rows)),
    )


def evict(command: Command) -> Result:
    """Remove the bases of the named images where nobody has a lease."""
    dry_run = command.arguments.dry_run

    def work(session: Session, host: Host, root: str, listed: Row) -> list[Row]:
        rows = []
        for base in filter(command.about, listed["bases"]):
            gone = not dry_run and session.run([base_steps.EvictBase(root, base["name"])])[0]["evicted"]  # type: ignore[index]
            rows.append(
                {"name": base["name"], "leases": base["leases"], "bytes": base["bytes"], "evicted": gone}
            )
        return rows

    rows = command.on_hosts(work)
    stays = [row for row in rows if (row["leases"] if dry_run else not row["evicted"])]
    return rows, partial(_evicted, dry_run), int(bool(stays))


def _evicted(dry_run: bool, row: Row) -> str:
    leases = ", ".join(row["leases"][:5])
    if dry_run and not leases:
        return f"would be removed, {human(row['bytes'])}"
    return (
        f"removed, {human(row['bytes'])}"
        if row["evicted"]
        else f"stays: leased by disks {leases or 'taken just now'}"
    )
