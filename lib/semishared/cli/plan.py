# SPDX-License-Identifier: Apache-2.0
"""Say what an action would do: which steps on which machine. Machines are looked at, as the action would; nothing is done.

    semishared plan clone FE:SOURCE HOST:DIR/disk.N VM DATASTORE
    semishared plan datastore/rm ID < DS_DRIVER_ACTION_DATA
    semishared plan ACTION ...           arguments and standard input as OpenNebula gives them: docs/reference/actions.md

Where the next steps depend on the answer of a step that acts, it ends, and says so.

exit codes: 0 planned, 1 the action would be refused, with its line, 2 oned could not be asked
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from .. import NAME
from ..errors import OnedUnavailable, SemisharedError
from ..front import datastore, transfer
from ..front.action import Action
from ..front.rehearsal import Noted, Script, rehearse
from ..model.steps import to_data
from ..opennebula.report import Report

OF_DATASTORES = "datastore/"
KNOWN = (*transfer.PLANNED, *(f"{OF_DATASTORES}{name}" for name in datastore.ACTIONS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("action", metavar="ACTION", help=" ".join(KNOWN))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared plan`."""
    if arguments.action not in KNOWN:
        print(f"{NAME} plan: {arguments.action} is no transfer action, and no datastore/ACTION; --help names them", file=sys.stderr)
        return 1
    _, is_of_datastore, name = arguments.action.rpartition(OF_DATASTORES)
    action = Action(name, arguments.words, Report(name))
    try:
        script = rehearse(datastore.planned(action) if is_of_datastore else transfer.PLANNED[name](action), action)
    except OnedUnavailable:
        raise
    except SemisharedError as e:
        print(f"{name}: {e.line()}", file=sys.stderr)
        return 1
    if arguments.json:
        rows = [as_data(message) for message in script.messages]
        print(json.dumps({"action": arguments.action, "plan": rows, "open": script.is_open, "stdout": script.answer}, indent=1))
    else:
        show(script)
    return 0


def as_data(message: Noted) -> dict[str, Any]:
    """Return a message as JSON data: its answers, if it was sent."""
    row: dict[str, Any] = {"host": message.machine, "steps": [to_data(step) for step in message.steps]}
    if message.answers is not None:
        row["answers"] = list(message.answers)
    more = {"during": message.during, "follows": message.follows}
    return {**row, **{name: value for name, value in more.items() if value}}


def show(script: Script) -> None:
    """Print a rehearsed plan."""
    if not script.messages:
        print("nothing to do")
    for message in script.messages:
        meanwhile = f", while {message.during} waits" if message.during else ""
        print(f"on {message.machine}{meanwhile}:" if message.answers is None else f"on {message.machine}, looked at now:")
        for number, step in enumerate(message.steps):
            data = to_data(step)
            print(f"  {data.pop('step')}")
            for name, value in data.items():
                print(f"    {name} = {told(value)}")
            if message.answers is not None:
                print(f"    -> {told(message.answers[number])}")
        if message.follows:
            print(f"  the bytes of {message.follows} follow")
    if script.answer:
        print(f"its answer: {script.answer}")
    if script.is_open:
        print("what comes next depends on what that answers")


def told(value: object) -> str:
    """Return a value of a step for people: records on one line, without what is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(item)}" for name, item in value.items() if item not in ("", None, [], {})) or "nothing"
    if isinstance(value, (list, tuple)):
        return " ".join(map(told, value)) or "none"
    return "nothing" if value is None else str(value)
