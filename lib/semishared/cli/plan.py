# SPDX-License-Identifier: Apache-2.0
"""Say what an action would do: which steps on which machine. Machines are looked at, as the action would;
nothing is done.

    semishared plan clone FE:SOURCE HOST:DIR/disk.N VM DATASTORE
    semishared plan datastore/rm ID < DS_DRIVER_ACTION_DATA
    semishared plan vmm/deploy FILE HOST VM HOST < FILE
    semishared plan ACTION ...           arguments and standard input as OpenNebula gives them:
    docs/reference/actions.md

Where the next steps depend on the answer of a step that acts, it ends, and says so.

exit codes: 0 planned, 1 the action would be refused, with its line, 2 oned could not be asked
"""

from __future__ import annotations

import argparse
import base64
import difflib
import re
import sys
from typing import Any, Dict

from .. import NAME
from ..errors import BadArguments, OnedUnavailable, SemisharedError
from ..front import datastore, transfer
from ..front.action import Action, Sessions
from ..model.exchange import On, Part
from ..model.refs import Step
from ..model.rehearsal import Script, rehearsed
from ..named import to_data
from ..opennebula.args import HOST
from ..opennebula.report import Report
from ..plan.vm import hypervisor
from ..tools.curl import masked
from .command import JSON, argument, put, put_all, put_json, warn

KNOWN = (
    *transfer.PLANNED,
    *(f"datastore/{name}" for name in datastore.ACTIONS),
    *(f"vmm/{name}" for name in hypervisor.PLANNERS),
)


ARGUMENTS = (
    JSON,
    argument("action", metavar="ACTION", help=" ".join(KNOWN)),
    argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENT"),
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared plan`."""
    if arguments.action not in KNOWN:
        what = f"{arguments.action} is no transfer action, no datastore/ACTION and no vmm/ACTION"
        warn(f"{NAME} plan: {what}; --help names them")
        return 1
    kind, _, name = arguments.action.rpartition("/")
    action, came = Action(name, arguments.words, Report(name)), ""
    try:
        if kind == "vmm":
            if name in hypervisor.READ:
                came = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
            asked = hypervisor.Asked(name, tuple(arguments.words), came.encode("utf-8", "surrogateescape"))
            action.report.subject = lambda: asked.subject({})
            found = rehearse_on_host(action, came)
        else:
            part = datastore.planned(action) if kind else transfer.PLANNED[name](action)
            found = rehearse(part, action).to_data()
    except OnedUnavailable:
        raise
    except SemisharedError as e:
        action.report.fail(e)
        return 1
    found = without_passwords(found)
    if arguments.json:
        put_json({"action": arguments.action, **found})
    else:
        show(found, {"stdin": came, "message": _message(arguments.words)})
    return 0


def without_passwords(value: Any) -> Any:
    """Return what is to be printed with each URL in it as lines show it: an upload's may have a password."""
    if isinstance(value, dict):
        return {name: without_passwords(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_passwords(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def _message(words: list[str]) -> str:
    """Return the driver message among the arguments of attach_disk."""
    try:
        return base64.b64decode(words[hypervisor.MESSAGE]).decode("utf-8", "replace")
    except (IndexError, ValueError):
        return ""


def show(found: Dict[str, Any], xml: Dict[str, str]) -> None:
    """Print a rehearsed plan; of XML only how it differs from its input in `xml`."""
    if not found["plan"]:
        put("nothing to do")
    above = ""
    for message in found["plan"]:
        during, answers = message.get("during"), message.get("answers")
        when = f", while {during} waits" if during else ", looked at now" if answers is not None else ""
        title = f"on {message['host']}{when}:"
        if title != above:
            put(title)
        above = title
        for number, step in enumerate(message["steps"]):
            put(f"  {step.pop('step')}")
            for name, value in step.items():
                if name in XML:
                    for line in changes(xml.get(name, ""), value):
                        put(f"    {name} {line}")
                else:
                    put(f"    {name} = {told(value)}")
            if answers is not None:
                put(f"    -> {told(answers[number])}")
                xml.update({"xml": answers[number]} if is_xml(answers[number]) else {})
        if "follows" in message:
            put(f"  the bytes of {message['follows']} follow")
    if found["stdout"]:
        put_all(f"its answer: {found['stdout']}")
    if found["open"]:
        put("what comes next depends on what that answers")


XML = ("stdin", "message", "xml")
"""Fields of hypervisor steps with changed XML (model/vm/hypervisor_steps.py)."""


def is_xml(value: object) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("<")


def changes(came: str, goes: str) -> list[str]:
    """Return the elements of changed XML that differ, `-` before and `+` after."""
    if not goes:
        return ["= as it came"] if came else []
    lines = list(difflib.unified_diff(_elements(came), _elements(goes), n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@")]


def _elements(text: str) -> list[str]:
    return re.sub(r"(?<!]])>\s*<(?!!)", ">\n<", text.strip()).splitlines()


def told(value: object) -> str:
    """Return a value of a step for people: records on one line, without empty fields; XML as its length."""
    if isinstance(value, dict):
        parts = (f"{name} {told(item)}" for name, item in value.items() if item not in ("", None, [], {}))
        return ", ".join(parts) or "nothing"
    if isinstance(value, (list, tuple)):
        return " ".join(map(told, value)) or "none"
    if is_xml(value):
        return f"XML of {len(str(value))} characters"
    return "nothing" if value is None else str(value)


def rehearse(plan: Part[str | None], action: Action) -> Script:
    """Rehearse the plan of a transfer or datastore action; raise what would refuse the action."""
    with Sessions(action) as sessions:
        return rehearsed(plan, sessions.do, _look)


def _look(step: Step) -> Step | None:
    from ..model.store.datastore_steps import LOOKS

    return step if type(step).__name__ in LOOKS else None


def rehearse_on_host(action: Action, stdin: str) -> Dict[str, Any]:
    """Have the host in the last argument rehearse a hypervisor action; raise what would refuse it there."""
    from ..model.base.steps import RehearseHypervisor

    host = action.argv[-1] if action.argv else ""
    if not re.match(HOST, host):
        raise BadArguments(f"the last argument is no host name: {host!r}")
    with Sessions(action) as sessions:
        (found,) = sessions.run(On(host, (RehearseHypervisor(action.name, tuple(action.argv), stdin),)))
    said: Dict[str, Any] = to_data(found)
    for message in said["plan"]:
        message["host"] = host
    return said
