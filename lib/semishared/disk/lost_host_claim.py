# SPDX-License-Identifier: Apache-2.0
"""A diff that was never moved to where its VM is made anew (`onevm recover --recreate`): a host that was away
may have it still.

Its image waits for that very disk, at an earlier SEQ. Without an epoch that host's directory would pass for
one that was moved away, which holds nothing that is nowhere else, and go with what was not committed. So one
is noted before the image waits for another disk, or for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import store
from ..errors import UnknownClaim
from ..model.refs import DiskRef, ImageRef

if TYPE_CHECKING:
    from ..model.refs import Owner


def look(disk: DiskRef, image: ImageRef, seq: int) -> dict[str, object]:
    """Return such a disk as `before`, and the `epoch` that is due; nothing if the image waits for none."""
    before = owner(disk, image, seq)
    return {"before": before.to_data(), "epoch": seq} if before else {}


def owner(disk: DiskRef, image: ImageRef, seq: int) -> Owner | None:
    """Return for which such disk the image waits, None for none; `seq`: that of the VM's history now."""
    try:
        before = store.of(image.access).owner(image)
    except UnknownClaim:
        return None  # whoever claims it says so
    if before is None or before.epoch >= seq:
        return None
    return (
        before if (before.vm, before.disk, before.cloud) == (disk.vm, disk.disk, image.access.cloud) else None
    )
