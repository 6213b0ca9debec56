# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that concerns the base store of a host, and what the operator's command asks of it.

Not passed on by steps.py, which every action loads: `steps.from_data` finds them here when they are named.

`root` is the base store, <DATASTORE_LOCATION>/.semishared; `name` is <store>-<image>-<generation>.
"""

from __future__ import annotations

from typing import NamedTuple

from .refs import ImageRef


class ListBases(NamedTuple):
    """Report all bases of the host, and the capacity of the file system that they are on."""

    root: str


class VerifyBase(NamedTuple):
    """Read a base from the disk and compare every extent with its manifest; take it out of use if one is wrong."""

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class ReadBase(NamedTuple):
    """Compare a base as VerifyBase does, and change nothing: one that is wrong stays in use."""

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MendBase(NamedTuple):
    """Have the base `image` anew in place of the one that was taken out of use, and give its leases the new content."""

    root: str
    image: ImageRef


class EvictBase(NamedTuple):
    """Remove a base if nobody has a lease on it."""

    root: str
    name: str



class ReportDisks(NamedTuple):
    """Report the disks of all VMs here that have records of ours, for `semishared status`. Nothing on a store is touched."""

    location: str
    systems: tuple[int, ...]


class ServeBase(NamedTuple):
    """Send the extents `wanted` of a base, or of one that is being made here, to whoever asks; packets follow as data."""

    root: str
    name: str
    wanted: tuple[tuple[int, int], ...]
    """Ranges of extents, (first, last + 1); none: all."""
    session: str
    codec: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class FetchBase(NamedTuple):
    """Have the base of `image` (with its generation): from the stream of a session, from peers, or from the store."""

    root: str
    image: ImageRef
    sources: tuple[str, ...]
    """Hosts that have it or are about to, in the order in which they are asked."""
    from_store: str
    """'first' (before any peer), 'last', or 'no'."""
    session: str
    """ID:KEY of the session whose stream is received."""
    codec: str
    rate: int
    stream: tuple[object, ...]
    """Where to receive the session's stream: (portbase, the sender's name); empty if there is none."""
    evict: tuple[str, ...]
    """Bases to remove first, for room."""
    wait: bool = True
    """Wait while a clone or another session is at the same image; else raise BaseBusy."""


class StreamBase(NamedTuple):
    """Send a base, or one that is arriving here, to all receivers of a session at once (udpcast)."""

    root: str
    name: str
    session: str
    codec: str
    rate: int
    """Bytes per second at most on the network, 0 for no limit."""
    portbase: int
    receivers: int
    toward: str
    """A receiver: the route to it says which network the stream goes to."""


class RehearseHypervisor(NamedTuple):
    """Report what a hypervisor action would do here, and do nothing: `argv` and `stdin` as OpenNebula gives them."""

    action: str
    argv: tuple[str, ...]
    stdin: str


class DescribeBase(NamedTuple):
    """Report whether the base of an image's current generation (or `image.generation`) is here, and what staging needs."""

    root: str
    image: ImageRef
