# SPDX-License-Identifier: Apache-2.0
"""Ask what mv of a VM directory and a live migration need to know, before they are planned.

plan/vm/moves.py and plan/vm/migration.py plan; vmm/semishared/migrate moves the guest.
"""

from __future__ import annotations

from ..errors import SemisharedError
from ..model.exchange import Plan
from ..opennebula import args
from ..opennebula.oned import Oned
from ..opennebula.xml import Vm
from ..plan.vm import moves
from ..tools.this_machine import is_here
from . import vm_location
from .action import Action


def mv(action: Action, asked: args.Move) -> Plan:
    """Return the plan of mv of a VM directory."""
    oned, here = Oned(), (is_here(asked.source.host), is_here(asked.target.host))
    vm = oned.vm(asked.source.vm)
    action.seq, action.bulk = vm.seq, True
    action.acquired(vm)
    why_not = (
        _why_not_fenced(oned, action, vm, asked.source.host) if vm.lcm_state in moves.MAY_BE_LOST else ""
    )
    told = moves.Told(
        *here, any(here) and vm_location.front_end_runs_vms(oned), why_not, action.config.overlays_options
    )
    if vm.lcm_state in moves.MAY_BE_LOST:
        from . import stock_conf

        told = told._replace(file_systems=stock_conf.file_systems())
    return moves.mv(asked, vm, told)


def _why_not_fenced(oned: Oned, action: Action, vm: Vm, host: str) -> str:
    """Return why the host that a VM leaves may still write to a store, '' if it is proved that it cannot.

    `host`: its name in oned then. It may have another name now, and another host that one: the id tells them
    apart.
    """
    from .fence_facts import Marks

    number = dict(zip(vm.hosts[:-1], vm.host_ids)).get(host, -1)
    try:
        found = next((found for found in oned.hosts() if found.id == number), None)
        # Mostly this is enough: the proof itself looks at all VMs of the host, and their stores.
        mark = Marks(oned).of(found) if found else None
        if not found or not mark or not mark.stands:
            return (mark and mark.strange) or f"{host} is not fenced"
        from .fence import Fence

        Fence(oned, action.config).proof(found.name)
    except SemisharedError as e:
        return e.detail
    return ""
