# SPDX-License-Identifier: Apache-2.0
"""Is what this host has of a VM still the VM's? Not if the host was given up for lost, and another one has taken the VM over.

The directory says of which SEQ of the VM's history it is (vm_dir.py). Who takes a VM over notes the SEQ from which on it
counts, its epoch, in each store that the VM has an image of; a VM that nobody ever took over has none. So a host that comes
back sees it before it starts what it has, sends it or saves it, whatever it is told to do.
"""

from __future__ import annotations

import os
from typing import Iterable

from ..errors import SemisharedError, StaleDirectory
from ..model.record import Record
from ..store import dir_epochs
from . import vm_dir


def check(vm: int, directory: str, found: Iterable[Record]) -> str:
    """Raise StaleDirectory if a VM directory is older than the VM's epoch; return why that cannot be told, '' if it can.

    `found`: records of the directory. Not to be reached is no reason to refuse: a VM on the host's own disks runs without its store.
    """
    seq = vm_dir.seq_of(directory)
    unknown = ""
    for record in found:
        if record.image is None:
            continue
        image = record.image
        try:
            if image.access.can.has_bridge:
                from .. import store

                epoch = store.of(image.access).epoch(image, vm)
            else:
                epoch = dir_epochs.read(image, vm)
        except (SemisharedError, OSError) as e:
            unknown = f"whether another host has taken VM {vm} over cannot be told: {e}"
            continue
        if epoch > seq:
            raise StaleDirectory(
                f"{directory} on {os.uname().nodename} is of SEQ {seq} of VM {vm}'s history, and at SEQ {epoch} another host took the VM over"
            )
    return unknown
