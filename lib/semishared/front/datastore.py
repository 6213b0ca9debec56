# SPDX-License-Identifier: Apache-2.0
"""The datastore actions: argv is an id, stdin is DS_DRIVER_ACTION_DATA, stdout is the answer.

docs/explanation/contract.md has the contract. plan/store/datastore.py plans them; here is what the front-end
does itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..errors import BadArguments, StoreUnavailable
from ..model.disk import names as disk_names
from ..model.exchange import Part
from ..model.refs import Step
from ..model.store import datastore_steps as d
from ..opennebula.driver_data import DriverData
from ..opennebula.report import Report
from ..plan.store import datastore as plans
from ..tools import standstill
from ..tools.mkfs import MKFS
from ..units import GiB
from .action import Action, carry_out

ACTIONS = plans.ACTIONS
CHANGES = ("cp", "mkfs", "clone", "rm")
"""Actions that would make an image below a mount point, or say of one that it is gone since it is not
there.
"""


class FrontEnd:
    """What the front-end does itself: steps to functions."""

    def __init__(self, action: Action, asked: plans.Asked) -> None:
        self._action = action
        self._asked = asked

    def do(self, step: Step) -> Any:
        """Carry out one step: its own, or one that names a verb of a store that is changed here."""
        if hasattr(self, type(step).__name__):
            return getattr(self, type(step).__name__)(step)
        from ..store import verbs

        return verbs.do(step)

    def CheckStore(self, step: d.CheckStore) -> Any:
        from ..store import verbs

        found = verbs.do(step)
        # What we have made anything in has a directory of ours: then nothing more is loaded.
        is_new = (
            not step.access.marker
            and not step.access.can.has_bridge
            and not os.path.lexists(f"{step.where}/{disk_names.SIDE}")
        )
        if is_new and self._action.name in CHANGES:
            from .mount_point import refuse

            refuse(
                self._asked.datastore, step.where, self._asked.image if self._action.name == "rm" else None
            )
        return found

    def MeasureSource(self, step: d.MeasureSource) -> int:
        from .upload import Upload

        return Upload(self._asked, self._action).size()

    def StoreUpload(self, step: d.StoreUpload) -> str:
        from .upload import Upload

        return Upload(self._asked, self._action).carry_out(step)

    def ListRoots(self, step: d.ListRoots) -> list[str]:
        from ..opennebula.oned import Oned

        found = {
            path
            for one in Oned().datastores()
            for path in (one.base_path, one.attribute("SEMISHARED_FS_ROOT"))
        }
        return sorted(path for path in found if path.startswith("/"))

    def MakeStore(self, step: d.MakeStore) -> None:
        try:
            os.makedirs(step.directory, exist_ok=True)
        except OSError as e:
            raise StoreUnavailable(f"{step.directory}: {e.strerror}") from None


def planned(action: Action) -> Part[str]:
    """Return the plan of a datastore action, which returns what goes to stdout."""
    if not action.argv:
        raise BadArguments("no id")
    standstill.limit_s = action.config.hosts_standstill_timeout_s
    data, most = DriverData(sys.stdin.buffer.read()), action.config.images_max_virtual_size_gib * GiB
    asked = plans.Asked(
        data.image, data.datastore, most, tuple(MKFS), os.urandom(16).hex(), os.uname().nodename
    )
    action.here = FrontEnd(action, asked).do
    return plans.planned(action.name, asked)


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a datastore action and return what goes to stdout."""
    under_way = Action(action, argv, report)
    return carry_out(planned(under_way), under_way)
