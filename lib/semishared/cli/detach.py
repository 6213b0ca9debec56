# SPDX-License-Identifier: Apache-2.0
"""Have disks that read from their store (SEMISHARED_LOCAL = remote-first) lie over bases of their hosts,
while their VMs run.

Bases are brought first, each image once to all hosts that need it. Then every guest goes on over its base; it
stands still once, for the moment in which both hold the same. A VM that is powered off takes part; any other
state is left alone, and said.

--due: disks of running VMs whose image, or its datastore, says SEMISHARED_DETACH = after-boot; for a timer:
`--print-timer` says what to write where, for systemd and for cron.

exit codes: 0 all that were meant are detached, or were before, or would be (--dry-run); 1 some are not, and a
row says why; 2 nothing was begun: oned or the arguments
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Dict, List, Optional, Tuple

from .. import NAME
from ..config import load
from ..errors import BadArguments, BadAttribute
from ..front import noted_datastores, publication, trail
from ..front.detach import detach
from ..install import timer
from ..install.front_end import ONEADMIN
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..opennebula.xml import Vm
from ..plan.base.sharing import TRANSPORTS
from ..plan.care import clusters
from ..plan.disk import detach as plan
from ..plan.disk.detach import Row
from . import command as on
from . import progress
from .command import argument, flag, put, put_all, warn

ARGUMENTS = (
    argument("vms", nargs="?", metavar="VM[,VM...]", help="ids or names", one_of="vms!"),
    flag("--all", "all VMs that run or are powered off", one_of="vms!"),
    argument("--host", metavar="HOST", help="those of them that are on this host", one_of="vms!"),
    flag("--due", "running VMs with SEMISHARED_DETACH = after-boot, as a timer does it", one_of="vms!"),
    flag("--print-timer", "print units of systemd, and a line of cron, for --due", one_of="vms!"),
    on.rate_limit(
        "bytes per second that one host sends, and copies on its disks, at most, e.g. 40M (default: no limit)"
    ),
    argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="of bases, as `semishared stage` has it (default: auto)",
    ),
    flag("--dry-run", "say which disks would be detached, and which bases would come, and change nothing"),
    on.JSON_LINES,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared detach`."""
    if arguments.print_timer and (arguments.json or arguments.dry_run):
        raise BadArguments("--print-timer prints files: it has no --json and no --dry-run")
    if arguments.print_timer:
        return print_timer(os.path.realpath(sys.argv[0]))
    on.refuse_root()
    limit, oned = on.rate(arguments.rate), on.administrator()
    disks = due(oned, is_dry=arguments.dry_run) if arguments.due else None
    if arguments.host is not None and arguments.host not in [host.name for host in oned.hosts()]:
        raise BadArguments(f"no host {arguments.host!r} in OpenNebula")
    ids = list(disks) if disks is not None else [vm.id for vm in meant(oned.vms(), arguments)]
    with progress.view(arguments) as view:
        rows = detach(
            ids,
            view.tell,
            rate=limit,
            transport=arguments.transport,
            disks=disks,
            is_dry=arguments.dry_run,
        )
    # A VM that the command names must be done; without names, VMs that cannot be detached are skipped.
    bad = ("failed", "skipped") if arguments.vms else ("failed",)
    failed = [row for row in rows if row["how"] in bad and not (row["how"] == "skipped" and is_done(row))]
    detached = sum(row["how"] == "detached" for row in rows)
    for row in rows if not arguments.dry_run else ():
        if row["how"] in ("detached", "failed"):
            result = trail.OK if row["how"] == "detached" else row.get("id") or row["how"]
            trail.note("detach disk", f"VM {row['vm']} disk {row['disk']} on {row['host']}", result)
    outcome = {"dry_run": arguments.dry_run, "detached": detached, "failed": len(failed), "rows": rows}
    view.summary(lambda: show(rows, arguments.vms is None), outcome)
    if not arguments.dry_run:
        publication.after(oned, load(), ended(rows))
    return int(bool(failed))


def ended(rows: List[Row]) -> Dict[int, str]:
    """Return the VMs that have changed, or were to, each with what it failed with ('': nothing)."""
    found: Dict[int, str] = {}
    for row in rows:
        if row["how"] in ("detached", "failed"):
            error = f"detach: {row.get('id') or ''} {row['why']}" if row["how"] == "failed" else ""
            found[row["vm"]] = found.get(row["vm"]) or error
    return found


def print_timer(command: str) -> int:
    """Print the files of a timer for `command` detach --due, as `install.sh --detach-timer` writes them."""
    for path, text in {**timer.units(command, ONEADMIN), **timer.crontab(command, ONEADMIN)}.items():
        put(f"# {path}")
        put_all(text + "\n")
    enable = f"systemctl daemon-reload && systemctl enable --now {timer.NAMED}.timer"
    put(f"# with systemd: {enable}; with cron the last of these alone")
    return 0


def is_done(row: Row) -> bool:
    """Tell whether a VM was left alone because none of its disks reads from a store."""
    return bool(row["why"] == plan.NOTHING)


def meant(vms: List[Vm], arguments: argparse.Namespace) -> List[Vm]:
    """Return the VMs that the arguments name; raise BadArguments for one unknown to OpenNebula."""
    if arguments.vms is not None:
        return clusters.named(vms, arguments.vms)
    return [vm for vm in vms if not plan.why_not(vm) and arguments.host in (None, vm.host)]


def due(oned: Oned, *, is_dry: bool = False) -> Dict[int, Tuple[int, ...]]:
    """Return the disks to detach without request, by VM; warn of wrong attributes.

    What the datastores say is noted, unless `is_dry`: the timer's other command asks for them only if a VM
    has changed.
    """
    images = {image.id: image for image in oned.images()}
    datastores = {store.id: store for store in oned.datastores()}
    if not is_dry:
        noted_datastores.note_all(datastores.values())
    found = {}
    for vm in oned.vms():
        try:
            disks = () if plan.why_not(vm) else plan.due(oned.vm(vm.id), images, datastores)
        except BadAttribute as e:
            warn(f"{NAME} detach: VM {vm.id}: {e.line()}")
            continue
        if disks:
            found[vm.id] = disks
    return found


def show(rows: List[Row], is_short: bool) -> None:
    """Print the rows for a person; `is_short`: without VMs that have nothing to detach."""
    lines = [line for line in (text_of(row, is_short) for row in rows) if line]
    for line in lines or ["no VM has a disk that reads from a store"]:
        put(printable(line))


def text_of(row: Row, is_short: bool) -> Optional[str]:
    """Return a row's line."""
    if is_short and is_done(row):
        return None
    disk = f" disk {row['disk']} (image {row['image']})" if row["disk"] >= 0 else ""
    how = f"{row['how']}: {row['why']}" if row["why"] else str(row["how"])
    if row["how"] == "detached":
        how = f"detached in {row['seconds']:.1f} s"
    return f"VM {row['vm']} on {row['host'] or 'no host'}{disk}: {how}"
