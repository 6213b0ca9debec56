# SPDX-License-Identifier: Apache-2.0
"""The addresses that this machine is known by to others."""

from __future__ import annotations

import json

from ..errors import SemisharedError
from .run import run

ANSWER_S = 3
MOST = 64
"""More than any host of a cloud has; a line of monitoring is not to grow without an end."""


def addresses() -> list[str]:
    """Return this machine's addresses that are not of one link alone, as Ceph writes them; none if they
    cannot be asked for.
    """
    try:
        links = json.loads(run(["ip", "-j", "address", "show", "up", "scope", "global"], timeout_s=ANSWER_S))
        found = [str(row["local"]) for link in links for row in link.get("addr_info", ()) if "local" in row]
    except (SemisharedError, ValueError, TypeError):
        return []
    return sorted(found)[:MOST]
