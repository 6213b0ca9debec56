# SPDX-License-Identifier: Apache-2.0
"""Do with a set of VMs what can be done with one: a cluster boots, lets go of its store, commits, and says
where it is.

  cluster boot       have its VMs run: their bases come first, in one session, then all start at once
  cluster detach     have disks that read from their store lie over bases of their hosts, while the VMs run
  cluster commit     bring what local disks of persistent images hold to their images, also while the VMs run
  cluster status     the state of each VM, and where its disks live

The set is named by VMs, a label, a VM group, or a service of OneFlow. VMs without a disk of ours are left
alone, and said. Progress goes to the terminal, else to stdout as JSON lines, of which the last is the
summary.

exit codes: 0 done for all; 1 for some it is not, and the row of each says why; 2 nothing was begun: oned or
the arguments
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List

from .. import NAME
from ..config import COMPRESSORS, load
from ..errors import BadArguments, SemisharedError
from ..front import detach as front_detach
from ..front.action import carry_out
from ..front.clusters import Boot, Row, row
from ..front.staging_round import Wish
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..opennebula.states import name_of
from ..opennebula.xml import Vm
from ..plan.care import clusters as plan
from ..plan.disk import detach as detaching
from . import command as on
from . import progress, status
from .command import argument, put
from .commit import committing, of_vm

FINE = ("booted", "running", "detached", "committed", "seen")
"""Results of a VM with which all is well."""
COMMITS = 8
"""VMs whose disks are committed at the same time; with a rate limit it is one VM, which has all of it."""
OPTIONS = {
    "hosts": ("boot",),
    "rate": ("boot", "detach", "commit"),
    "compress": ("boot",),
    "timeout": ("boot",),
}
"""The verbs that an option is for."""
TIMEOUT_S, LONGEST_S = 600, 7 * 86400
NOT_OURS = f"no disk of it is of driver {NAME}"
NO_DIFF = "no disk of it is local and of a persistent image"
NOTHING_TO_DO = (NOT_OURS, NO_DIFF, detaching.NOTHING)
"""Reasons to skip a VM with which all is well."""


def check(arguments: argparse.Namespace) -> None:
    """Raise BadArguments for options that a verb does not have: they would be taken for effective."""
    for option, verbs in OPTIONS.items():
        if getattr(arguments, option) is not None and arguments.verb not in verbs:
            raise BadArguments(f"{arguments.verb} has no --{option}: it is for {' and '.join(verbs)}")
    if arguments.rate is not None:
        on.rate(arguments.rate)
    if arguments.timeout is not None and not 1 <= arguments.timeout <= LONGEST_S:
        raise BadArguments(f"--timeout {arguments.timeout}: from 1 to {LONGEST_S} seconds")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared cluster`."""
    check(arguments)
    on.refuse_root()
    oned = on.administrator()
    # VMs in oned's pool lack some of their attributes.
    vms = [oned.vm(vm.id) for vm in chosen(oned, arguments)]
    ours = [vm for vm in vms if plan.is_ours(vm)]
    others = [row(vm, "skipped", NOT_OURS) for vm in vms if not plan.is_ours(vm)]
    with progress.view(arguments) as view:
        for found in others:
            view.tell(event="vm", **found)
        rows = VERBS[arguments.verb](oned, ours, arguments, view.tell) if ours else []
    failed = [found for found in rows if not is_fine(found)]
    # A VM that the command names must be done: skipping it is a failure.
    failed += others if arguments.vms else []
    rows += others
    outcome = {"verb": arguments.verb, "vms": len(vms), "failed": len(failed), "rows": rows}
    view.summary(lambda: show(rows), outcome)
    return int(bool(failed))


def is_fine(found: Row) -> bool:
    """Tell whether the result of a VM, or of its disk, is as intended."""
    return found["how"] in FINE or (found["how"] == "skipped" and found["why"] in NOTHING_TO_DO)


def chosen(oned: Oned, arguments: argparse.Namespace) -> List[Vm]:
    """Return the VMs of the set; raise BadArguments for an empty set, or for an unknown VM."""
    vms = oned.vms()
    if arguments.vms is not None:
        return plan.named(vms, arguments.vms)
    if arguments.label is not None:
        return plan.labelled(vms, arguments.label)
    if arguments.vmgroup is not None:
        group = plan.one_of(oned.vm_groups(), arguments.vmgroup, "VM group")
        return plan.members(vms, plan.of_group(group), f"VM group {arguments.vmgroup!r}")
    service = plan.one_of(oned.documents(plan.SERVICE), arguments.service, "service of OneFlow")
    return plan.members(plan.owned(vms, service), plan.of_service(service), f"service {arguments.service!r}")


Tell = Callable[..., None]


def boot(oned: Oned, vms: List[Vm], arguments: argparse.Namespace, tell: Tell) -> List[Row]:
    """Have the VMs run."""
    config = load()
    wish = Wish("auto", arguments.compress or config.staging_compress, limit(arguments), True)
    hosts = on.named(oned.hosts(), arguments.hosts) if arguments.hosts is not None else None
    return Boot(oned, config, tell, wish, arguments.timeout or TIMEOUT_S).run(vms, hosts)


def limit(arguments: argparse.Namespace) -> int:
    """Return the rate limit of the set, in bytes per second, 0 for none."""
    return on.rate(arguments.rate) if arguments.rate else load().staging_rate


def detach(oned: Oned, vms: List[Vm], arguments: argparse.Namespace, tell: Tell) -> List[Row]:
    """Detach remote-first disks onto bases of their hosts, with one session for all; a row for each disk."""
    names = {vm.id: vm.name for vm in vms}
    rows = front_detach.detach(list(names), tell, rate=limit(arguments))
    return [{**found, "name": names[found["vm"]]} for found in rows]


def commit(oned: Oned, vms: List[Vm], arguments: argparse.Namespace, tell: Tell) -> List[Row]:
    """Commit local changes of persistent disks to their images, several VMs at once; a row for each disk."""
    most = on.rate(arguments.rate or None)
    with ThreadPoolExecutor(1 if most else COMMITS) as pool:
        return [found for rows in pool.map(lambda vm: committed(vm, tell, most), vms) for found in rows]


def committed(vm: Vm, tell: Tell, most: int) -> List[Row]:
    """Commit the disks of a VM, at most `most` bytes per second, 0 for no limit; return a row for each."""
    action = committing(vm)
    rows = []
    try:
        # Each thread needs a connection to oned of its own.
        for disk, part in of_vm(Oned(), vm, action, most=most):
            began = time.monotonic()
            try:
                said, how, why = carry_out(part, action), "committed", ""
            except SemisharedError as e:
                said, how, why = "", "failed", e.line()
            rows.append({**row(vm, how, why, time.monotonic() - began), "disk": disk, "said": said})
            tell(event="vm", **rows[-1])
    except SemisharedError as e:
        rows.append(row(vm, "failed", e.line()))
    return rows or [row(vm, "skipped", NO_DIFF)]


def status_of(oned: Oned, vms: List[Vm], arguments: argparse.Namespace, tell: Tell) -> List[Row]:
    """Say where the VMs and their disks are; oned and the machine must agree about each disk."""
    cloud = status.Cloud()
    places = {vm.host for vm in vms}
    cloud.ask([host for host in cloud.hosts if host.name in places])
    silent = {error["host"]: error["error"] for error in cloud.survey.errors}
    rows = []
    for vm in vms:
        disks = cloud.rows(vm)
        missing = [f"disk {disk['disk']}: {disk['missing']}" for disk in disks if disk["missing"]]
        why = silent.get(vm.host, "") or "; ".join(missing)
        state = "running" if vm.is_running else name_of(vm.state).lower()
        found = {**row(vm, "failed" if why else "seen", why), "state": state, "disks": disks}
        rows.append(found)
        tell(event="vm", **found)
    return rows


VERBS: Dict[str, Callable[[Oned, List[Vm], argparse.Namespace, Tell], List[Row]]] = {
    "boot": boot,
    "detach": detach,
    "commit": commit,
    "status": status_of,
}
ARGUMENTS = (
    argument("verb", choices=sorted(VERBS), metavar="|".join(VERBS)),
    argument("--vms", metavar="VM[,VM...]", help="ids or names", one_of="set!"),
    argument("--label", metavar="L", help="VMs with this label", one_of="set!"),
    argument("--vmgroup", metavar="G", help="VMs of a VM group, by its id or name", one_of="set!"),
    argument("--service", metavar="S", help="VMs of a service of OneFlow, by its id or name", one_of="set!"),
    argument(
        "--hosts",
        metavar="A,B",
        help="boot: where VMs without a host are to run (default: where the scheduler places them)",
    ),
    on.rate_limit(
        "boot, detach: bytes per second that one host sends, and copies, at most (default: "
        "semishared.conf); commit: that all VMs together send to their store (default: no limit)"
    ),
    argument(
        "--compress", choices=COMPRESSORS, help="boot: of bases on their way (default: semishared.conf)"
    ),
    argument(
        "--timeout", type=int, metavar="S", help=f"boot: seconds for all VMs to run (default: {TIMEOUT_S})"
    ),
    on.JSON_LINES,
)


def show(rows: List[Row]) -> None:
    """Print a line for each VM, or each of its disks, and one for all."""
    for found in rows:
        put(printable(line(found)))
    hows = [found["how"] for found in rows]
    counts = ", ".join(f"{hows.count(how)} {how}" for how in sorted(set(hows)))
    put(f"{len({found['vm'] for found in rows})} VMs: {counts}")


def line(found: Dict[str, Any]) -> str:
    """Return a VM's line."""
    disks = [f"disk {disk['disk']} {status.lives(disk)}" for disk in found.get("disks", ())]
    said = found.get("state") or found.get("said") or found["how"]
    parts = "; ".join([said, *disks, *([found["why"]] if found["why"] else [])])
    seconds = f" in {found['seconds']:.1f} s" if found.get("seconds") else ""
    disk = f" disk {found['disk']}" if found.get("disk", -1) >= 0 else ""
    where = f"VM {found['vm']} ({found['name']}) on {found['host'] or 'no host'}{disk}"
    return f"{where}: {parts}{seconds}"
