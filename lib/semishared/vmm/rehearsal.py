# SPDX-License-Identifier: Apache-2.0
"""A hypervisor action rehearsed on its host: it looks as the action would, and changes nothing.

See model/rehearsal.py.
"""

from __future__ import annotations

import os
from typing import Any

from ..model.base.steps import RehearseHypervisor
from ..model.disk import names as disk_names
from ..model.exchange import Exchange, Here
from ..model.rehearsal import rehearsed
from ..model.vm.hypervisor_steps import look_instead
from ..plan.vm.hypervisor import Asked, forwarded, planned
from ..table import carry_out
from .on_host import Work


def rehearse(step: RehearseHypervisor) -> dict[str, Any]:
    """Return, as JSON data, what the action would do; raise what the action would raise."""
    asked, work = Asked(step.action, step.argv, step.stdin.encode("utf-8", "surrogateescape")), Work()

    def do(wanted: Exchange) -> Any:
        assert isinstance(wanted, Here)
        return carry_out(wanted.step, work)

    # The vmm scripts decide by this, too.
    is_ours = os.path.lexists(disk_names.records(asked.vm_dir))
    return rehearsed(planned(asked) if is_ours else forwarded(asked), do, look_instead).to_data()
