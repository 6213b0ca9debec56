# SPDX-License-Identifier: Apache-2.0
"""Look after the pool of a host: the local devices on which disks and bases lie.

  list     which devices there are, how full, and what they hold
  add      make the pool what SEMISHARED_POOL of the host (or else [pool] in semishared.conf) declares: label
  new devices, and let
           those that are not declared any more take nothing more
  check    compare the devices with what is declared
  drain    move all disks and bases of a DEVICE to the others; from then on it takes nothing, until `add`
  takes it back
  rebalance  move as little as makes no device much fuller than the others

exit codes: 0 all is well; 1 check: something is not as it is declared; drain, rebalance: something stays
where it is, and a row says why; 2 the host could not be asked, or cannot have such a pool
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from .. import NAME
from ..config import load
from ..errors import BadArguments, BadPool
from ..model.attributes import HOST_POOL
from ..model.device.classes import MEMORY
from ..model.device.steps import ListDevices, SetDevices
from ..opennebula.oned import Oned
from ..opennebula.xml import Host
from ..plan.device import choose
from ..units import human
from ..wire.session import Session
from . import command as on
from .command import put, put_json, table

Row = dict[str, Any]
VERBS = ("list", "add", "check", "drain", "rebalance")
MOVES = ("drain", "rebalance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument(
        "hosts", metavar="HOST", help="a host, or A,B (drain, rebalance: one), by their names in OpenNebula"
    )
    parser.add_argument(
        "device", metavar="DEVICE", nargs="?", help="drain: where the device is mounted, or its UUID"
    )
    parser.add_argument(
        "--rate", metavar="R", help="drain, rebalance: bytes per second at most, e.g. 40M (default: no limit)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="drain, rebalance: say what would be moved, and change nothing"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON object on stdout instead of lines; JSON lines of what is moved",
    )


def check(arguments: argparse.Namespace) -> None:
    """Raise BadArguments for what a verb cannot do: an option without effect would be taken for one that
    has.
    """
    verb = arguments.verb
    if (verb == "drain") != (arguments.device is not None):
        raise BadArguments(
            "drain needs the device: semishared pool drain HOST DEVICE"
            if verb == "drain"
            else f"{verb} takes no device"
        )
    if verb not in MOVES and (arguments.rate is not None or arguments.dry_run):
        raise BadArguments(f"{verb} moves nothing: --rate and --dry-run are for drain and rebalance")


def declaration(host: Host, default: str) -> tuple[choose.Declared, ...]:
    """Return the devices that a host is to have, none if nothing declares any; raise BadPool."""
    text = HOST_POOL.text(host) or default
    return () if text == "none" else choose.declared(text)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared pool`."""
    if os.geteuid() == 0:
        put(f"{NAME} pool: run this as oneadmin: files of root would be in the drivers' way", to=sys.stderr)
        return 2
    check(arguments)
    config, oned = load(), Oned()
    oned.require_admin()
    hosts, roots = on.named(oned.hosts(), arguments.hosts), on.roots(oned)
    if len(roots) > 1:
        raise BadPool(
            f"datastores lie in {len(roots)} places on each host: what is on a device could be "
            f"another's than is asked"
        )
    if arguments.verb in MOVES:
        from . import pool_moves

        return pool_moves.run(arguments, config, hosts, roots)
    survey = on.Survey()

    def one(session: Session, host: Host) -> Row:
        declared = declaration(host, config.pool_devices)
        found: Row = {"host": host.name, "devices": [], "changes": [], "wrong": []}
        for root in roots:
            if arguments.verb == "add":
                if not declared:
                    raise BadPool(f"nothing declares a pool of {host.name}")
                (done,) = session.run([SetDevices(root, tuple(device.word for device in declared), host.id)])
                found["changes"] += [
                    f"{path}: {what}" for what, paths in _dict(done).items() for path in paths
                ]
            (listed,) = session.run([ListDevices(root)])
            found["devices"] += _dict(listed)["devices"]
        found["wrong"] = [wrong.text for wrong in choose.differences(declared, found["devices"])]
        return found

    rows = list(survey.ask(hosts, "pool", config, one).values())
    if arguments.json:
        put_json({"hosts": rows, "errors": survey.errors})
    else:
        show(rows, arguments.verb)
        for error in survey.errors:
            put(f"{error['host']}: {error['error']}", to=sys.stderr)
    if survey.errors:
        return 2
    return int(arguments.verb == "check" and any(row["wrong"] for row in rows))


def _dict(answer: object) -> Row:
    assert isinstance(answer, dict)
    return answer


def _lost(device: Row) -> str:
    return f"{len(device['lost'])} disks are lost with what memory held" if device["lost"] else ""


def show(rows: list[Row], verb: str) -> None:
    """Print a table of devices, what was changed, and what is not as it is declared."""
    lines = [["HOST", "DEVICE", "CLASS", "WEIGHT", "SIZE", "FREE", "PROMISED", "DISKS", "BASES", "STATE"]]
    for row in rows:
        for device in row["devices"]:
            state = device["state"] or ("" if device["weight"] else "takes nothing more") or _lost(device)
            lines.append(
                [
                    row["host"],
                    device["path"],
                    device["class"] or "-",
                    f"{device['weight']:g}",
                    human(device["total"]),
                    human(device["free"]),
                    human(device["promised"]) if device["class"] == MEMORY else "-",
                    str(device["disks"]),
                    str(device["bases"]),
                    state or "ok",
                ]
            )
    if verb != "check":
        table(lines)
    for row in rows:
        if not row["devices"] and verb != "check":
            put(f"{row['host']}: no pool: disks and bases lie below DATASTORE_LOCATION")
        for change in row["changes"]:
            put(f"{row['host']}: {change}")
        for wrong in row["wrong"]:
            put(f"{row['host']}: {wrong}")
        if verb == "check" and not row["wrong"]:
            put(f"{row['host']}: {len(row['devices'])} devices, as declared")
