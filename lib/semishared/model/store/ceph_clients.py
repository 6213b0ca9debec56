# SPDX-License-Identifier: Apache-2.0
"""What a Ceph cluster says of its clients, to shut one out.

store/rbd/blocklist.py asks for it, plan/care/fence.py decides by it.
"""

from __future__ import annotations

from typing import FrozenSet, Mapping, Tuple

from ...named import NamedTuple

FOR_EVER_S = 10 * 365 * 86400
"""How long an entry of ours lasts unless `semishared fence --lift` removes it: Ceph knows none without an
end.
"""


class Opener(NamedTuple):
    """A client that has an image open for writing, or the lock of one that had: that stays when the client is
    gone.
    """

    image: str
    """POOL/IMAGE"""
    client: str
    """client.4142, as `rbd lock ls` has it."""
    address: str
    """10.0.0.3:0/1285607948: the last number is drawn anew by each connection."""


class Ceph(NamedTuple):
    """One cluster."""

    fsid: str
    openers: Tuple[Opener, ...] = ()
    daemons: FrozenSet[str] = frozenset()
    """Addresses of its OSDs, without ports."""
    images: FrozenSet[str] = frozenset()
    """POOL/IMAGE, of our pools."""
    bridges: FrozenSet[str] = frozenset()
    """Hosts that make and change images there (BRIDGE_LIST)."""


class Blocklist(NamedTuple):
    """The entries of a cluster's blocklist: address -> for how many seconds yet."""

    entries: Mapping[str, float]

    def lacks(self, wanted: Tuple[str, ...]) -> Tuple[str, ...]:
        """Return the wanted entries that are not there, or would expire before `semishared fence --lift`."""
        return tuple(entry for entry in wanted if self.entries.get(entry, 0.0) < FOR_EVER_S / 2)


def ip_of(address: str) -> str:
    """Return the bare address of ADDRESS:PORT/NONCE as Ceph writes it, in IPv6 without the brackets."""
    return address.rpartition(":")[0].strip("[]")


def canonical(text: str) -> str:
    """Return an address as Ceph and the kernel write it, '' if it is none: of two spellings of one each might
    be taken for another's.
    """
    import ipaddress

    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return ""
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return "" if "%" in text else str(mapped or found)


def whole(ip: str) -> str:
    """Return the entry that shuts out every client of an address."""
    return f"[{ip}]:0/0" if ":" in ip else f"{ip}:0/0"


def is_whole(entry: str) -> bool:
    """Tell whether an entry is for an address, whatever connects from it."""
    return entry.endswith(":0/0")
