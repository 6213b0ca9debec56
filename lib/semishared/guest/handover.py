# SPDX-License-Identifier: Apache-2.0
"""A guest whose disks QEMU mirrors, or commits, goes on with what they were written to: all in one moment of
rest.

While it rests the records may name either side; from the moment it runs they have to name what it writes to.
So nobody wakes it (a rest has a limit, guest/rest.py) between a pivot and its record, and what was woken
before its turn is not switched any more.
"""

from __future__ import annotations

import os
from typing import Collection

from ..errors import GuestNotFrozen
from ..tools.crash_points import point
from . import active_layer, block_jobs, domain, rest


def go_over(vm_dir: str, name: str, targets: Collection[str], otherwise: str, origin: str = "") -> None:
    """Let the guest go on with the mirrors of these disks, which have been equal once, and the records of
    `vm_dir` say so.

    `otherwise`: what is said to become of one that somebody has paused; `origin`: the VM directory that it
    comes from, if another (relocation.py). Raise GuestNotFrozen if it does not rest, or not long enough: some
    of its disks may have gone over then.
    """
    with rest.resting(origin or vm_dir, name, "SUSPEND", copy=vm_dir if origin else "") as rested:
        if rested.how == "NONE":
            # Whoever has paused it may let it go on any time, between the switch and the records.
            how = "was paused by somebody else" if domain.state(name) == "paused" else "does not run any more"
            raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} {how}: {otherwise}")
        for target in targets:
            block_jobs.wait_for_equal(name, target)
        # What was mirrored is in QEMU's memory still, and what it is mirrored from may go.
        block_jobs.write_out(name)
        point("mirrors equal")
        for target in targets:
            with rest.held(origin or vm_dir, name, rested):
                block_jobs.pivot(name, target)
                point("guest has gone over")
                active_layer.settle(vm_dir, name)
