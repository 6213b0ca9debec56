# SPDX-License-Identifier: Apache-2.0
"""Steps on the base store of a host: staging, and questions of the `semishared` command.

model/steps.py, which every action loads, does not import them: `steps.from_data` finds them here by name.

`root` is the base store, <DATASTORE_LOCATION>/.semishared; `name` is <store>-<image>-<generation>.
"""

from __future__ import annotations

from typing import Any

from ...errors import BadArguments
from ...named import NamedTuple
from ..refs import ImageRef, Step, looks
from .names import Ranges, from_data


class Part(NamedTuple):
    """A base of `image` (with its generation) that a host is to have."""

    image: ImageRef
    holders: tuple[str, ...] = ()
    """Hosts that have it, or will soon, in the order in which they are asked for extents that are not shared.
    """
    shared: Ranges = ()
    """Extents that hosts of the session send each other: the store is not read for them."""
    first: Ranges = ()
    """Extents that the store gives first: other hosts wait for them."""
    device: str = ""
    """The UUID of the device that has room for it; '' on a host without a pool, or if no device was chosen.
    """

    def to_data(self) -> dict[str, object]:
        """Return the part as JSON data."""
        return {**self._asdict(), "image": self.image.to_data()}

    @classmethod
    def from_data(cls, data: object) -> Part:
        """Return the part in JSON data; raise BadArguments."""
        if (
            not isinstance(data, dict)
            or set(data) != set(cls._fields)
            or not isinstance(data["holders"], list)
        ):
            raise BadArguments(f"no part: {str(data)[:200]}")
        return cls(
            ImageRef.from_data(data["image"]),
            tuple(map(str, data["holders"])),
            from_data(data["shared"]),
            from_data(data["first"]),
            str(data["device"]),
        )


@looks
class ListBases(Step[Any]):
    """Report all bases of the host, and the capacity of the file system that they are on."""

    root: str


class VerifyBase(Step[Any]):
    """Read a base from the disk and compare every extent with its manifest; take it out of use if one is
    wrong.
    """

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""
    only: tuple[int, ...] = ()
    """The extents that were found to be wrong; none: read all."""


@looks
class ReadBase(Step[Any]):
    """Compare a base as VerifyBase does, and change nothing: one that is wrong stays in use."""

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MendBase(Step[Any]):
    """Make the base `image` anew in place of the damaged one, and give its leases the new content."""

    root: str
    image: ImageRef


class EvictBase(Step[Any]):
    """Remove a base that has no lease."""

    root: str
    name: str


@looks
class ReportDisks(Step[Any]):
    """Report the disks of all VMs here with our records, for `semishared status`. No store is touched."""

    location: str
    systems: tuple[int, ...]


class ServeBase(Step[Any]):
    """Send the extents `wanted` of a base, also of one that is being made here; packets follow as data."""

    root: str
    name: str
    wanted: tuple[tuple[int, int], ...]
    """Ranges of extents, (first, last + 1); none: all."""
    session: str
    codec: str
    rate: int
    """Bytes per second at most, 0 for no limit."""
    apart: bool = False
    """By a connection of their own, in clear, if this host's network is trusted too (stage/clear_tcp.py)."""
    unpacks: tuple[str, ...] = ()
    """Compressors of the receiver: packets use no other."""
    knows: bool = False
    """The receiver has the manifest, which goes first otherwise."""


class ServeExtents(Step[Any]):
    """Send extents by their hashes, from any base, also one that is being made; packets follow as data.

    Extents that are not here, and not about to come, are not sent.
    """

    root: str
    wanted: tuple[str, ...]
    session: str
    codec: str
    rate: int
    """Bytes per second at most, 0 for no limit."""
    apart: bool = False
    """By a connection of their own, in clear, if this host's network is trusted too (stage/clear_tcp.py)."""
    unpacks: tuple[str, ...] = ()
    """Compressors of the receiver: packets use no other."""


class SendManifest(Step[None]):
    """Send the manifest of the base of `image` (with its generation), from here or from the store; its text
    follows as data.
    """

    root: str
    image: ImageRef


class FetchBases(Step[Any]):
    """Have the bases of `parts`: from other bases here, the stream of a session, its hosts, holders, and the
    store.
    """

    root: str
    parts: tuple[Part, ...]
    sources: tuple[str, ...]
    """Hosts of the session that have shared extents, or will soon, in the order in which they are asked."""
    from_store: str
    """Use of the store.

    'rest': extents that are not shared, in the end; 'quicker': these, and earlier if they come sooner than
    from holders; 'all': in the end also shared extents that no host has sent.
    """
    session: str
    """ID:KEY of the session whose stream is received."""
    codec: str
    rate: int
    """Bytes per second at most from a peer, and from the store for `first`; 0 for no limit."""
    store_rate: int
    """The same for all else from the store."""
    stream: tuple[object, ...]
    """Where to receive the session's stream: (portbase, the sender's name); empty if there is none."""
    evict: tuple[str, ...]
    """Bases to remove first, for room."""
    wait: bool = True
    """Wait while a clone or another session is at the same image; else raise BaseBusy."""


class StreamBases(Step[Any]):
    """Send the `shared` extents of the parts to all receivers of a session at once (udpcast).

    They go as they arrive here; the rest is read from the store.
    """

    root: str
    parts: tuple[Part, ...]
    session: str
    codec: str
    rate: int
    """Bytes per second at most on the network, 0 for no limit."""
    portbase: int
    receivers: int
    toward: str
    """A receiver: the route to it says which network the stream goes to."""
    unpacks: tuple[str, ...] = ()
    """Compressors that all receivers have: the stream uses no other."""


@looks
class RehearseHypervisor(Step[Any]):
    """Report what a hypervisor action would do, and do nothing; `argv`, `stdin` are OpenNebula's."""

    action: str
    argv: tuple[str, ...]
    stdin: str


class DetachVm(Step[Any]):
    """Detach disks of a VM, which read from the store, onto bases of this host; report each, or why it stays.

    The VM may run. The machine asks, when it has the VM to itself, whether oned still has it in the same
    state: {"question": "vm", "vm": id}.
    """

    vm: int
    vm_dir: str
    domain: str
    """'' of a VM that is off."""
    disks: tuple[int, ...]
    generations: tuple[str, ...]
    """The generation that each of `disks` lies over."""
    rate: int
    """Bytes per second at which layers are copied, 0 for no limit."""


class DescribeBase(Step[Any]):
    """Report whether the base of an image's current generation (or `image.generation`) is here, and what
    staging needs.
    """

    root: str
    image: ImageRef
