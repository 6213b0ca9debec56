# SPDX-License-Identifier: Apache-2.0
"""What has to be mounted where a root of shares is."""

from __future__ import annotations

import os

from ..errors import StoreUnavailable
from ..tools.mounts import Mount, of


def check(root: str, types: tuple[str, ...]) -> Mount:
    """Return what a root lies on; raise StoreUnavailable unless that is one of `types`."""
    found = of(root)
    if found.type not in types:
        raise StoreUnavailable(
            f"{root} on {os.uname().nodename} is on {found.type} ({found.point}), not on "
            f"{types[0]}: is it mounted?"
        )
    return found
