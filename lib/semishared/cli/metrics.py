# SPDX-License-Identifier: Apache-2.0
"""Write metrics for Prometheus, as node_exporter's textfile collector reads them.

  metrics                     to stdout
  metrics --output FILE.prom  to a file, which is replaced when all is known: for a timer

They say what each machine has (bases, leases, disks, devices of pools, room, what is not committed), which
have answered, and how long actions took and how many bytes they moved since counting began: with the first
run on this front-end. No VM and no image is named. docs/how-to/metrics.md has alert rules and a dashboard.

exit codes: 0 written; a machine that has not answered is said on stderr, and is semishared_host_up 0;
2 oned could not be asked, or the file could not be written: it stays as it was
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Dict, Mapping, Sequence, Tuple, Union

from .. import VERSION
from ..config import Config, load
from ..errors import BadArguments, BadAttribute
from ..front import action_counts
from ..model.base.steps import Listed
from ..model.job_steps import doing
from ..opennebula.xml import Host
from ..plan.base import eviction
from ..plan.care import metrics as plan
from ..plan.care.attention import Facts, Machine
from ..plan.care.attention import items as attention_items
from ..plan.care.checks import WORDS
from ..tools import files, locks
from ..wire.messages import RELEASE
from . import attention
from . import command as on
from .command import argument, warn

ARGUMENTS = (
    argument(
        "--output",
        metavar="FILE.prom",
        help="write this file, in node_exporter's directory, and not to stdout",
    ),
)
LOCK_S = 60.0
"""Limit of waiting for another run, which has asked all machines before it takes the lock."""


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared metrics`."""
    on.refuse_root()
    output = _checked(arguments.output)
    began, oned, config = time.monotonic(), on.administrator(), load()
    survey = attention.Survey()
    facts = attention.asked(oned, config, survey)
    for name, why in [*((one["host"], one["error"]) for one in survey.errors), *facts.outdated.items()]:
        warn(f"{name}: {why}")
    # Counts that were read later are written later: no counter goes down.
    with locks.exclusive(action_counts.lock(), LOCK_S):
        counts = action_counts.fold(warn)
        text = plan.text(
            plan.Facts(
                version=VERSION,
                release=RELEASE,
                now=round(time.time(), 1),
                seconds=round(time.monotonic() - began, 3),
                actions=counts.actions,
                uncounted=counts.uncounted,
                machines=machines(facts, config),
                jobs=[(one.name, doing(job)) for one in facts.machines for job in one.jobs],
                findings=[WORDS[item.severity] for item in attention_items(facts)],
            )
        )
        if output:
            files.remove_staged(*os.path.split(output))
            files.write(output, text.encode())
    if not output:
        sys.stdout.write(text)
    return 0


def _checked(output: Union[str, None]) -> str:
    """Return the file to write, '' for none; raise BadArguments for one that node_exporter does not read."""
    if output is None:
        return ""
    path = os.path.abspath(output)
    if not path.endswith(".prom") or os.path.basename(path).startswith("."):
        raise BadArguments(f"node_exporter reads files whose names end in .prom alone: {output!r}")
    return path


def machines(facts: Facts, config: Config) -> Dict[str, Union[plan.Machine, None]]:
    """Return what hosts and the front-end have said; None is what one that has not answered has said."""
    said = {one.name: one for one in facts.machines}
    asked = {host.name: host for host in [on.as_host(facts.front_end), *facts.hosts]}
    return {name: machine(host, said[name], config) if name in said else None for name, host in asked.items()}


def machine(host: Host, said: Machine, config: Config) -> plan.Machine:
    """Return what a machine has said, of all places of datastores together; its room is where it is least."""
    bases = [base for one in said.listed for base in one.bases]
    disks = [disk for one in said.reported for vm in one.vms for disk in vm.disks]
    kept = [disk for one in said.reported for disk in one.kept]
    by_place: Dict[str, Tuple[int, int]] = {}
    for disk in disks:
        count, size = by_place.get(disk.how, (0, 0))
        by_place[disk.how] = count + 1, size + (disk.bytes if disk.place == "local" else 0)
    return plan.Machine(
        errors=sum(len(one.errors) + sum(bool(vm.error) for vm in one.vms) for one in said.reported),
        bases=len(bases),
        base_bytes=sum(base.bytes for base in bases),
        leases=sum(len(base.leases) for base in bases),
        damaged=sum(base.damaged for base in bases),
        disks=by_place,
        uncommitted=sum(disk.uncommitted or 0 for disk in disks),
        kept=len(kept),
        kept_bytes=sum(disk.bytes for disk in kept),
        devices=[
            plan.Device(one.path, one.class_, not one.state, one.total, one.free, one.disks, one.bases)
            for one in said.devices
        ],
        **_room(host, said.listed, config),
    )


def _room(host: Host, listed: Sequence[Listed], config: Config) -> Mapping[str, int]:
    """Return size, free bytes and floor of the file system for new bases that has the least room."""
    found = []
    for one in listed:
        try:
            floor = eviction.limits_of(host, config.bases_size_limit, config.bases_free_floor, one).floor
        except BadAttribute as e:
            warn(f"{host.name}: {e.detail}")
            floor = -1
        found.append({"total": one.total, "free": one.free, "floor": floor})
    return min(found, key=lambda room: room["free"] - max(room["floor"], 0), default={})
