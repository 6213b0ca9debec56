# SPDX-License-Identifier: Apache-2.0
"""This machine's names and addresses, whether two names are one machine's, and its packages for Python.

Labels are not compared: x9.siteb.example is another machine than the x9 of this site, and `HOSTNAME` of
oned.conf may be any name. A name may have addresses that many machines have (libvirt's bridge, a service)
beside the one by which it is reached.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache

from ..errors import SemisharedError
from .run import run

_DISCARD = 9
"""A port; nothing is sent there."""


@cache
def is_here(host: str) -> bool:
    """Tell whether `host` is this machine. A name that nobody can resolve is another's: ssh may know it."""
    return host.lower() in (os.uname().nodename.lower(), "localhost") or _leads_here(host)


@cache
def are_one(name: str, other: str) -> bool:
    """Tell whether two names are one machine's: the same full name, both this machine's, or of one all
    addresses are the other's.
    """
    if name.lower() == other.lower():
        return True
    if is_here(name) or is_here(other):
        return is_here(name) and is_here(other)
    ways, others = ({address[0] for _, address in _ways(machine)} for machine in (name, other))
    return bool(ways and others) and (ways <= others or others <= ways)


def _leads_here(host: str) -> bool:
    """Tell whether this machine is where ssh would go: to the first of a name's addresses."""
    return any(_is_ours(family, address) for family, address in _ways(host)[:1])


def _ways(host: str) -> list[tuple[int, tuple[object, ...]]]:
    """Return family and address of all to which a name leads, the best first; none if nobody can resolve
    it.
    """
    import socket

    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    """Tell whether an address is one of this machine's: packets to such a one come from itself. All of 127/8
    has one source.
    """
    import socket

    if str(address[0]).startswith("127."):
        return True

    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False


ANSWER_S = 3
MOST_ADDRESSES = 64
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
    return sorted(found)[:MOST_ADDRESSES]


def reach_bindings() -> None:
    """Let this process import the machine's packages, libvirt's and Ceph's bindings: call it right before.

    Every program of ours starts with -S: a start without looks through those packages and loads what their
    .pth files name, 2 to 10 ms.
    """
    if sys.flags.no_site:
        import site

        sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
