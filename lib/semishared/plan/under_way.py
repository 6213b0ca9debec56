# SPDX-License-Identifier: Apache-2.0
"""Whether an action is still under way.

oned may have given it up and begun another one with the VM, unseen by this process.
"""

from __future__ import annotations

from ..errors import Overtaken
from ..model.exchange import AskOned, Plan
from ..opennebula.xml import Vm


def why_over(then: Vm, now: Vm) -> str:
    """Return why an action that began with the VM in the state `then` is over, '' if it is not."""
    if (then.seq, then.lcm_state) != (now.seq, now.lcm_state):
        return (
            f"VM {now.id} was in state {then.lcm_state} of SEQ {then.seq} and is in {now.lcm_state} "
            f"of SEQ {now.seq}"
        )
    return ""


def still(then: Vm) -> Plan:
    """Raise Overtaken if an action that began in the state `then` is over: its disks may be wanted since."""
    over = why_over(then, (yield AskOned("vm", then.id)))
    if over:
        raise Overtaken(f"{over}: what was asked for then is not done any more")
