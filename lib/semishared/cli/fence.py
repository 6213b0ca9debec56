# SPDX-License-Identifier: Apache-2.0
"""Shut a dead host out of all stores, so that its VMs may be started elsewhere; or let it in again.

Nothing is asked of the host: the front-end has its addresses put on the blocklist of each Ceph cluster, for
good, and runs the site's fencing command ([fence] command in semishared.conf) if a mounted store is in reach
of the host. A lock that a server has taken from it proves nothing; one that it still holds forbids. Repeated,
it does what is still missing.

A host that OpenNebula monitors, or that answers over ssh, is not dead: it is refused without --even-if-alive.

--lift asks the host, over ssh, whether it was restarted since: none of the guests it had may be left. A fence
that was begun and put nothing on a blocklist is lifted without that.

exit codes: 0 no disk of any of our stores can be written by the host any more (--lift: it is in again), 1
that is not so, and what is missing is said, 2 it could not be found out
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from .. import NAME
from ..config import load
from ..errors import BadArguments, NotFenced, StillFenced
from ..front.fence import Fence, Proof
from ..install import examine
from ..install.preflight import Question, encoded
from ..opennebula.report import printable
from ..plan.care.fence import boot_id
from ..tools.this_machine import is_here
from .command import JSON, administrator, argument, flag, put, put_json, warn

ARGUMENTS = (
    argument("host", metavar="HOST", help="by its name in OpenNebula"),
    flag("--confirmed-off", "you have seen that it is switched off: no command is run", one_of="how"),
    flag("--check", "do nothing: say whether it is shut out", one_of="how"),
    flag("--lift", "it was restarted: let it in again", one_of="how"),
    flag("--even-if-alive", "also if OpenNebula monitors it, or it answers: its guests lose their disks"),
    JSON,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared fence`."""
    host, config = arguments.host, load()
    fence = Fence(administrator(), config)
    answer: dict[str, object] = {"host": host, "fenced": False, "lifted": False, "missing": ""}
    said: list[str] = []
    try:
        if arguments.lift:
            found: dict[str, Any] = {"boot": "", "up_s": 0}
            if fence.is_held_out(host):
                found = examine.examine(host, encoded(Question(roles=())), config.hosts_connect_timeout_s)
            up_s = found.get("up_s")
            up_s = float(up_s) if isinstance(up_s, (int, float)) else math.inf
            stay = fence.lift(host, boot_id(str(found.get("boot"))), up_s)
            answer.update(lifted=True, stay=stay)
            said = [f"{entry} stays: no datastore is on that cluster any more" for entry in stay]
            said.insert(0, f"{host} is in again")
        else:
            if not arguments.check and not arguments.even_if_alive:
                refuse_alive(fence, host)
            proof = fence.proof(host) if arguments.check else fence.fence(host, arguments.confirmed_off)
            answer.update(proof._asdict(), fenced=True)
            said = shown(proof)
    except (NotFenced, StillFenced) as e:
        answer.update(missing=e.detail)
        warn(f"{NAME} fence: {printable(e.line())}")
    if arguments.json:
        put_json(answer, None)
    else:
        for line in said:
            put(printable(line))
    return int(bool(answer["missing"]))


def refuse_alive(fence: Fence, host: str) -> None:
    """Raise BadArguments for a host with a sign of life: the fence would take its guests' disks from them."""
    told = "" if is_here(host) else fence.why_alive(host)
    if told:
        raise BadArguments(
            f"{host}: {told}, so it is not dead; to shut it out all the same, and its guests: --even-if-alive"
        )


def shown(proof: Proof) -> list[str]:
    """Say what was proved, line by line."""
    lines = [f"{proof.host} is shut out (fence {proof.epoch}, boot {proof.boot or 'unknown'}):"]
    if proof.off == "command":
        lines.append("the fencing command has switched it off")
    elif proof.off == "confirmed":
        lines.append(f"it is off, as {proof.by or 'somebody'} said")
    for word in proof.blocked:
        cluster, _, address = word.partition("/")
        lines.append(f"{address} is on the blocklist of cluster {cluster}")
    return [*lines, *(f"not done, and not needed while it is off: {note}" for note in proof.notes)]
