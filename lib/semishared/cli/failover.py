# SPDX-License-Identifier: Apache-2.0
"""Have the VMs of a lost host come up elsewhere: shut the host out of all stores first, then have OpenNebula
reschedule them.

A VM whose disks are all in place or clones on the store goes on with its data. One with disks on the host
itself waits, unless SEMISHARED_ON_HOST_FAILURE of each of them says `recreate`. Those that wait are named,
with the reason. Nothing is rescheduled of a host that comes back in the meantime, that answers though it is
disabled, or that cannot be shut out.

--hook: started by OpenNebula's hook for hosts in state ERROR, which gives the host's template on standard
input; install.sh leaves its template beside this command.

exit codes: 0 all of its VMs are rescheduled, or the host came back, 1 some wait, 2 it is not shut out, or
oned could not be asked
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Iterator

from ..config import load
from ..errors import BadArguments, SemisharedError
from ..front import fence_facts, trail, vm_notes
from ..front.fence import Fence
from ..install import next_steps
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..opennebula.states import HostState as State
from ..opennebula.states import VmState
from ..opennebula.values import decode
from ..opennebula.xml import Host, Vm
from ..plan.vm import failover
from .command import JSON_FOR_LINES, Row, administrator, argument, flag, put, put_all, put_json

WAIT_S = 300
"""OpenNebula's own hook waits as long, with the arguments on its page."""
LONGEST_S = 7 * 86400
UNSAID = (State.INIT, State.DISABLED, State.MONITORING_INIT, State.MONITORING_DISABLED)
"""States that do not say whether the host is seen."""
BY_NAME = "by its name in OpenNebula; nobody waits for it to come back"
ARGUMENTS = (
    argument("host", metavar="HOST", nargs="?", help=BY_NAME, one_of="what!"),
    flag("--hook", "the host that standard input names, after --wait", one_of="what!"),
    flag("--print-hook", "print the template for onehook create", one_of="what!"),
    argument(
        "--wait",
        metavar="SECONDS",
        type=int,
        default=WAIT_S,
        help=f"with --hook: how long (default: {WAIT_S})",
    ),
    flag("--dry-run", "say which VMs would be rescheduled, and which wait"),
    JSON_FOR_LINES,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared failover`."""
    if arguments.print_hook and arguments.json:
        raise BadArguments("--print-hook prints a template: it has no --json")
    if arguments.print_hook:
        put_all(next_steps.hook(os.path.realpath(sys.argv[0])))
        return 0
    if arguments.json and arguments.hook:
        raise BadArguments("--hook prints lines, which OpenNebula keeps: it has no --json")
    if not 0 <= arguments.wait <= LONGEST_S:
        raise BadArguments(f"--wait {arguments.wait}: from 0 to {LONGEST_S} seconds")
    oned, config = administrator(), load()
    name = arguments.host or named(sys.stdin.buffer.read())
    host = lost(oned, name, arguments.wait if arguments.hook else 0, config.hosts_connect_timeout_s)
    if host is None:
        return 0
    answer: Row = {"host": host.name, "dry_run": arguments.dry_run, "fence": None, "vms": []}
    tell = (lambda text: None) if arguments.json else say
    if not arguments.dry_run:
        with trail.noted("fence", host.name):
            answer["fence"] = Fence(oned, config).fence(host.name).epoch
        tell(f"{host.name} is shut out of all stores (fence {answer['fence']})")
    for vm in those_of(oned, host.id):
        row = rescheduled(oned, vm, arguments.dry_run)
        answer["vms"].append(row)
        tell(f"VM {vm.id} ({vm.name}) {text_of(row)}")
        if not arguments.dry_run:
            trail.note("reschedule", f"VM {vm.id} of {host.name}", "waits" if row["why"] else trail.OK)
            # `publish --due` says it: the host itself says nothing any more.
            vm_notes.leave(vm.id, f"failover: {host.name} is lost, and the VM waits" if row["why"] else "")
    if arguments.json:
        put_json(answer)
    return int(any(row["why"] for row in answer["vms"]))


def say(text: str) -> None:
    """Print a line at once: OpenNebula keeps a hook's output."""
    put(printable(text), flush=True)


def named(text: bytes) -> str:
    """Return the name of the host in a hook's input; raise BadArguments."""
    words = text.split()
    if not words:
        raise BadArguments("there is no template of a host on standard input")
    return Host.parse(decode(words[0])).name


def lost(oned: Oned, name: str, wait_s: int, connect_s: int) -> Host | None:
    """Return the host if it is not seen after `wait_s` seconds, None if it came back; raise BadArguments."""
    if wait_s:
        say(f"{name}: {wait_s} s for it to come back")
        time.sleep(wait_s)
    host = next((host for host in oned.hosts() if host.name == name), None)
    if host is None:
        raise BadArguments(f"OpenNebula knows no host {name}")
    if wait_s and host.state != State.ERROR:
        say(f"{name} came back")
        return None
    if host.is_monitored:
        raise BadArguments(f"{name} answers OpenNebula's monitoring: it is not lost")
    if host.state in UNSAID and fence_facts.answers_ssh(name, connect_s):
        mend = f"if it is all the same: onehost offline {name}"
        raise BadArguments(f"{name}: it answers over ssh, so it is not lost; {mend}")
    return host


def those_of(oned: Oned, host: int) -> Iterator[Vm]:
    """Yield the VMs on a host, by its id, and those that were leaving it when it failed.

    VMs that were on it last, and are on no host, are not among them.
    """
    for vm in oned.vms():
        if vm.is_on_no_host:
            continue
        is_there = vm.host_ids[-1:] == [host]
        if is_there or vm.lcm_state == failover.FAILED:
            known = oned.vm(vm.id)
            if is_there or host in known.host_ids[-2:-1]:
                yield known


def rescheduled(oned: Oned, vm: Vm, is_dry: bool) -> Row:
    """Have a VM come up elsewhere; return its row, with the reason if it has to wait."""
    try:
        why = "; ".join(reasons(oned, vm))
        if not why and not is_dry:
            oned.reschedule(vm.id)
    except SemisharedError as e:
        why = e.detail
    how = "waits" if why else "would be rescheduled" if is_dry else "rescheduled"
    return {"vm": vm.id, "name": vm.name, "how": how, "why": why}


def text_of(row: Row) -> str:
    """Return what has become of a VM, for people."""
    how = "is rescheduled" if row["how"] == "rescheduled" else row["how"]
    return f"{how}: {row['why']}" if row["why"] else str(how)


def reasons(oned: Oned, vm: Vm) -> Iterator[str]:
    """Yield why a VM would not come up elsewhere."""
    if vm.lcm_state == failover.FAILED:
        yield f"it did not come to {vm.host}: onevm recover --retry {vm.id}"
    elif vm.state == VmState.POWEROFF:
        mend = f"onevm migrate {vm.id} HOST takes it elsewhere, then onevm resume"
        yield f"it is off, which OpenNebula starts nowhere by itself: {mend}"
    elif not failover.is_unseen(vm):
        state = f"{vm.state}/{vm.lcm_state}"
        yield f"it is in state {state}, in which OpenNebula has nothing running to start elsewhere"
        return
    for disk in vm.disks:
        if disk.image_id < 0:
            why = failover.why_not_anew(vm, disk)
        else:
            image = oned.image(disk.image_id)
            if image.is_shareable:
                why = f"the scheduler gives it no datastore with SHARED = NO, onevm migrate {vm.id} HOST does"
                yield f"disk {disk.id} is SHAREABLE: {why}"
            why = failover.why_waits(vm, disk, image, oned.datastore(image.store_id))
        if why:
            yield f"disk {disk.id}: {why}"
