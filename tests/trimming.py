# SPDX-License-Identifier: Apache-2.0
"""A guest that gives blocks back: its disks get smaller where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.cloud import Cloud

AT, COUNT = 12 << 10, 4 << 10
"""KiB that are written and trimmed: one whole object of an image on Ceph, and many clusters of any qcow2."""


def trimmed(cloud: Cloud, vm: int, *targets: str) -> None:
    """Let the guest write to its disks and trim that again; see that it reads as zeros, and is allocated no
    more.
    """
    guest = cloud.guest(vm)
    for target in targets:
        guest.write(target, "gone", AT, COUNT)
    full = cloud.allocated(vm)
    for target in targets:
        guest.discard(target, AT, COUNT)
    left = cloud.allocated(vm)
    for target in targets:
        freed = full[target] - left[target]
        # Some of what was written may be a cluster of which the rest is kept.
        assert freed >= (COUNT << 10) * 0.9, (
            f"{target}: of {full[target]} bytes {COUNT << 10} were trimmed, and {left[target]} are left"
        )
        guest.check(target, "zero", AT, 64)
