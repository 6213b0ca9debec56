# SPDX-License-Identifier: Apache-2.0
"""The rank scheduler, as far as it decides where a VM is sent: requirements, clusters, capacity, and one VM a
round for each host (MAX_HOST = 1 of rank.conf and sched.conf).

What it does not look at is TM_MAD: oned does, when it is to deploy.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Tuple

from .drivers import Refused
from .move import MoveOps
from .objects import Datastore, Host, Vm
from .requirements import meets
from .states import Vm as State
from .template import scalar
from .transfer import is_directory, is_volatile

Sent = Tuple[int, int, str]
"""Host, system datastore, and why oned did not deploy there; '' if it did."""


class SchedulerOps(MoveOps):
    """Rounds of the scheduler."""

    def schedule(self, deploy: Optional[Callable[[int, int, int], None]] = None) -> Dict[int, Optional[Sent]]:
        """Do one round over all VMs that wait: where each was sent, None for one that was sent nowhere.

        The oldest come first. `deploy` is what oned does with VM, host and datastore, vm_deploy if none is
        given; it raises Refused.
        """
        sent: Dict[int, Optional[Sent]] = {}
        taken: List[int] = []
        for vm in [vm for vm in self.vms.values() if vm.state == State.PENDING]:
            found = self._found(vm, taken)
            sent[vm.id] = None
            if not found:
                continue
            host, store = found
            taken.append(host.id)
            why = ""
            try:
                if deploy:
                    deploy(vm.id, host.id, store.id)
                else:
                    self.vm_deploy(vm.id, host.id, store.id, by_scheduler=True)
            except Refused as e:
                why = str(e)
            sent[vm.id] = (host.id, store.id, why)
        return sent

    def would_deploy(self, vm_id: int, _host: int, datastore_id: int) -> None:
        """Do of a deploy what oned does before it calls a driver: raise Refused, or take the VM."""
        vm = self.vm(vm_id)
        self._check_transfer_mode(vm, self.datastore(datastore_id).tm_mad)
        vm.state = State.ACTIVE

    def _found(self, vm: Vm, taken: List[int]) -> Optional[Tuple[Host, Datastore]]:
        wanted = [
            scalar(vm.template, "AUTOMATIC_DS_REQUIREMENTS"),
            scalar(vm.user_template, "SCHED_DS_REQUIREMENTS"),
        ]
        expression = " & ".join(f"({one})" for one in wanted if one)
        systems = [
            store for store in self.datastores.values() if store.type == 1 and meets(store, expression)
        ]
        # Striping, the default: where most is free. Those on hosts say 0; the newest comes first.
        systems.sort(key=lambda store: (store.free_mb, store.id), reverse=True)
        for host in self.hosts.values():
            if host.id in taken or host.state != 2:
                continue
            for store in systems:
                if host.cluster in store.clusters and self._fits(vm, host, store):
                    return host, store
        return None

    def _fits(self, vm: Vm, host: Host, store: Datastore) -> bool:
        """Tell whether there is room: of a shared datastore oned knows it, else the host says it."""
        needed = sum(int(disk.get("SIZE", "0")) for disk in vm.disks if _is_in_system(disk))
        if scalar(store.template, "SHARED") == "YES":
            return store.total_mb > 0 and needed <= store.free_mb
        return needed <= host.free_mb.get(store.id, needed)


def _is_in_system(disk: Dict[str, str]) -> bool:
    if is_directory(disk):
        return False
    return is_volatile(disk) or (disk.get("CLONE") == "YES" and disk.get("CLONE_TARGET") == "SYSTEM")
