# SPDX-License-Identifier: Apache-2.0
"""Steps on the base store of a host: staging, and questions of the `semishared` command.

model/steps.py, which every action loads, does not import them: `steps.from_data` finds them here by name.

`root` is the base store, <DATASTORE_LOCATION>/.semishared; `name` is <store>-<image>-<generation>.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ...errors import BadArguments
from ...named import Named, NamedTuple
from ..refs import ImageRef, Step, looks
from .names import Ranges, from_data

if TYPE_CHECKING:
    from ..shapes import Base, Count, Disk, Generation, Lease, Path


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


class HeldBase(Named):
    """A base on a host."""

    name: Base
    bytes: Count
    staged: float
    """When it was staged: seconds since the epoch."""
    used: float
    """When a lease on it was last taken or given up, or it was staged: seconds since the epoch."""
    leases: tuple[Lease, ...]
    size: Count
    damaged: bool
    device: str
    here: bool = True
    """Whether it is on the file system for which room is wanted."""
    verified: float = 0.0
    """When all of it was read last and found to be good: seconds since the epoch, 0 for never."""
    mended: float = 0.0
    """When it was made anew in place of a damaged one, 0 for never."""
    reread: tuple[Lease, ...] = ()
    """The leases on it then: guests that have run since before that have read the damaged one."""

    @property
    def image(self) -> str:
        return self.name.rsplit("-", 1)[0]


class Listed(Named):
    """The bases of a host, and the room for more."""

    bases: list[HeldBase]
    total: Count
    """Bytes of the file system for which room is wanted."""
    free: Count
    whole: Count
    """Bytes of all devices, of which a limit may be a share."""


class VerifiedBase(Named):
    """How a base compares with its manifest."""

    bad: list[int]
    """Extents that differ; -1: the manifest or the size does."""
    damaged: bool
    bytes: Count
    seconds: float
    leases: tuple[Lease, ...]
    wrong_in_memory: bool = False


class MendedBase(Named):
    """What has become of a damaged base."""

    relinked: list[str]
    """Leases that were given the new content."""


class EvictedBase(Named):
    """Whether a base was removed, and the bytes of it."""

    evicted: bool
    bytes: Count


class KeptDisk(Named):
    """A diff of a deleted VM that is kept."""

    path: Path
    vm: Count
    disk: Count
    image: Any
    bytes: Count
    """Not committed."""
    size: Count
    error: str = ""


class HotBase(Named):
    """The copy in memory of a disk's base, or why there is none."""

    path: str
    why: str


class ReportedDisk(Named):
    """What the record of a disk says, and what the disk takes."""

    disk: Count
    how: str
    place: str
    format: str
    path: str
    bytes: Count
    snapshots: Count
    image: Any
    io_class: str
    uncommitted: Optional[Count]
    device: str
    hot: Optional[HotBase]
    delta: bool = False
    """Whether there is a layer to which its guest writes while it moves, or which a killed move has left."""
    size: Count = 0
    """Bytes that its guest sees, 0 if that is unknown: a thin disk may come to hold so many."""


class ReportedVm(Named):
    """The disks of a VM on a host."""

    vm: Count
    system: Count
    disks: list[ReportedDisk]
    error: str
    wrong: dict[Disk, str] = {}
    """What is wrong with the records of other disks."""


class Reported(Named):
    """All VMs with our records on a host."""

    vms: list[ReportedVm]
    kept: list[KeptDisk]
    errors: list[str]


class PausedGuest(Named):
    """A guest that QEMU has paused after an I/O error of a disk."""

    name: str
    """libvirt's."""
    full: bool
    """Whether there was no room for what it wrote."""


class PausedGuests(Named):
    """The guests of a host that I/O errors have paused, and why they cannot be known ('': they are)."""

    guests: list[PausedGuest]
    error: str = ""


class Served(Named):
    """What a peer has sent of a base."""

    codec: str
    plain: Count
    """Bytes before compression."""


class Streamed(Served):
    """What was multicast to the receivers of a session."""

    packed: Count
    resent_percent: float
    dropped: Count
    """Receivers that were given up."""


class FromSource(Named):
    """What one source has delivered."""

    extents: Count
    bytes: Count


class Fetched(Named):
    """Where bases have come from."""

    sources: dict[str, FromSource]
    """Empty if all were here already."""
    troubles: list[str]


class RehearsedMessage(Named):
    """One message of a rehearsed plan (rehearsal.Noted)."""

    host: str
    steps: list[Any]
    answers: Optional[list[Any]] = None
    during: str = ""
    follows: str = ""


class Rehearsed(Named):
    """A rehearsed plan (rehearsal.Script)."""

    plan: list[RehearsedMessage]
    open: bool
    stdout: str


class DetachedDisk(Named):
    """A disk that lies over a base of its host now."""

    disk: Count
    generation: Generation
    bytes: Count


class DetachedVm(Named):
    """How disks were detached, or why not."""

    vm: Count
    disks: list[DetachedDisk]
    seconds: float
    error: str
    id: str


class DescribedBase(Listed):
    """What a host reports of a base before a session."""

    generation: Generation
    current: Generation
    """Of the image now."""
    has: bool
    manifest: bool
    needed: Count
    """Bytes that the base is going to take."""
    where: str
    """The device on which it would be made."""
    lacks: Any
    """Extents that are not here (names.Ranges); None: unknown."""
    tools: list[str]
    trouble: str
    """Why the store is out of reach, '' if it is not."""


@looks
class ListBases(Step[Listed]):
    """Report all bases of the host, and the capacity of the file system that they are on."""

    root: str


class VerifyBase(Step[VerifiedBase]):
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
class ReadBase(Step[VerifiedBase]):
    """Compare a base as VerifyBase does, and change nothing: one that is wrong stays in use."""

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MendBase(Step[MendedBase]):
    """Make the base `image` anew in place of the damaged one, and give its leases the new content."""

    root: str
    image: ImageRef


class EvictBase(Step[EvictedBase]):
    """Remove a base that has no lease."""

    root: str
    name: str


@looks
class ReportDisks(Step[Reported]):
    """Report the disks of all VMs here with our records, for `semishared status`. No store is touched."""

    location: str
    systems: tuple[int, ...]


@looks
class ReportVms(Step[Reported]):
    """Report the disks of these VMs alone, for `semishared publish`; nothing of kept diffs."""

    location: str
    systems: tuple[int, ...]
    vms: tuple[int, ...]


@looks
class FindPaused(Step[PausedGuests]):
    """Report the guests that stand still for an I/O error, for `semishared attention`."""


class ServeBase(Step[Served]):
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


class ServeExtents(Step[Served]):
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


@looks
class SendManifest(Step[None]):
    """Send the manifest of the base of `image` (with its generation), from here or from the store; its text
    follows as data.
    """

    root: str
    image: ImageRef


class FetchBases(Step[Fetched]):
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
    """Where to receive the session's stream: (portbase, the sender's name or address); empty without one."""
    evict: tuple[str, ...]
    """Bases to remove first, for room."""
    wait: bool = True
    """Wait while a clone or another session is at the same image; else raise BaseBusy."""
    addresses: dict[str, str] = {}
    """Where hosts take bulk data (model/bulk_network.py), as far as it is another way than by their names."""


class StreamBases(Step[Streamed]):
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
    """Name or address of a receiver: the route to it says which network the stream goes to."""
    unpacks: tuple[str, ...] = ()
    """Compressors that all receivers have: the stream uses no other."""


@looks
class RehearseHypervisor(Step[Rehearsed]):
    """Report what a hypervisor action would do, and do nothing; `argv`, `stdin` are OpenNebula's."""

    action: str
    argv: tuple[str, ...]
    stdin: str


class DetachVm(Step[DetachedVm]):
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


class DescribeBase(Step[DescribedBase]):
    """Report whether the base of an image's current generation (or `image.generation`) is here, and what
    staging needs.
    """

    root: str
    image: ImageRef


@looks
class LookAtBase(Step[DescribedBase]):
    """Report what DescribeBase does as far as nothing has to be settled, read or restored for it."""

    root: str
    image: ImageRef
