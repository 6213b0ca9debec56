# SPDX-License-Identifier: Apache-2.0
"""Where a stopped or undeployed VM lies: in an HA group, on the front-end that led when it came to rest.

oned names the front-end that leads now, so a directory that is not there, or is of an earlier stay, is looked
for on the others, by ssh, and only then. One that has it takes the part of the named one: its files are sent
from it, removed on it, grown on it. If none has it and one does not answer, that one may have it: the action
is refused with its name.

Directories of one VM are told apart by the SEQ in them (disk/vm_dir.py). A VM that came to rest was published
with the SEQ of that moment, so a directory with a lower one than the VM's last deployment is of an earlier
stay: a leader that was lost has kept it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Optional, Tuple

from ...errors import HostUnreachable, OnAnotherFrontEnd, OnedUnavailable, SemisharedError
from ...model import steps as s
from ...model.exchange import AskOned, Part, ask, warn
from ...named import NamedTuple
from ...opennebula.states import LcmState

if TYPE_CHECKING:
    from ...opennebula.args import Move, VmPlace
    from ...opennebula.xml import Vm


RESUMING = (LcmState.PROLOG_RESUME, LcmState.PROLOG_UNDEPLOY)
"""States in which oned has the files of a VM brought from the front-end."""
LEAVING = (LcmState.EPILOG_STOP, LcmState.EPILOG_UNDEPLOY)
"""States in which oned has them brought there."""


class Elsewhere(NamedTuple):
    """What the other front-ends say of a VM directory."""

    machines: Tuple[str, ...] = ()
    """Those that have one, the newest first."""
    machine: str = ""
    """The one with the newest, '' if that is of an earlier stay, or none has any."""
    seq: int = -1
    """SEQ of the newest."""
    silent: Dict[str, str] = {}
    """Those that do not say, and why."""

    def refuse(self, vm: int, what: str) -> None:
        """Raise OnAnotherFrontEnd if a front-end does not say whether it has the VM."""
        if self.silent:
            names, why = ", ".join(self.silent), "; ".join(self.silent.values())
            raise OnAnotherFrontEnd(
                f"VM {vm} {what}, and front-end {names}, which may have it, does not say: {why}"
            )


def elsewhere(place: VmPlace, vm: Optional[Vm] = None) -> Part[Elsewhere]:
    """Look for a VM directory on the other front-ends; there are none without HA, or if oned is silent.

    `vm`: oned's view of it, by which an earlier stay is told.
    """
    try:
        others = yield AskOned("front_ends", place.vm)
    except OnedUnavailable:
        return Elsewhere()
    found, silent = [], {}
    for machine in others:
        try:
            seen = yield from ask(machine, s.LookAtVm(place.vm, place.path))
        except SemisharedError as e:
            silent[machine] = e.detail
            continue
        if seen.present:
            found.append((seen.seq, machine))
    found.sort(reverse=True)
    seq, newest = found[0] if found else (-1, "")
    is_old = bool(vm and is_older_stay(seq, vm))
    return Elsewhere(tuple(machine for _, machine in found), "" if is_old else newest, seq, silent)


def is_older_stay(seq: int, vm: Vm) -> bool:
    """Tell whether a directory at rest, of that SEQ, is of an earlier stay: the VM was deployed since.

    One that comes to rest has the SEQ of that moment, which is no lower than that of the deployment before.
    -1, for a directory without a SEQ, is not known to be.
    """
    records = vm.history[:-1] if vm.lcm_state in RESUMING else vm.history
    deployed = (record.number("SEQ") for record in records if record.number("PSTIME") > 0)
    return 0 <= seq < max(deployed, default=-1)


def of_move(asked: Move, vm: Vm, missing: SemisharedError) -> Part[Optional[VmPlace]]:
    """Return where a move that has not found the VM at its source is to take it from; None: it has arrived.

    `missing` is raised if no other front-end has it, or none is in question, OnAnotherFrontEnd if one may. It
    may also be that the host does not answer which the VM leaves: then what has arrived counts.
    """
    is_leaving, is_silent = vm.lcm_state in LEAVING, isinstance(missing, HostUnreachable)
    if not is_leaving and (is_silent or vm.lcm_state not in RESUMING):
        raise missing
    found = yield from elsewhere(asked.target if is_leaving else asked.source, vm)
    if is_leaving and found.machine and found.seq >= vm.seq:
        yield warn(f"VM {vm.id} is at rest on front-end {found.machine}: nothing is left to move")
        return None
    if not is_leaving and found.machine:
        yield warn(f"VM {vm.id} is at rest on front-end {found.machine}, and is brought from there")
        return asked.source._replace(host=found.machine)
    if not is_silent:
        found.refuse(vm.id, f"is not on {asked.source.host}")
    raise missing
