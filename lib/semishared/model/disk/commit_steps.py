# SPDX-License-Identifier: Apache-2.0
"""Steps on diffs: what is written on a host and belongs into an image. Loaded only for such."""

from __future__ import annotations

from typing import Any

from ...named import Named
from ..base.steps import KeptDisk
from ..refs import DiskRef, ImageRef, Step, looks


class CreateDiff(Step[Any]):
    """Claim an image for a disk, and publish an overlay over the staged base; report the owner before."""

    disk: DiskRef
    image: ImageRef
    min_size: int
    options: str


@looks
class LookForDiff(Step[Any]):
    """Report whether an image waits for a disk of the VM's former life: `before`, and the `epoch` due."""

    disk: DiskRef
    image: ImageRef


class TakeTurn(Step[Any]):
    """Hold a VM's disks until the conversation ends; refused if another action works on them.

    Report whether `domain` ('' where there are no domains) `runs`.
    """

    vm: int
    vm_dir: str
    domain: str


class CheckDiff(Step[Any]):
    """Check that a diff can be committed to its image: refuse what a commit would, and change nothing."""

    disk: DiskRef


class CommitDisk(Step[Any]):
    """Commit a diff's layers up to `top`, as far as the image does not have them; the disk stays.

    No guest writes to these layers meanwhile. At most `rate` bytes per second go to the store, 0 for no
    limit.
    """

    disk: DiskRef
    top: int
    rate: int = 0


class FinishDisk(Step[Any]):
    """Commit all of a diff that no guest has open, give up its claim, and remove it.

    `domain`: the guest from which it was detached, which may run on; '' where there are no domains. `rate` as
    of CommitDisk.
    """

    disk: DiskRef
    domain: str = ""
    rate: int = 0


class RenewVm(Step[Any]):
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


class KeepStale(Step[Any]):
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
