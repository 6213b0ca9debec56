# SPDX-License-Identifier: Apache-2.0
"""Say what a transfer action would do: which steps on which machine. Nothing is done and no machine is asked, but oned.

    semishared plan clone FE:SOURCE HOST:DIR/disk.N VM DATASTORE
    semishared plan ln|mkimage|mkswap|mv|mvds|cpds|delete ...     arguments as OpenNebula gives them: docs/reference/actions.md

Where the next steps depend on what a machine finds, it says so. Actions that begin with a look at the machine (snapshots,
migration, backup) have nothing to plan before it, and are refused.

exit codes: 0 planned, 1 the action would be refused, with its line, 2 oned could not be asked
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Iterable

from .. import NAME
from ..errors import OnedUnavailable, SemisharedError
from ..front import transfer
from ..model import steps as s
from ..opennebula.report import Report

if TYPE_CHECKING:
    from ..wire.session import Session

ACTIONS = ("clone", "ln", "mkimage", "mkswap", "mv", "mvds", "cpds", "delete")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("action", metavar="ACTION", help=" ".join(ACTIONS))
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT")


class _Unanswered:
    """What a machine would answer: whoever looks at it ends the plan."""

    def __getattribute__(self, name: str) -> object:
        raise _Open

    def __getitem__(self, key: object) -> object:
        raise _Open

    def __iter__(self) -> object:
        raise _Open

    def __bool__(self) -> bool:
        raise _Open


class _Open(Exception):
    """The rest depends on an answer."""


class _Noting:
    """A session whose steps are noted and not sent; what a machine would say to them is nobody's to look at."""

    def __init__(self, rehearsal: Rehearsal, host: str) -> None:
        self.host, self._rehearsal = host, rehearsal
        self.seq = -1
        self.moved: dict[str, int] = {}

    def __enter__(self) -> _Noting:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, steps: Iterable[s.Step], **_more: object) -> list[object]:
        return self._rehearsal.on(self.host, steps)


class Rehearsal(transfer.Action):
    """An action whose steps are noted and not done."""

    def __init__(self, name: str, argv: list[str]) -> None:
        super().__init__(name, argv, Report(name))
        self.noted: list[tuple[str, list[s.Step]]] = []

    def session(self, host: str, *, bulk: bool = False) -> Session:
        """Return a conversation in which nobody is at the other end."""
        return _Noting(self, host)  # type: ignore[return-value]

    def on(self, host: str, steps: Iterable[s.Step], answer: transfer.Answer | None = None) -> list[object]:
        """Note `steps`; their answers are nobody's to look at."""
        steps = list(steps)
        self.noted.append((host, steps))
        return [_Unanswered() for _ in steps]


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared plan`."""
    if arguments.action not in ACTIONS:
        known = "begins with a look at the machine" if arguments.action in transfer.ACTIONS else "is no transfer action"
        print(f"{NAME} plan: {arguments.action} {known}; {', '.join(ACTIONS)} can be planned", file=sys.stderr)
        return 1
    rehearsal = Rehearsal(arguments.action, arguments.words)
    is_open = False
    try:
        if arguments.action == "mv":
            _move(rehearsal)
        else:
            transfer.ACTIONS[arguments.action](rehearsal)
    except _Open:
        is_open = True
    except OnedUnavailable:
        raise
    except SemisharedError as e:
        print(f"{arguments.action}: {e.line()}", file=sys.stderr)
        return 1
    if arguments.json:
        rows = [{"host": host, "steps": [s.to_data(step) for step in steps]} for host, steps in rehearsal.noted]
        print(json.dumps({"action": arguments.action, "plan": rows, "open": is_open}, indent=1))
    else:
        show(rehearsal, is_open)
    return 0


def _move(rehearsal: Rehearsal) -> None:
    """Plan mv, whose two halves speak to each other."""
    from ..front.move import front_end_runs_vms
    from ..opennebula import args
    from ..opennebula.oned import Oned
    from ..plan import disks
    from ..wire.session import is_here

    request = args.Move.parse(rehearsal.argv)
    if request.disk:
        return
    oned, here = Oned(), (is_here(request.source.host), is_here(request.target.host))
    runs_vms = any(here) and front_end_runs_vms(oned)
    pair = disks.mv(request, oned.vm(request.source.vm), *here, runs_vms)
    if pair is not None:
        rehearsal.on(request.source.host, [pair[0]])
        if pair[1] is not None:
            rehearsal.on(request.target.host, [pair[1]])


def show(rehearsal: Rehearsal, is_open: bool) -> None:
    """Print the plan."""
    if not rehearsal.noted:
        print("nothing to do")
    for host, steps in rehearsal.noted:
        print(f"on {host}:")
        for step in steps:
            data = s.to_data(step)
            print(f"  {data.pop('step')}")
            for name, value in data.items():
                print(f"    {name} = {told(value)}")
    if is_open:
        print("what comes next depends on what it finds")


def told(value: object) -> str:
    """Return a value of a step for people: records on one line, without what is empty."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {told(item)}" for name, item in value.items() if item not in ("", None, [], {}))
    if isinstance(value, (list, tuple)):
        return " ".join(map(told, value)) or "none"
    return str(value)
