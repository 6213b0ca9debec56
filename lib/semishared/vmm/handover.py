# SPDX-License-Identifier: Apache-2.0
"""A hypervisor action on the VM's host: planned, carried out, then this process becomes the stock script.

plan/vm/hypervisor.py plans. Rehearsed it looks as the action would, and changes nothing (model/rehearsal.py).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ..model.disk import names as disk_names
from ..model.exchange import Exchange, Here, Say, drive
from ..opennebula.report import Report, caught
from ..plan.vm.hypervisor import PLANNERS, READ, Asked, forwarded, planned
from ..table import carry_out
from ..tools.ending import ended
from .on_host import Work

if TYPE_CHECKING:
    from ..model.base.steps import Rehearsed, RehearseHypervisor


def run(here: str, argv: list[str]) -> int:
    """Run action `argv[0]` with the arguments that follow; `here` is the directory of the vmm scripts.

    Not by entry.run: the stock script must not inherit a umask of this suite.
    """
    name = argv[0] if argv else ""

    def act(report: Report) -> int:
        asked = Asked(name, tuple(argv[1:]), sys.stdin.buffer.read() if name in READ else b"")
        work = Work(here, asked.stdin, report.info)

        def do(wanted: Exchange) -> Any:
            if isinstance(wanted, Here):
                return carry_out(wanted.step, work)
            assert isinstance(wanted, Say)
            for level, text in wanted.lines(*wanted.about):
                getattr(report, level)(text)
            return None

        drive(planned(asked), do)
        return 0

    return ended(caught(name if name in PLANNERS else "with_records", act))


def rehearse(step: RehearseHypervisor) -> Rehearsed:
    """Return what the action would do; raise what the action would raise."""
    from ..model.base.steps import Rehearsed, RehearsedMessage
    from ..model.rehearsal import rehearsed
    from ..model.vm.hypervisor_steps import look_instead

    asked, work = Asked(step.action, step.argv, step.stdin.encode("utf-8", "surrogateescape")), Work()

    def do(wanted: Exchange) -> Any:
        assert isinstance(wanted, Here)
        return carry_out(wanted.step, work)

    # The vmm scripts decide by this, too.
    is_ours = os.path.lexists(disk_names.records(asked.vm_dir))
    found = rehearsed(planned(asked) if is_ours else forwarded(asked), do, look_instead)
    messages = [RehearsedMessage(**message.to_data()) for message in found.messages]
    return Rehearsed(messages, found.is_open, found.answer)
