# SPDX-License-Identifier: Apache-2.0
"""The other front-ends of an HA group, as oned's zone has them: nobody may shut them out, and they have the
same key.
"""

from __future__ import annotations

import socket

from ..opennebula.oned import Oned
from ..tools.this_machine import are_one, is_here


def others(oned: Oned) -> list[str]:
    """Return the addresses of the other front-ends of this zone; raise OnedUnavailable. Without HA there are
    none.
    """
    zones = [found for found in oned.front_ends() if found]
    ours = [zone for zone in zones if any(map(is_here, zone))]
    # Of several in a federation the one that this machine is of; one alone is ours whatever it calls us.
    return [
        found for zone in ours or (zones if len(zones) == 1 else []) for found in zone if not is_here(found)
    ]


def addresses(oned: Oned, host: str) -> frozenset[str]:
    """Return their addresses, as far as names lead to one, without those of `host` if it is one of them;
    raise OnedUnavailable.
    """
    return frozenset(
        address for name in others(oned) if not are_one(name, host) for address in _addresses(name)
    )


def _addresses(name: str) -> frozenset[str]:
    try:
        return frozenset(str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return frozenset()
