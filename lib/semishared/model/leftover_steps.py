# SPDX-License-Identifier: Apache-2.0
"""Steps of `semishared gc` on a machine: look at all that is ours there, remove what is left over.

model/steps.py, which every action loads, does not import them: `steps.from_data` finds them here by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..named import Named
from .refs import Refusal, Step, looks

if TYPE_CHECKING:
    from .shapes import Count, Path


class Seen(Named):
    """A file or directory of ours, with all below it."""

    path: Path
    seen: str
    """Its newest time, in ns since 1970: it has changed since if that is another one."""
    age: int
    """Seconds since then; below 0 where a clock was set back."""
    bytes: Count
    """Allocated."""


class Staged(Seen):
    """An unpublished file."""

    lives: bool = False
    """Whether the process that writes it runs on that machine."""


class SeenLease(Named):
    """A lease on a base. It shares the times of its image: its age is since it was made."""

    path: Path
    age: int
    vm: Count
    disk: Count


class SeenBase(Seen):
    """A base of a host."""

    name: str
    staged: list[Staged]
    leases: list[SeenLease]


class SeenStaging(Seen):
    """A directory in which a base is made."""

    held: bool
    """Whether an action holds its lock."""


class SeenLock(Seen):
    """The lock of a VM."""

    vm: Count


class BaseStore(Named):
    """The base store of a machine."""

    bases: list[SeenBase]
    staging: list[SeenStaging]
    locks: list[SeenLock]


class Unlinked(Seen):
    """A directory on a device to which no link leads."""

    vm: int
    """The VM whose layers it has, -1 of a base."""
    replaced: bool
    """Whether the layers of that disk lie elsewhere on the machine, complete."""


class SeenVm(Seen):
    """A directory of a VM, or beside one (disk/vm_dir_siblings.py)."""

    system: Count
    """The datastore that it is in."""
    vm: Count
    kind: str
    """`dir`, or the word in the name of what lies beside one."""
    entries: list[str]
    staged: list[Staged]
    seq: int = -1
    """SEQ of the VM's history that its last action noted, -1 if none did."""
    noted: bool = False
    """Whether a killed action has begun something there that is not ended."""


class SeenImage(Seen):
    """An image in a mounted store, or layers of one."""

    name: str


class SeenClone(Seen):
    """A clone beside an image, for a disk of a VM."""

    vm: Count
    disk: Count
    cloud: str
    """'' of a clone that does not say whose it is."""


class SeenSide(Seen):
    """The directory beside an image."""

    name: str
    """The image's."""
    clones: list[SeenClone]
    entries: list[str]
    image: bool
    """Whether the image is there."""


class SeenEpoch(Seen):
    """An epoch of a VM."""

    vm: Count
    cloud: str


class SeenUpload(Seen):
    """The directory of an upload."""

    name: str
    held: bool
    """Whether an action holds its lock."""


class SeenStore(Named):
    """A mounted store."""

    path: Path
    images: list[SeenImage]
    sides: list[SeenSide]
    staged: list[Staged]
    epochs: list[SeenEpoch]
    uploads: list[SeenUpload]


class Domains(Named):
    """The domains of a machine, or only the `error` if libvirt cannot be asked."""

    names: list[str] = []
    files: list[str] = []
    """That they use."""
    error: str = ""


class SeenMachine(Named):
    """All that is ours on a machine."""

    open: list[str]
    """Unpublished files that our processes have open."""
    is_away: bool
    """Whether a system datastore is not mounted: bases and leases may be of VMs in it."""
    root: BaseStore
    unlinked: list[Unlinked]
    vms: list[SeenVm]
    unreadable: list[str]
    """What is wrong with records of their disks."""
    staged: list[Staged]
    """Unpublished files beside all these."""
    domains: Domains
    stores: list[SeenStore]
    refused: list[Refusal]
    """Why stores, or system datastores, were not looked into."""


class Discarded(Named):
    """Whether something that was left over is gone."""

    removed: bool


@looks
class LookAround(Step[SeenMachine]):
    """Report all that is ours on the machine, for `semishared gc`; `libvirt`: also what its domains use."""

    location: str
    systems: tuple[int, ...]
    stores: tuple[str, ...]
    libvirt: bool
    markers: tuple[str, ...] = ()
    """The id that each of `stores` must have, '' for one that has none."""


class Discard(Step[Discarded]):
    """Remove one thing that `semishared gc` has found left over, if its newest time is still `seen`."""

    kind: str
    path: str
    location: str
    vm: int
    """The VM whose lock protects it, -1 without one."""
    seen: str
