# SPDX-License-Identifier: Apache-2.0
"""What the front-end knows of the machines before a VM directory is moved (plan/moves.py)."""

from __future__ import annotations

from ..errors import OnedUnavailable, SemisharedError
from ..model.exchange import Plan
from ..opennebula import args
from ..opennebula.oned import Oned
from ..plan import moves
from ..tools.this_machine import is_here
from .action import Action


def mv(action: Action, asked: args.Move) -> Plan:
    """Return the plan of mv of a VM directory."""
    oned, here = Oned(), (is_here(asked.source.host), is_here(asked.target.host))
    vm = oned.vm(asked.source.vm)
    action.seq, action.bulk = vm.seq, True
    action.acquired(vm)
    why_not = _why_not_fenced(oned, action, asked.source.host) if vm.lcm_state in (*moves.UNKNOWN, moves.OFF) else ""
    told = moves.Told(*here, any(here) and _front_end_runs_vms(oned), why_not, action.config.overlays_options)
    return moves.mv(asked, vm, told)


def _why_not_fenced(oned: Oned, action: Action, host: str) -> str:
    """Return why a host may write to a store still, '' if it is proved that it cannot."""
    from .fence_marks import Marks

    try:
        # Mostly that is all there is to ask: the proof itself looks at all VMs of the host, and their stores.
        mark = Marks(oned).of_all([found for found in oned.hosts() if found.name == host]).get(host)
        if not mark or not mark.stands:
            return (mark and mark.strange) or f"{host} is not fenced"
        from .fence import Fence

        Fence(oned, action.config).proof(host)
    except SemisharedError as e:
        return e.detail
    return ""


def _front_end_runs_vms(oned: Oned) -> bool:
    """Tell whether this machine may be a host too."""
    try:
        return any(is_here(host.name) for host in oned.hosts())
    except OnedUnavailable:
        return True
