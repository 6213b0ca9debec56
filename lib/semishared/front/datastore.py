# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: argv is an id, stdin is DS_DRIVER_ACTION_DATA, stdout is the answer.

docs/explanation/contract.md has the contract, and plan/store/datastore.py plans them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .. import table
from ..errors import BadArguments
from ..model.disk import names as disk_names
from ..model.exchange import Part
from ..model.refs import Step
from ..model.store.datastore_steps import CheckStore
from ..named import NamedTuple
from ..opennebula.report import Report
from ..opennebula.xml import DriverData
from ..plan.store import datastore as plans
from ..tools import progress
from ..tools.qemu_img import MKFS
from ..units import GiB
from .action import Action, carry_out

ACTIONS = plans.ACTIONS
CHANGES = ("cp", "mkfs", "clone", "rm")
"""Actions that could make an image below a mount point, or take an image there for removed."""


class Work(NamedTuple):
    """One action, for the steps that the front-end carries out itself (table.py)."""

    action: Action
    asked: plans.Asked

    def do(self, step: Step) -> Any:
        """Carry out a step; raise StoreAbsent if a store seems to be no more than its mount point."""
        found = table.carry_out(step, self)
        if isinstance(step, CheckStore) and self.action.name in CHANGES:
            # A store in which we have made anything has our directory: then nothing more is loaded.
            marked = step.access.marker or step.access.can.has_bridge
            if not marked and not os.path.lexists(f"{step.where}/{disk_names.SIDE}"):
                from .mount_point import refuse

                removed = self.asked.image if self.action.name == "rm" else None
                refuse(self.asked.datastore, step.where, removed)
        return found


def planned(action: Action) -> Part[str]:
    """Return the plan of a datastore action, which returns what goes to stdout."""
    if not action.argv:
        raise BadArguments("no id")
    progress.limit_s = action.config.hosts_standstill_timeout_s
    data, most = DriverData(sys.stdin.buffer.read()), action.config.images_max_virtual_size_gib * GiB
    asked = plans.Asked(
        data.image, data.datastore, most, tuple(MKFS), os.urandom(16).hex(), os.uname().nodename
    )
    action.here = Work(action, asked).do
    return plans.planned(action.name, asked)


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a datastore action and return what goes to stdout."""
    under_way = Action(action, argv, report)
    return carry_out(planned(under_way), under_way)
