# SPDX-License-Identifier: Apache-2.0
"""Where the directory of a VM belongs, by its state in oned; and which others of it may go.

    ACTIVE and RUNNING, POWEROFF, SUSPENDED    the host of the last history record, in its system datastore
    STOPPED, UNDEPLOYED                        the front-end
    anything else                              unknown: an action is under way, or has failed half-way

A directory elsewhere goes only if the whole VM is where it belongs: gc asks the machines and oned again just
before it removes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Iterable, Iterator, Mapping, Optional

from ...model.disk import names as disk_names
from ...named import NamedTuple
from ...opennebula.states import VmState

if TYPE_CHECKING:
    from ...model.leftover_steps import SeenMachine, SeenVm
    from ...opennebula.xml import Vm


class Place(NamedTuple):
    """A machine, as `gc` calls it, and a system datastore; and the disks that the VM has."""

    machine: str
    system: int
    disks: frozenset[int] = frozenset()


class Paths:
    """Paths in use, and all above them: so a directory above one is found without a look at each."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._above: set[str] = set()
        for path in paths:
            while path and path not in self._above:
                self._above.add(path)
                path = path.rpartition("/")[0]

    def has(self, path: str) -> bool:
        """Tell whether a path, or something below it, is among them."""
        return path in self._above


def place_of(vm: Vm, front_end: str, is_here: Callable[[str], bool]) -> Optional[Place]:
    """Return where the files of a VM are, None if oned is at work on it or is not sure."""
    host, systems = vm.host, vm.system_datastores
    if not host or not systems:
        return None
    disks = frozenset(disk.id for disk in vm.disks)
    if vm.is_on_front_end:
        return Place(front_end, systems[-1], disks)
    if vm.is_running or vm.state in (VmState.SUSPENDED, VmState.POWEROFF):
        return Place(front_end if is_here(host) else host, systems[-1], disks)
    return None


def after_failure(vm: Vm, front_end: str, is_here: Callable[[str], bool]) -> list[Place]:
    """Return where the files of a VM that waits for `onevm recover` may be: front-end, last two hosts.

    Empty in any other state.
    """
    if not vm.has_failed or not vm.host:
        return []
    hosts = [front_end if is_here(host) else host for host in vm.hosts]
    places = [*zip(hosts[-2:], vm.system_datastores[-2:]), (front_end, vm.system_datastores[-1])]
    return [Place(machine, system) for machine, system in dict.fromkeys(reversed(places))]


def in_question(found: Iterable[tuple[str, SeenVm]], hosts: Mapping[int, str]) -> set[int]:
    """Return the VMs in oned of which a machine has a directory that is not on their host.

    `found`: names of machines, each with one of its directories.
    """
    seen: dict[int, list[str]] = {}
    for machine, item in found:
        if item.kind == "dir" and item.vm in hosts:
            seen.setdefault(item.vm, []).append(machine)
    return {vm for vm, machines in seen.items() if machines != [hosts[vm]]}


def why_kept(item: SeenVm, home: Optional[SeenVm], place: Place) -> str:
    """Return why a misplaced directory may be the only one, '' if it is not; `home`: the right one."""
    if home is None:
        return f"it may be the only directory of VM {item.vm}: {place.machine} has none, or was not asked"
    if item.seq > home.seq:
        # A directory of an earlier stay was left where the VM belongs, and the move that was to replace it
        # never came.
        return f"it is of SEQ {item.seq} of the VM's history, what is on {place.machine} is older"
    if home.noted:
        return (
            f"what a killed action has begun in that on {place.machine} is not ended, and may need "
            f"this one: the next action there does"
        )
    ours = {name for name in item.entries if disk_names.disk_named(name) in place.disks}
    missing = sorted(ours - set(home.entries))
    if missing:
        return f"{missing[0]} of VM {item.vm} is not on {place.machine}"
    return ""


def why_unlinked_stays(vm: int, known: Mapping[int, str], why: str) -> str:
    """Return why layers on a device to which no link leads stay, '' if they may go.

    `why`: they may be in use, as far as seen. VM -1: a base, which is made again when it is wanted.
    """
    if vm < 0:
        return ""
    return f"VM {vm} is not gone: they may be its only ones" if vm in known else why


def living(facts: SeenMachine) -> Iterator[str]:
    """Yield what living processes of a machine have staged, of whatever age: clocks may be set."""
    found = [facts.staged, *(vm.staged for vm in facts.vms), *(store.staged for store in facts.stores)]
    for staged in (*found, *(base.staged for base in facts.root.bases)):
        yield from (item.path for item in staged if item.lives)


def orphans(facts: SeenMachine, location: str) -> Iterator[tuple[int, str, str, str]]:
    """Yield VMs of which only a domain is left: id, directory, why it is named, and what ends it."""
    there = {item.path for item in facts.vms}
    names = [
        used[len(location) + 1 :].split("/")
        for used in facts.domains.files
        if used.startswith(f"{location}/")
    ]
    of_vms = {
        (int(name[1]), name[0])
        for name in names
        if len(name) > 2 and disk_names.is_number(name[0]) and disk_names.is_number(name[1])
    }
    for vm, system in sorted(of_vms):
        path = f"{location}/{system}/{vm}"
        if path not in there:
            keep = f"`virsh destroy one-{vm}` there ends it: what it writes is lost with it already"
            yield (
                vm,
                path,
                f"VM {vm} is not known to oned, and a domain has files open that were deleted with it",
                keep,
            )
