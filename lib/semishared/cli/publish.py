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
from ..front.publication import FAILED, IN_ONE, PUBLISHED, PUT_OFF, WOULD
from ..named import to_data
from ..plan.care import clusters
from . import command as on
from .command import argument, flag, put, warn

ARGUMENTS = (
    argument("vms", nargs="?", metavar="VM[,VM...]", help="ids or names; without it all", one_of="which"),
    flag("--due", "those that have changed, as a timer does it", one_of="which"),
    flag("--dry-run", "say what would be written, and write nothing"),
    on.JSON,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared publish`."""
    on.refuse_root()
    due = vm_notes.due(time.time())[:IN_ONE] if arguments.due else []
    if arguments.due and not due:
        return _told(arguments, [], {}, {})
    oned, config = on.administrator(), load()
    try:
        with publication.publisher(oned, config, is_dry=arguments.dry_run) as work:
            if arguments.due:
                rows = work.publish(due)
            elif arguments.vms is not None:
                rows = work.publish([vm.id for vm in clusters.named(oned.vms(), arguments.vms)])
            else:
                rows = work.publish_all()
    except ToolTimeout:
        if arguments.due:
            return _told(arguments, [], {}, {})  # the one that is at work does it
        raise
    return _told(arguments, rows, work.errors, work.images)


def _told(
    arguments: argparse.Namespace,
    rows: list[publication.Row],
    errors: dict[str, str],
    images: dict[int, str],
) -> int:
    code = int(any(row.how == FAILED for row in rows))
    if arguments.json:
        said = [{"host": machine, "error": line} for machine, line in errors.items()]
        lines = {str(image): text for image, text in images.items()}
        on.put_json({"dry_run": arguments.dry_run, "vms": to_data(rows), "images": lines, "errors": said})
        return code
    for row in rows:
        # The timer's lines go to a log: what was as before is not said there.
        if row.how in (PUBLISHED, WOULD, PUT_OFF) or not arguments.due:
            line = f"VM {row.vm}: {row.how}{': ' * bool(row.why)}{row.why}"
            if row.how != FAILED:
                put(line)
        if row.how in (PUBLISHED, WOULD):
            for name, text in sorted(row.fields.items()):
                put(f"  {name} = {text}")
    for image, text in images.items() if arguments.dry_run else ():
        put(f"image {image}: {f'would say: {text}' if text else 'its line would be taken back'}")
    for row in rows:
        if row.how == FAILED:
            warn(f"VM {row.vm}: {row.why}")
    return code
