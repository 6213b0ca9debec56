# SPDX-License-Identifier: Apache-2.0
"""The other front-ends of an HA group, as oned's zone lists them.

oned runs on each of them, and only the leader's starts drivers. What a leader writes on its own disk stays
there when another one leads:

    VM directories of stopped and undeployed VMs    found there by the new leader (plan/vm/at_rest.py)
    the key for marks of fences                     the same on each: `setup --key`, doctor
    semishared.conf, the package                    the same on each: doctor
    notes of VMs and datastores, hints, locks       not wanted: they are made anew, or their owner uses them
                                                    when it is up again (docs/how-to/high-availability.md)
"""

from __future__ import annotations

import socket

from ..opennebula.oned import Oned
from ..tools.this_machine import are_one, is_here
from ..wire import session


def others(oned: Oned) -> list[str]:
    """Return the addresses of this zone's other front-ends, none without HA; raise OnedUnavailable.

    Sessions with them begin in the package that they have as this one has it.
    """
    zones = [found for found in oned.front_ends() if found]
    ours = [zone for zone in zones if any(map(is_here, zone))]
    # Of several zones in a federation, the one of this machine; a single one is ours whatever its names.
    found = [
        name for zone in ours or (zones if len(zones) == 1 else []) for name in zone if not is_here(name)
    ]
    session.front_ends.update(found)
    return found


def addresses_but(oned: Oned, host: str) -> frozenset[str]:
    """Return the addresses of the other front-ends, as far as names resolve, without those of `host`.

    They may not be shut out: they have the same key. Raise OnedUnavailable.
    """
    return frozenset(
        address for name in others(oned) if not are_one(name, host) for address in _addresses(name)
    )


def _addresses(name: str) -> frozenset[str]:
    try:
        return frozenset(str(row[4][0]) for row in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return frozenset()
