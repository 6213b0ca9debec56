# SPDX-License-Identifier: Apache-2.0
"""Where a VM's files are, when it is not where oned says.

oned retries the epilog of a stopped or undeployed VM on its last host, and deletes such a VM there, though all of its
files are on the front-end. So whatever is removed on a host is removed here too; and if the files were
here, a host that is not there any more holds nothing up.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Iterable

from ..errors import HostUnreachable
from ..model import steps as s
from ..opennebula.args import VmPlace

if TYPE_CHECKING:
    from .action import Action


def is_on_front_end(path: str) -> bool:
    """Tell whether this machine has the VM directory `path`, or what a killed move left of it (disk/beside.py)."""
    parent, vm = os.path.split(path)
    left = re.compile(rf"\.(incoming|outgoing|removed)-{vm}(-|\Z)")
    return os.path.lexists(path) or (os.path.isdir(parent) and any(map(left.match, os.listdir(parent))))


def everywhere(action: Action, place: VmPlace, steps: Iterable[s.Step]) -> list[object]:
    """Carry out removals on the host that was named, and before that here if the VM is here; return what they found."""
    from ..wire.session import is_here

    steps = list(steps)
    if is_here(place.host) or not is_on_front_end(place.path):
        return action.on(place.host, steps)
    found: list[object] = []
    try:
        with action.session(place.host) as session:
            # Or half would be removed, and the rest be refused until that host is synced.
            session.agree()
            found = action.on("localhost", steps)
            found += session.run(steps)
    except HostUnreachable as e:
        found = found or action.on("localhost", steps)
        action.report.warn(f"{e.detail}. VM {place.vm} was on the front-end; what that host may still have of it is left")
    return found


def source_of_copy(place: VmPlace, last_host: str) -> str:
    """Return the host that has the disk of an undeployed VM: the front-end, unless it is not there (any more)."""
    from ..wire.session import is_here

    if is_here(place.host):
        return place.host if os.path.isdir(place.path) or not last_host else last_host
    return "localhost" if os.path.isdir(place.path) else place.host
