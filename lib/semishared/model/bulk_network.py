# SPDX-License-Identifier: Apache-2.0
"""The network for bulk data between machines: `bulk` in [network] of semishared.conf.

Each host tells oned its addresses with its monitoring (host/probe.py). The front-end takes the one within
that network, and names it wherever it names a host that others get bulk data from or send it to. So no name
has to resolve to it, and hosts need no setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


def _bits(address: str) -> str:
    """Return the bits of an IPv4 or IPv6 address as a text of 0 and 1; raise ValueError.

    Each action of a site with the setting reads it: ipaddress would take a tenth of the start of a driver.
    """
    import _socket as socket

    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address)
    except OSError:
        raise ValueError(address) from None
    return f"{int.from_bytes(packed, 'big'):0{8 * len(packed)}b}"


def _network(text: str) -> tuple[str, int]:
    """Return the bits that all addresses of a network begin with, and how many an address has."""
    address, slash, length = text.partition("/")
    bits = _bits(address)
    if slash and not (length.isascii() and length.isdigit() and int(length) <= len(bits)):
        raise ValueError(text)
    return bits[: int(length)] if slash else bits, len(bits)


def is_network(text: str) -> bool:
    """Tell whether `bulk` can be that: a network, or one address."""
    try:
        _network(text)
    except ValueError:
        return False
    return True


def within(bulk: str, addresses: Iterable[str]) -> list[str]:
    """Return those of the addresses that are in the network, in their order; what is none is left out."""
    (prefix, length), found = _network(bulk), []
    for address in addresses:
        try:
            bits = _bits(address)
        except ValueError:
            continue
        if len(bits) == length and bits.startswith(prefix):
            found.append(address)
    return found


def chosen(bulk: str, told: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return by name where each machine takes bulk data, of the addresses that each has told; a machine that
    has none is left out.

    An address that several tell leads to one of them alone, or to neither: it counts for none.
    """
    known = {name: within(bulk, addresses) for name, addresses in told.items()}
    counts = Counter(address for addresses in known.values() for address in set(addresses))
    own = {name: [one for one in addresses if counts[one] == 1] for name, addresses in known.items()}
    return {name: addresses[0] for name, addresses in own.items() if addresses}


def why_none(bulk: str, name: str, told: Mapping[str, Iterable[str]]) -> str:
    """Return why a machine has no address for bulk data, '' if it has one."""
    if name in chosen(bulk, told):
        return ""
    for address in within(bulk, told[name]):
        others = ", ".join(other for other in told if other != name and address in within(bulk, told[other]))
        return f"its address {address} is one of {others} too"
    return f"its monitoring has told no address in {bulk}"
