# SPDX-License-Identifier: Apache-2.0
"""A hypervisor action on the VM's host: planned, carried out, then this process becomes the stock script.

plan/vm/hypervisor.py plans. Rehearsals: rehearsal.py.
"""

from __future__ import annotations

import sys
from typing import Any

from ..model.exchange import Exchange, Here, Say, drive
from ..opennebula.report import Report, caught
from ..plan.vm.hypervisor import PLANNERS, READ, Asked, planned
from ..table import carry_out
from ..tools.ending import ended
from .on_host import Work


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
