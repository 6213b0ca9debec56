# SPDX-License-Identifier: Apache-2.0
"""List what waits for an operator, each with its command.

VMs in a failure state with one of our errors; what deleted VMs have left and no image has; records that
cannot be read; what guests have written a day ago and only their host has; bases that are damaged, were
mended under a guest that runs, or were not read for 30 days; disks and devices that are 90 % full; guests
that an I/O error has stopped; hosts with another build, or whose monitoring says that something is wrong;
fences that did not end; attributes that datastores have lost. docs/how-to/attention.md explains each kind.

It changes nothing. oned and all hosts are asked once, at the same time.

exit codes: 0 nothing waits; 1 something does; 2 a machine or oned could not be asked
"""

from __future__ import annotations

import argparse
import calendar
import time
from typing import Iterable, Mapping, Sequence

from ..config import Config, load
from ..errors import HostOutdated, SemisharedError
from ..front import noted_datastores, vm_notes
from ..front.fence_facts import Marks
from ..model.base.steps import FindPaused, ListBases, Listed, PausedGuest, ReportDisks, Reported
from ..model.device.steps import ListDevices, PoolDevice
from ..model.disk import names as disk_names
from ..model.job_steps import ListJobs
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host
from ..plan.care import attention as plan
from ..plan.care.attention import Facts, Item, Machine
from ..plan.care.checks import WORDS
from ..plan.care.fence import Mark
from ..tools.this_machine import is_here
from ..wire.session import Session
from . import command as on
from .command import put

ARGUMENTS = (on.JSON,)


class Survey(on.Survey):
    """What could not be asked; hosts with another build apart: that is an item."""

    def __init__(self) -> None:
        super().__init__()
        self.outdated: dict[str, str] = {}

    def failed(self, machine: str, error: SemisharedError) -> None:
        """Note a failure, or a host that is of another build."""
        if isinstance(error, HostOutdated):
            self.outdated[machine] = error.detail
        else:
            super().failed(machine, error)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared attention`."""
    on.refuse_root("")
    survey = Survey()
    found = plan.items(asked(on.administrator(), load(), survey))

    def show() -> None:
        for item in found:
            since = f" (since {item.since})" if item.since else ""
            put(f"{WORDS[item.severity]:8}{item.machine}: {item.what}{since}")
            put(f"{'':8}-> {item.command}")

    rows = [
        {
            "host": item.machine,
            **item._asdict(),
            "severity": WORDS[item.severity],
            "since": item.since or None,
        }
        for item in found
    ]
    survey.told(arguments, {"items": rows}, show, total(found))
    return 2 if survey.errors else int(bool(found))


def total(found: Sequence[Item]) -> str:
    """Return how much waits, in words."""
    count = len(found)
    return f"{count} thing{'s wait' if count > 1 else ' waits'} for an operator" if found else "nothing waits"


def asked(oned: Oned, config: Config, survey: Survey) -> Facts:
    """Ask oned, its hosts and the front-end; raise OnedUnavailable."""
    stores, pool = on.ours(oned.datastores()), oned.vms()
    hosts = [host for host in oned.hosts() if not host.is_offline and host.is_near(stores)]
    front_end = on.front_end_of(hosts)
    machines = answers(stores, hosts, front_end, config, survey)
    vms = {vm.id: vm for vm in pool}
    wanted = plan.in_question(pool, machines)
    vms.update({vm.id: vm for vm in (oned.vms_of(wanted) if wanted else ()) if vm.id in vms})
    return Facts(
        front_end,
        time.time(),
        vm_notes.stamp,
        vms,
        {image.id: image for image in oned.images()},
        hosts,
        machines,
        {vm: began for vm in wanted if (began := first_seen(vm))},
        survey.outdated,
        marks(oned, hosts),
        lost(stores, front_end, survey),
    )


def answers(
    stores: Sequence[Datastore], hosts: Sequence[Host], front_end: str, config: Config, survey: Survey
) -> list[Machine]:
    """Return what the hosts and the front-end answer; `survey` gets those that do not."""
    systems = tuple(sorted(store.id for store in stores if store.is_system))
    locations = sorted(set(map(on.location, stores)))

    def look(session: Session, host: Host) -> Machine:
        reported: list[Reported] = []
        listed: list[Listed] = []
        devices: list[PoolDevice] = []
        for location in locations:
            root = disk_names.base_store(location)
            steps = (ReportDisks(location, systems), ListBases(root), ListDevices(root))
            disks, bases, pool = session.run(steps)
            reported.append(disks)
            listed.append(bases)
            devices += pool.devices
        paused: Sequence[PausedGuest] = ()
        if host.id >= 0:
            said = session.ask(FindPaused())
            paused = said.guests
            if said.error:
                survey.failed(host.name, SemisharedError(f"libvirt: {said.error}"))
        return Machine(host.name, reported, listed, devices, paused, session.ask(ListJobs()))

    alone = [] if any(is_here(host.name) for host in hosts) else [on.as_host(front_end)]
    return list(survey.ask([*hosts, *alone], "attention", config, look).values())


def first_seen(vm: int) -> float:
    """Return since when a disk of a VM is known to have what its image has not, 0 if that is unknown."""
    try:
        return float(calendar.timegm(time.strptime(vm_notes.known(vm).since, vm_notes.STAMP)))
    except (ValueError, OverflowError):
        return 0.0


def marks(oned: Oned, hosts: Sequence[Host]) -> Mapping[str, Mark]:
    """Return the marks of fences, none where no fence was set up."""
    try:
        return Marks(oned).of_all(hosts)
    except SemisharedError:
        return {}


def lost(
    stores: Iterable[Datastore], front_end: str, survey: Survey
) -> list[tuple[Datastore, Mapping[str, str]]]:
    """Return what datastores have lost; a note that cannot be read is a failure."""
    found: list[tuple[Datastore, Mapping[str, str]]] = []
    for store in stores:
        try:
            found.append((store, noted_datastores.lost(store)))
        except SemisharedError as e:
            survey.failed(front_end, e)
    return found


def for_doctor(oned: Oned, config: Config) -> list[Item]:
    """Return the items that no check of doctor's finds; what could not be asked is a finding of others."""
    return [item for item in plan.items(asked(oned, config, Survey())) if item.kind not in plan.IN_DOCTOR]
