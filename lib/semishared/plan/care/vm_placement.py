# SPDX-License-Identifier: Apache-2.0
"""Where `semishared cluster boot --hosts` has VMs deployed that are on no host.

`one.vm.deploy` names host and system datastore, in one call for each VM: nothing is written into a VM, so a
command that is killed leaves nothing behind, and no requirement of the VM's user is overwritten. oned looks
at capacity, clusters and drivers then, and at nothing else. So a VM whose host something else decides as
well is left to OpenNebula's scheduler:

    SCHED_REQUIREMENTS, SCHED_DS_REQUIREMENTS      its user's word
    a VM group with rules of affinity              where the others of the group are
    NETWORK_MODE = auto of a network interface     a network, which the scheduler chooses
    AUTOMATIC_REQUIREMENTS of more than clusters   pinned CPUs, features of a CPU, encrypted memory

What oned writes of clusters and datastores (VirtualMachine::automatic_requirements) is kept to.
"""

from __future__ import annotations

import re
from typing import Dict, List, Optional, Sequence

from ... import NAME
from ...named import NamedTuple
from ...opennebula.xml import Datastore, Host, View, Vm

CLUSTERS = (
    r"(?:\(CLUSTER_ID = \d+(?: \| CLUSTER_ID = \d+)*\) & )?"
    r"(?:!\(PUBLIC_CLOUD = YES\) & )?!\(PIN_POLICY = PINNED\)\Z"
)
"""AUTOMATIC_REQUIREMENTS that name clusters alone, as oned 6.10 to 7.4 write them."""
AFFINITY = ("AFFINED", "ANTI_AFFINED")


class Target(NamedTuple):
    """Where oned is to deploy a VM."""

    host: Host
    datastore: int


class Placement:
    """The hosts that VMs are to come to, and the memory that VMs have got on each of them by now."""

    def __init__(
        self, hosts: Sequence[Host], datastores: Sequence[Datastore], groups: Sequence[View]
    ) -> None:
        self._hosts = hosts
        self._systems = [
            store for store in datastores if store.is_system and store.driver == NAME and store.is_enabled
        ]
        self._ruled = {group.number("ID") for group in groups if has_rules(group)}
        self._taken: Dict[str, int] = {}
        """KiB by host."""

    def names(self, vm: Vm) -> bool:
        """Tell whether a VM is on one of the hosts."""
        return not {*vm.host_ids[-1:]}.isdisjoint(host.id for host in self._hosts)

    def why_scheduled(self, vm: Vm) -> str:
        """Return what else decides where a VM goes, '' if it may be deployed."""
        for name in ("SCHED_REQUIREMENTS", "SCHED_DS_REQUIREMENTS"):
            if vm.text(f"USER_TEMPLATE/{name}") or vm.text(f"TEMPLATE/{name}"):
                return f"its {name}"
        if any(member.number("VMGROUP_ID") in self._ruled for member in vm.all("TEMPLATE/VMGROUP")):
            return "the rules of its VM group"
        if any(nic.text("NETWORK_MODE").lower() == "auto" for nic in vm.all("TEMPLATE/NIC")):
            return "NETWORK_MODE = auto of an interface"
        if not re.match(CLUSTERS, vm.text("TEMPLATE/AUTOMATIC_REQUIREMENTS")):
            return "its AUTOMATIC_REQUIREMENTS"
        return ""

    def targets(self, vm: Vm) -> List[Target]:
        """Return where a VM may be deployed, the host with most free memory first."""
        wanted = _numbers("CLUSTER_ID =", vm.text("TEMPLATE/AUTOMATIC_REQUIREMENTS"))
        found = []
        for host in sorted(self._hosts, key=self._free, reverse=True):
            is_pinned = host.text("TEMPLATE/PIN_POLICY").upper() == "PINNED"
            if host.is_monitored and not is_pinned and (not wanted or host.cluster_id in wanted):
                system = self._system(vm, host)
                if system is not None:
                    found.append(Target(host, system))
        return found

    def _free(self, host: Host) -> int:
        most, used = (max(host.number(f"HOST_SHARE/{name}"), 0) for name in ("MAX_MEM", "MEM_USAGE"))
        return most - used - self._taken.get(host.name, 0)

    def _system(self, vm: Vm, host: Host) -> Optional[int]:
        """Return the system datastore for a VM on a host; that of its files, if the front-end has them."""
        said = vm.text("TEMPLATE/AUTOMATIC_DS_REQUIREMENTS")
        ids, clusters = _numbers('"ID" @>', said), _numbers('"CLUSTERS/ID" @>', said)
        if vm.is_on_front_end:
            ids = set(vm.system_datastores[-1:])
        for store in sorted(self._systems, key=lambda store: store.id):
            is_near = host.cluster_id in store.clusters
            if is_near and (not ids or store.id in ids) and (not clusters or clusters & {*store.clusters}):
                return store.id
        return None

    def take(self, vm: Vm, target: Target) -> None:
        """Note that oned has taken a VM for a host: it tells the memory of hosts that were asked before."""
        name = target.host.name
        self._taken[name] = self._taken.get(name, 0) + (max(vm.number("TEMPLATE/MEMORY"), 0) << 10)


def _numbers(before: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(rf"{re.escape(before)} (\d{{1,9}})", text)}


def has_rules(group: View) -> bool:
    """Tell whether a VM group says which VMs go together, apart, or to which hosts."""
    if any(group.text(f"TEMPLATE/{rule}") for rule in AFFINITY):
        return True
    hosts = any(role.text(f"HOST_{rule}") for role in group.all("ROLES/ROLE") for rule in AFFINITY)
    return hosts or any(role.text("POLICY").upper() in AFFINITY for role in group.all("ROLES/ROLE"))
