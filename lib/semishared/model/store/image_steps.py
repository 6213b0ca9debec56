# SPDX-License-Identifier: Apache-2.0
"""Steps on images in stores. model/steps.py loads them when they are asked for.

Most are a verb of their store, with its arguments (table.py). They are carried out where the store's
images are changed: on its bridge, as `bridge_user`, or, if it has none, wherever it is reached. Hosts only
read, and write to what the bridge has made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named import Named
from ..disk.network_disk import NetworkDisk
from ..disk.snapshot_steps import Rested
from ..refs import DiskRef, ImageRef, Step, looks
from .access import Access
from .datastore_steps import *  # noqa: F403 - the vocabulary is one, in files of a size to read

if TYPE_CHECKING:
    from typing import Optional  # noqa: F401 - answers in quotes

    from ..shapes import Count, Generation, Snapshot, Stored

# -- on a host ----------------------------------------------------------------------------------------


class SeenImage(Named):
    """The present content of an image."""

    frozen: bool
    generation: Generation


class LentContent(Named):
    """The snapshot that a disk reads."""

    snapshot: Snapshot
    generation: Generation


class StoredImage(Named):
    """What an image of a pool is, for `semishared gc`."""

    age: int
    size: Count
    made: str
    """Our mark, '' of an image of another maker."""
    watchers: list[str]
    clones: list[str]


class PassingSnapshot(Named):
    """A snapshot of ours that is no generation."""

    name: str
    age: int
    clones: list[str]


class PassingSnapshots(Named):
    """Such snapshots of an image."""

    watchers: list[str]
    """Clients that have the image open."""
    snapshots: dict[str, PassingSnapshot]
    """By their ids."""


class Dropped(Named):
    """Whether a snapshot was removed."""

    removed: bool


class BegunSession(Named):
    """Clients that have the image open and are not seen to write."""

    open_by: list[str]


class MadeClone(Named):
    """The id of a clone."""

    made: str


class BegunChange(Named):
    """An image that is hidden while a host replaces its content."""

    hidden: Stored
    change: str


@looks
class SeeImage(Step[SeenImage]):
    """Report whether the present content of an image is frozen, and which generation it is."""

    image: ImageRef


@looks
class SeeSession(Step[str]):
    """Report what names the session that an image is in, '' if none is noted."""

    image: ImageRef


class RecordNetwork(Step[None]):
    """Record that a disk is opened over the network; there is no file of it."""

    disk: DiskRef
    image: ImageRef
    network: NetworkDisk
    how: str
    readonly: bool


class ConfirmDisk(Step[None]):
    """Fail (VmGone) if a disk was deleted after this was planned."""

    disk: DiskRef


class ForgetDisk(Step[None]):
    """Remove a disk's record, after what it names on the network is gone."""

    disk: DiskRef


class FillImage(Step[Rested]):
    """Write the content of a local disk (at `snapshot`, -1 for now) to the new image that the bridge has
    made; `domain` runs.
    """

    disk: DiskRef
    image: ImageRef
    domain: str
    snapshot: int
    freeze: str = "NONE"


class RestoreImage(Step[None]):
    """Give an image that the bridge has hidden and emptied the content of the qcow2 image that follows."""

    disk: DiskRef
    image: ImageRef


class RestoreTpm(Step[None]):
    """Give a VM that is off the state of a TPM in the archive that follows, a backup's `disk.tpm.0`."""

    vm: int
    vm_dir: str


# -- where images are changed --------------------------------------------------------------------------


class LendContent(Step[LentContent]):
    """Have a snapshot of an image's content that keeps its name until a session begins.

    Return its name and the generation.
    """

    image: ImageRef


class HoldMoment(Step[None]):
    """Keep the present content of an image that a guest writes to, for the CopyHeld which follows."""

    image: ImageRef


class CopyHeld(Step[None]):
    """Publish `image`, an independent copy of the moment of the image `source` that HoldMoment has kept."""

    image: ImageRef
    source: str


class StageImage(Step["Stored"]):
    """Make an empty image of `size` bytes that is not published yet; report its name."""

    image: ImageRef
    size: int


class PublishImage(Step[None]):
    """Publish what a host has written to a staged image."""

    image: ImageRef
    staged: str


@looks
class ListPool(Step["list[str]"]):
    """Report the names of all images of a pool."""

    access: Access
    where: str


@looks
class LookAtImages(Step["dict[str, StoredImage]"]):
    """Report, for `semishared gc`, what some images of a pool are."""

    access: Access
    where: str
    names: tuple[str, ...]


@looks
class FindSnapshots(Step["dict[str, PassingSnapshots]"]):
    """Report, for `semishared gc`, which images of a pool have snapshots of ours that are no generations."""

    access: Access
    where: str
    names: tuple[str, ...]


class DropSnapshot(Step[Dropped]):
    """Remove such a snapshot by its id; report whether it is `removed`: clones may depend on it."""

    image: ImageRef
    snapshot: int


class FreezeImage(Step["Optional[Generation]"]):
    """Have a snapshot of the present content of an image."""

    image: ImageRef


class NameGeneration(Step[None]):
    """Name the frozen content with the id `snapshot` after its generation."""

    image: ImageRef
    snapshot: int
    generation: str


class BeginSession(Step[BegunSession]):
    """End an image's generations before a guest writes to it (unless `readonly`, or a guest writes now).

    Report its size, and the clients that have it open and are not seen to write.
    """

    image: ImageRef
    readonly: bool
    shareable: bool = False
    """Others may write to it too."""


class CheckWriters(Step["Optional[list[str]]"]):
    """Raise AnotherWriter if a guest is seen to write to an image; report other clients that have it open."""

    image: ImageRef


@looks
class FindClone(Step[str]):
    """Report an image's clone for a disk: its active layer, or its name in the pool; '' for none."""

    image: ImageRef
    vm: int
    number: int


class NoteEpoch(Step[None]):
    """Note, beside or on an image, that a VM's directories of before SEQ `epoch` do not count."""

    image: ImageRef
    vm: int
    epoch: int


class CloneStored(Step[MadeClone]):
    """Publish `clone`, a copy-on-write clone of at least `size` bytes; report its id (`made`)."""

    image: ImageRef
    clone: str
    size: int


class TakeBackClone(Step[None]):
    """Remove a clone, if it is the one that CloneStored has `made`: the name may be another one's by now."""

    image: ImageRef
    made: str


class KeepSnapshot(Step[None]):
    """Keep the present content of an image as its snapshot `snapshot`."""

    image: ImageRef
    snapshot: int


class GrowImage(Step[None]):
    """Grow an image to `size` bytes, at least."""

    image: ImageRef
    size: int


class BeginChange(Step[BegunChange]):
    """Hide and empty an image, of at least `size` bytes, while a host replaces its content.

    Report its `hidden` name meanwhile, and what no other `change` of it is called.
    """

    image: ImageRef
    size: int


class EndChange(Step[None]):
    """Show a hidden image again, if `change` is its own: if `whole` with its new content, else its old."""

    image: ImageRef
    whole: bool
    change: str = ""
    """'': whichever is under way."""


class SettleImage(Step[None]):
    """End or undo what a commit to an image has begun; make what one has made of it known."""

    image: ImageRef
