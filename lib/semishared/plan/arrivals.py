# SPDX-License-Identifier: Apache-2.0
"""What is asked of a host that a VM's directory is to come to."""

from __future__ import annotations

from typing import Any, Mapping

from ..model.steps_move import MakeRoom
from ..opennebula.args import VmPlace


def room(place: VmPlace, seen: Mapping[str, Any], *, keep_bases: bool = True) -> MakeRoom:
    """Return what makes room at `place` for a directory as LookAtVm has seen it; a disk that wants a class of devices is apart.

    Without `keep_bases` its disks lie there without theirs.
    """
    every, bases = seen.get("sizes", {}), tuple(seen["bases"]) if keep_bases else ()
    sizes = {disk: size for disk, size in every.items() if disk not in seen.get("classes", {})}
    return MakeRoom(place.vm, place.path, int(seen["bytes"]), bases, sizes, sum(every.values()) - sum(sizes.values()))
