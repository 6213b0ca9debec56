# SPDX-License-Identifier: Apache-2.0
"""Rehearse an action for `semishared plan`, here or on its host (model/rehearsal.py)."""

from __future__ import annotations

import re
from typing import Any, Dict

from ..errors import BadArguments
from ..model.exchange import On, Part
from ..model.refs import Step
from ..model.rehearsal import Script, rehearsed
from ..named import to_data
from ..opennebula.args import HOST
from .action import Action, Sessions


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
