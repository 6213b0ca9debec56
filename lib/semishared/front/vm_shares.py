# SPDX-License-Identifier: Apache-2.0
"""Whether a VM has shares: as oned says, or else the domain that it has written."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Optional

from ..errors import OnedUnavailable

if TYPE_CHECKING:
    from ..opennebula.xml import Vm

DEPLOYMENT = re.compile(r"deployment\.([0-9]{1,10})\Z")
"""Of a SEQ: the domain of a VM as oned writes it beside context.sh before it has the context made
(VirtualMachineManager.cc).
"""


def known(vm: int) -> Optional[Vm]:
    """Return a VM, None if oned does not know it any more, or does not answer."""
    from ..opennebula.oned import Oned

    try:
        return Oned().vm(vm)
    except OnedUnavailable:
        return None


def with_shares(vm: int, context: str) -> Optional[Vm]:
    """Return the VM that `context`, its context.sh, is for; None if it has no directories among its disks.

    Raise OnedUnavailable if it has some and oned does not answer: nobody else says which of them the guest is
    to be a client of.
    """
    from ..opennebula.oned import Oned

    try:
        known = Oned().vm(vm)
    except OnedUnavailable:
        if _domain_has_directories(os.path.dirname(context)):
            raise
        return None
    return known if has_directories(known) else None


def has_directories(vm: Vm) -> bool:
    """Tell whether a VM has directories among its disks, whoever's."""
    return any(disk.is_directory for disk in vm.disks)


def _domain_has_directories(directory: str) -> bool:
    try:
        seqs = [int(match.group(1)) for match in map(DEPLOYMENT.match, os.listdir(directory)) if match]
        with open(f"{directory}/deployment.{max(seqs)}", "rb") as file:
            return b"<filesystem" in file.read()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True  # then only oned knows
