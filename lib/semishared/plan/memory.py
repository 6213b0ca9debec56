# SPDX-License-Identifier: Apache-2.0
"""What a guest that starts has in the memory of its host: what its disks lie over (base/hot.py)."""

from __future__ import annotations

from ..model import steps_hypervisor as h
from ..model.exchange import Here, Part
from ..model.record import Record
from .backing import Chain


def over_copy(vm_dir: str, record: Record, chain: Chain) -> Part[Chain]:
    """Return what a disk lies over, with the copy in memory in the place of its base, if there is one."""
    if not chain:
        return chain
    (lease, format), above = chain[-1], chain[:-1]
    copy = yield Here(h.HoldHot(vm_dir, record, str(lease)))
    return [*above, (str(copy), format)] if copy else chain
