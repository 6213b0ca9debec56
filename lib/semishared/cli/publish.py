# SPDX-License-Identifier: Apache-2.0
"""Write into OpenNebula where the disks of VMs are, as Sunstone shows it: the vector SEMISHARED of a VM, and
the line SEMISHARED_STATE of a persistent image that lives on a host.

  publish                all VMs in system datastores of ours
  publish VM[,VM...]     these, by id or name
  publish --due          those that have changed, at most 100: for the timer (install.sh --detach-timer)

Nothing else of a VM's template is touched, also if its user saves at the same moment. An action on a VM notes
on this front-end that it has changed; detach and commit publish at their end.

exit codes: 0 all is written, or was before, or waits for OpenNebula's own work; 1 a host did not answer, or a
VM could not be written; 2 oned could not be asked
"""

from __future__ import annotations

import argparse
import time

from ..config import load
from ..errors import ToolTimeout
from ..front import publication, vm_notes
from ..front.publication import FAILED, IN_ONE, PUBLISHED, PUT_OFF
from ..named import to_data
from ..plan.care import clusters
from . import command as on
from .command import argument, flag, put, warn

ARGUMENTS = (
    argument("vms", nargs="?", metavar="VM[,VM...]", help="ids or names; without it all", one_of="which"),
    flag("--due", "those that have changed, as a timer does it", one_of="which"),
    on.JSON,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared publish`."""
    on.refuse_root()
    due = vm_notes.due(time.time())[:IN_ONE] if arguments.due else []
    if arguments.due and not due:
        return _told(arguments, [], {})
    oned, config = on.administrator(), load()
    try:
        with publication.publisher(oned, config) as work:
            if arguments.due:
                rows = work.publish(due)
            elif arguments.vms is not None:
                rows = work.publish([vm.id for vm in clusters.named(oned.vms(), arguments.vms)])
            else:
                rows = work.publish_all()
    except ToolTimeout:
        if arguments.due:
            return 0  # the one that is at work does it
        raise
    return _told(arguments, rows, work.errors)


def _told(arguments: argparse.Namespace, rows: list[publication.Row], errors: dict[str, str]) -> int:
    if arguments.json:
        said = [{"host": machine, "error": line} for machine, line in errors.items()]
        on.put_json({"vms": to_data(rows), "errors": said})
        return int(any(row.how == FAILED for row in rows))
    for row in rows:
        # The timer's lines go to a log: what was as before is not said there.
        if row.how in (PUBLISHED, PUT_OFF) or not arguments.due:
            line = f"VM {row.vm}: {row.how}{': ' * bool(row.why)}{row.why}"
            if row.how != FAILED:
                put(line)
        if row.how == PUBLISHED:
            for name, text in sorted(row.fields.items()):
                put(f"  {name} = {text}")
    for row in rows:
        if row.how == FAILED:
            warn(f"VM {row.vm}: {row.why}")
    return int(any(row.how == FAILED for row in rows))
