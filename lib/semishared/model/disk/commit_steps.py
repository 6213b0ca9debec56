# SPDX-License-Identifier: Apache-2.0
"""Steps on diffs: what is written on a host and belongs into an image. Loaded only for such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from ...named import Named
from ..base.steps import KeptDisk
from ..refs import DiskRef, ImageRef, Owner, Step, looks

if TYPE_CHECKING:
    from ..shapes import Base, Count, Generation


class MadeDiff(Named):
    """A disk for which an image waits."""

    before: Optional[Owner]
    """The disk that it waited for until then."""
    kept: str
    """Where an older diff that was in the way is kept."""


class FoundDiff(Named):
    """A disk of a VM's former life, for which an image waits."""

    before: Owner
    epoch: int
    """To note."""


class Turn(Named):
    """The turn at a VM's disks."""

    runs: bool


class Due(Named):
    """The image that the bridge has to settle first, as JSON data, None for none."""

    settle: Any = None


class CommittedDisk(Named):
    """What a commit has done (store/commit/claims.Committed)."""

    bytes: Count
    """That waited."""
    settle: Any = None
    """As of Due; then the step is to be asked for again."""
    kept: str = ""
    """Where the diff is kept, as another copy of the disk was committed first."""
    generation: Generation = ""
    size: Count = 0
    dirty: Count = 0
    written: Count = 0
    seconds: float = 0
    hashed: Count = 0
    waited: float = 0
    how: str = ""


class UncommittedDisk(Named):
    """A diff that goes with its VM as it is."""

    disk: Count
    bytes: Count
    why: str
    waiting: bool
    with_base: bool


class RenewedDisk(Named):
    """A diff that is empty now."""

    disk: Count
    bytes: Count
    settle: Any = None


class RenewedVm(Named):
    """A VM directory after its diffs were committed."""

    disks: list[Union[UncommittedDisk, RenewedDisk]]
    bytes: Count
    bases: tuple[Base, ...]


class KeptStale(Named):
    """What is kept of a VM directory that is to go."""

    kept: list[str]
    seen: str


class CreateDiff(Step[MadeDiff]):
    """Claim an image for a disk, and publish an overlay over the staged base; report the owner before."""

    disk: DiskRef
    image: ImageRef
    min_size: int
    options: str


@looks
class LookForDiff(Step["Optional[FoundDiff]"]):
    """Report whether an image waits for a disk of the VM's former life: `before`, and the `epoch` due."""

    disk: DiskRef
    image: ImageRef


class TakeTurn(Step[Turn]):
    """Hold a VM's disks until the conversation ends; refused if another action works on them.

    Report whether `domain` ('' where there are no domains) `runs`.
    """

    vm: int
    vm_dir: str
    domain: str


class CheckDiff(Step[Due]):
    """Check that a diff can be committed to its image: refuse what a commit would, and change nothing."""

    disk: DiskRef


class CommitDisk(Step[CommittedDisk]):
    """Commit a diff's layers up to `top`, as far as the image does not have them; the disk stays.

    No guest writes to these layers meanwhile. At most `rate` bytes per second go to the store, 0 for no
    limit.
    """

    disk: DiskRef
    top: int
    rate: int = 0


class FinishDisk(Step[CommittedDisk]):
    """Commit all of a diff that no guest has open, give up its claim, and remove it.

    `domain`: the guest from which it was detached, which may run on; '' where there are no domains. `rate` as
    of CommitDisk.
    """

    disk: DiskRef
    domain: str = ""
    rate: int = 0


class RenewVm(Step[RenewedVm]):
    """Commit what the diffs of a VM that is off hold, and lay empty ones over what their images are then;
    report what was done.

    With `all` for a machine that keeps no bases: those of disks that stay as they are go along. Without it
    only of disks that have been committed before: what they lie over is not what the image is any more.
    """

    vm: int
    vm_dir: str
    all: bool
    domain: str = ""
    """What libvirt calls the VM; '' on a machine that runs no domains."""


class KeepStale(Step[KeptStale]):
    """Keep what is not committed of a VM directory that is to go, if its VM was taken over; report where, and
    as what it is `seen` now.
    """

    vm: int
    vm_dir: str
    seen: str


class Kept(Named):
    """The diffs of a VM that are kept."""

    kept: list[KeptDisk]


@looks
class FindKept(Step[Kept]):
    """Report the diffs of a VM that were kept when it was deleted, and what is not committed of each."""

    vm: int
    location: str
    systems: tuple[int, ...]
