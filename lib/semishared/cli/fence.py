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
import sys
from typing import Any

from .. import NAME
from ..config import load
from ..errors import BadArguments, NotFenced, StillFenced
from ..front.fence import Fence, Proof
from ..install import examine
from ..install.preflight import Question, encoded
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..plan.care.fence import boot_id
from ..tools.this_machine import is_here
from .command import put, put_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("host", metavar="HOST", help="by its name in OpenNebula")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--confirmed-off",
        action="store_true",
        help="you have seen that it is switched off: no command is run",
    )
    how.add_argument("--check", action="store_true", help="do nothing: say whether it is shut out")
    how.add_argument("--lift", action="store_true", help="it was restarted: let it in again")
    parser.add_argument(
        "--even-if-alive",
        action="store_true",
        help="also if OpenNebula monitors it, or it answers: its guests lose their disks",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared fence`."""
    host, config = arguments.host, load()
    oned = Oned()
    oned.require_admin()
    fence = Fence(oned, config)
    answer: dict[str, object] = {"host": host, "fenced": False, "lifted": False, "missing": ""}
    said: list[str] = []
    try:
        if arguments.lift:
            found: dict[str, Any] = {"boot": "", "up_s": 0}
            if fence.is_held_out(host):
                found = examine.examine(host, encoded(Question(roles=())), config.hosts_connect_timeout_s)
            up_s = found.get("up_s")
            stay = fence.lift(
                host,
                boot_id(str(found.get("boot"))),
                float(up_s) if isinstance(up_s, (int, float)) else math.inf,
            )
            answer.update(lifted=True, stay=stay)
            said = [
                f"{host} is in again",
                *(f"{entry} stays: no datastore is on that cluster any more" for entry in stay),
            ]
        else:
            if not arguments.check and not arguments.even_if_alive:
                refuse_alive(fence, host)
            proof = fence.proof(host) if arguments.check else fence.fence(host, arguments.confirmed_off)
            answer.update(proof._asdict(), fenced=True)
            said = shown(proof)
    except (NotFenced, StillFenced) as e:
        answer.update(missing=e.detail)
        put(f"{NAME} fence: {printable(e.line())}", to=sys.stderr)
    if arguments.json:
        put_json(answer, None)
    else:
        for line in said:
            put(printable(line))
    return int(bool(answer["missing"]))


def refuse_alive(fence: Fence, host: str) -> None:
    """Raise BadArguments for a host of which something says that it lives: this would take its guests' disks
    from them.
    """
    told = "" if is_here(host) else fence.why_alive(host)
    if told:
        raise BadArguments(
            f"{host}: {told}, so it is not dead; to shut it out all the same, and its guests: --even-if-alive"
        )


def shown(proof: Proof) -> list[str]:
    """Say what was proved, line by line."""
    how = {
        "command": "the fencing command has switched it off",
        "confirmed": f"it is off, as {proof.by or 'somebody'} said",
    }.get(proof.off, "")
    blocked = [
        f"{word.partition('/')[2]} is on the blocklist of cluster {word.partition('/')[0]}"
        for word in proof.blocked
    ]
    lines = [
        f"{proof.host} is shut out (fence {proof.epoch}, boot {proof.boot or 'unknown'}):",
        *filter(None, [how]),
        *blocked,
    ]
    return [*lines, *(f"not done, and not needed while it is off: {note}" for note in proof.notes)]
