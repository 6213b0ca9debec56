# SPDX-License-Identifier: Apache-2.0
"""Find what killed actions left on front-end, hosts and stores, and remove it.

Nothing goes that is younger than an hour, that a VM known to oned or a domain of libvirt uses, that somebody
has open, or that is not understood. What might be the only copy of data is listed as kept.

exit codes: 0 nothing is left (over), 1 with --dry-run, or answered with no: there is something to remove, 2 a
machine or oned could not be asked, or something could not be removed
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from .. import NAME
from ..config import Config, load
from ..errors import BadArguments, HostUnreachable, SemisharedError, from_id
from ..model import steps as s
from ..model.attributes import STORE
from ..model.store.template import is_shares
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore
from ..plan.care import gc as plan
from ..plan.care import gc_stores as plan_shares
from ..plan.care.gc_stores import Pool
from ..tools import context_iso
from ..tools.this_machine import is_here
from ..units import human
from ..wire.session import Session
from . import command, gc_kinds
from .command import Waiting, put, put_json

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
AT_ONCE = 32
"""Hosts asked at the same time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    command.add_consent_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of lines")
    parser.add_argument(
        "--discard",
        metavar="NAME",
        action="append",
        default=[],
        help="remove these kept disks (`.kept-...`) too: what was not committed is lost",
    )
    age = parser.add_mutually_exclusive_group()
    age.add_argument("--older-than", metavar="AGE", help="e.g. 90s, 30m, 2h, 7d (default: 1h)")
    age.add_argument(
        "--now", action="store_true", help="whatever its age; for a cloud where nothing is under way"
    )


def seconds(text: str) -> int:
    """Return an age like 90s, 30m, 2h or 7d in seconds; raise BadArguments."""
    match = re.match(r"([0-9]{1,9})([smhd]?)\Z", text)
    if not match:
        raise BadArguments(f"not an age: {text!r}; 90s, 30m, 2h, 7d are")
    return int(match.group(1)) * UNITS[match.group(2)]


@dataclass
class Survey:
    """What the machines said, and which of them could not be asked."""

    machines: list[plan.Machine] = field(default_factory=list)
    known: plan.Known = field(default_factory=lambda: plan.Known({}, frozenset(), frozenset()))
    errors: list[dict[str, str]] = field(default_factory=list)
    pools: list[Pool] = field(default_factory=list)
    shares: list[plan_shares.Shares] = field(default_factory=list)

    def failed(self, machine: str, error: SemisharedError) -> None:
        self.errors.append({"machine": machine, "error": error.line()})


@dataclass(frozen=True)
class _Question:
    host: str
    step: s.LookAround
    is_near: bool = True
    """VMs of ours may run there; of others, which need not have anything of ours, it is no error if they
    cannot be asked.
    """


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared gc`."""
    if os.geteuid() == 0:
        put(f"{NAME} gc: run this as oneadmin: files of root would be in the drivers' way", to=sys.stderr)
        return 2
    if not arguments.dry_run:
        context_iso.remove_stale()
    older_than = 0 if arguments.now else seconds(arguments.older_than or "1h")
    config = load()
    survey = survey_cloud(Oned(), config)
    survey.known = replace(survey.known, discarded=frozenset(arguments.discard))
    findings = plan.find(survey.machines, survey.known, older_than, not survey.errors)
    unknown = set(arguments.discard) - {
        item.path.rpartition("/")[2] for item in findings if item.kind == "kept"
    }
    if unknown:
        raise BadArguments(f"no kept disk is called {min(unknown)!r}")
    findings += elsewhere(survey, older_than, config)
    going = [item for item in findings if not item.keep]
    asked = [f"{item.machine}: {item.kind} {item.path}: {item.reason}: would be removed" for item in going]
    if going and not arguments.dry_run and not command.agreed(arguments, asked):
        return 1
    results = (
        ["" if item.keep else "would remove" for item in findings]
        if arguments.dry_run
        else remove(findings, config, survey)
    )
    if arguments.json:
        put_json(as_json(findings, results, survey, arguments.dry_run))
    else:
        show(findings, results, survey, arguments.dry_run)
    if survey.errors:
        return 2
    return int(arguments.dry_run and any(not item.keep for item in findings))


def survey_cloud(oned: Oned, config: Config) -> Survey:
    """Look around on all machines at once; then, and not before, ask oned which VMs and images there are."""
    oned.require_admin()
    survey = Survey()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for question, answer in zip(*_ask_all(pool, questions(oned, survey), config)):
            counts = question.is_near or question.host == os.uname().nodename
            if isinstance(answer, SemisharedError):
                if counts:
                    survey.failed(question.host, answer)
            else:
                machine = plan.Machine(
                    question.host, question.step.location, answer, question.step.libvirt, question.is_near
                )
                survey.machines.append(machine)
                for refused in answer["refused"] if counts else ():
                    survey.failed(question.host, from_id(refused["id"], refused["detail"]))
                if "error" in answer["domains"] and question.is_near:
                    survey.failed(question.host, SemisharedError(f"libvirt: {answer['domains']['error']}"))
    ours = [store for store in oned.datastores() if NAME in (store.driver, store.text("DS_MAD"))]
    survey.pools = gc_kinds.pools_listed(ours, config, survey.failed)
    survey.shares = gc_kinds.shares_listed(ours, config, survey.failed)
    survey.known = gc_kinds.known(oned, ours, survey.machines, survey.pools)
    return survey


def elsewhere(survey: Survey, older_than: int, config: Config) -> list[plan.Finding]:
    """Return what is left over where no machine's own files are: in pools of Ceph, and of directories for
    guests.
    """
    found = gc_kinds.left_in_pools(survey.pools, survey.known, older_than, config, survey.failed)
    return found + [
        item for shares in survey.shares for item in plan_shares.find_in_shares(shares, survey.known)
    ]


def questions(oned: Oned, survey: Survey) -> list[_Question]:
    """Return what to ask which machine: per place of datastores the front-end (with the stores) and every
    host.
    """
    front_end = os.uname().nodename
    datastores = [store for store in oned.datastores() if NAME in (store.driver, store.text("DS_MAD"))]
    hosts: dict[str, bool] = {}
    for host in oned.hosts():
        is_near = host.is_near(datastores)
        if not host.is_offline:
            hosts[host.name] = is_near
        elif is_near:
            survey.failed(host.name, SemisharedError("is offline in OpenNebula and was not asked"))
    places: dict[str, list[Datastore]] = {}
    for store in datastores:
        places.setdefault(os.path.dirname(absolute(store.base_path, "BASE_PATH")), []).append(store)
    found = []
    for location, stores in sorted(places.items()):
        systems = tuple(sorted(store.id for store in stores if store.is_system))
        # Shares are elsewhere: gc_kinds.py.
        images = [store for store in stores if not store.is_system and not is_shares(store)]
        marked = sorted((absolute(store.base_path, "BASE_PATH"), STORE.text(store)) for store in images)
        shared, markers = tuple(path for path, _ in marked), tuple(store for _, store in marked)
        here = [name for name in hosts if is_here(name)]
        are_near = not here or any(hosts[name] for name in here)
        found.append(
            _Question(front_end, s.LookAround(location, systems, shared, bool(here), markers), are_near)
        )
        others = ((name, is_near) for name, is_near in hosts.items() if not is_here(name))
        found += [
            _Question(name, s.LookAround(location, systems, (), True), is_near) for name, is_near in others
        ]
    return found


def _ask_all(
    pool: ThreadPoolExecutor, asked: list[_Question], config: Config
) -> tuple[list[_Question], list[Any]]:
    def ask(question: _Question) -> Any:
        try:
            with Session(question.host, "gc", config) as session:
                return session.run([question.step])[0]
        except SemisharedError as e:
            return e
        finally:
            waiting.done()

    with Waiting("gc: machines", len(asked)) as waiting:
        return asked, list(pool.map(ask, asked))


def remove(findings: list[plan.Finding], config: Config, survey: Survey) -> list[str]:
    """Remove findings, all machines at once; return 'removed', or why not, of each, '' of what is kept."""

    def on(machine: str) -> dict[int, str]:
        done: dict[int, str] = {}
        with Session(machine, "gc", config) as session:
            for number, item in enumerate(findings):
                if item.machine != machine or item.keep:
                    continue
                try:
                    if item.kind == "stray":
                        place = survey.known.places[item.vm]
                        done[number] = (
                            gc_kinds.remove_strays(session, item, place, config, survey.failed) or "removed"
                        )
                        continue
                    if gc_kinds.is_pool_wanted(item):
                        done[number] = "it is wanted by now"
                        continue
                    answer = session.run(item.steps())[-1]
                    is_gone = not isinstance(answer, dict) or answer.get("removed", True) is True
                    done[number] = "removed" if is_gone else "it has changed meanwhile"
                except SemisharedError as e:
                    survey.failed(machine, e)
                    done[number] = e.line()
                    if isinstance(e, HostUnreachable):
                        break  # the rest was not reached
        return done

    results = ["" if item.keep else "not reached" for item in findings]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in pool.map(on, sorted({item.machine for item in findings if not item.keep})):
            for number, text in done.items():
                results[number] = text
    return results


def as_json(
    findings: list[plan.Finding], results: list[str], survey: Survey, dry_run: bool
) -> dict[str, object]:
    """Return the whole outcome as JSON data."""
    rows = [
        {
            "machine": item.machine,
            "kind": item.kind,
            "path": item.path,
            "reason": item.reason,
            "bytes": item.bytes,
            "age_s": item.age,
            "keep": item.keep,
            "result": result,
        }
        for item, result in zip(findings, results)
    ]
    return {
        "dry_run": dry_run,
        "findings": rows,
        "errors": survey.errors,
        "totals": totals(findings, results),
    }


def totals(findings: list[plan.Finding], results: list[str]) -> dict[str, int]:
    """Return counts and bytes."""
    to_remove = [item for item in findings if not item.keep]
    return {
        "found": len(to_remove),
        "bytes": sum(item.bytes for item in to_remove),
        "removed": results.count("removed"),
        "kept": len(findings) - len(to_remove),
    }


def show(findings: list[plan.Finding], results: list[str], survey: Survey, dry_run: bool) -> None:
    """Print a line per finding, and the totals."""
    for item, result in zip(findings, results):
        verb = f"kept ({item.keep})" if item.keep else result
        size = f", {human(item.bytes)}" if item.bytes else ""
        put(f"{item.machine}: {item.kind} {item.path}: {item.reason}{size}: {verb}")
    for error in survey.errors:
        put(f"{error['machine']}: {error['error']}", to=sys.stderr)
    sums = totals(findings, results)
    verb = f"{sums['found']} to remove" if dry_run else f"{sums['removed']} of {sums['found']} removed"
    put(f"{verb} ({human(sums['bytes'])}), {sums['kept']} kept, {len(survey.errors)} errors")
