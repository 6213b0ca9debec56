# SPDX-License-Identifier: Apache-2.0
"""Where images live: what a store can be asked and told, and which kind of store answers.

A kind is a class, loaded when a store of it is used, and its capabilities (model/store/access.py), by which
callers decide what they ask. SOURCE of an image is ROOT/NAME in every kind: the datastore's directory, or its
pool, and a name in it.

Each method may be called again after it was killed anywhere, and then does the rest. What it makes is there
whole or not at all. They run where the kind's images are changed: on any machine that mounts the store, or on
the store's bridge.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Tuple,
)

from ..model.refs import ImageRef
from ..model.store.access import Access

if TYPE_CHECKING:
    from ..model.disk.network_disk import NetworkDisk
    from ..model.refs import Owner
    from ..tools.extents import Manifest
    from .commit.claims import Committed, Diff


class Content(Protocol):
    """The content of one image in its store.

    What `see` returns means something to its own store only; equal before and after means that nobody wrote
    in between.
    """

    def see(self) -> Any:
        """Return the image's state; raise MissingImage, StoreUnavailable, CephUnavailable."""

    def generation(self, seen: Any) -> str:
        """Return the name of the generation that was seen, '' if its content is unknown."""

    def allocated(self, seen: Any) -> int:
        """Return about how many bytes a copy of what was seen takes."""

    def copy(self, seen: Any, target: str, format: str) -> Manifest:
        """Copy what was seen to the new sparse file `target` and return the manifest of what was read."""

    def read(self, wanted: Iterable[int], seen: Any = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted` of the image, for whoever knows their hashes: as it
        was `seen` just now.
        """

    def expected(self, generation: str) -> Manifest | None:
        """Return the manifest of `generation` if the store keeps it, to say where a copy differs."""

    def publish(self, found: Manifest, seen: Any) -> None:
        """Make `found` known as the content that was seen, if this machine may say so."""

    def unnamed(self) -> dict[str, object]:
        """Return what `name` must be told to make known what `publish` could not; nothing if it could."""

    def tidy(self) -> None:
        """Remove what writers killed long ago have left beside the image."""


class Draft(Protocol):
    """New content that is not an image yet."""

    @property
    def path(self) -> str:
        """Return what QEMU is to write to, whoever it is."""

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        """Write the content of the image `source` that qemu-img opens as `format`, with all it lies over;
        `share`: somebody has it open.
        """


class Store(Protocol):
    """A store of one kind, as it is reached (Access)."""

    # -- looking ------------------------------------------------------------------------------------

    def reach(self, where: str) -> None:
        """Raise unless the store is there, and the right one."""

    def check(self, image: ImageRef) -> None:
        """Raise unless the store is the right one, and the image is there and fit for a guest."""

    def content(self, image: ImageRef) -> Content:
        """Return the content of an image, as hosts read it that keep bases."""

    def opened(self, image: ImageRef, snapshot: int = -1) -> ContextManager[str]:
        """Yield what qemu-img is to open to read an image, or one of its snapshots, as a guest does."""

    def attach(self, image: ImageRef) -> Tuple[str, Optional[NetworkDisk]]:
        """Return where libvirt finds the image, a path or a disk on the network, for the disk's record; make
        what that needs.
        """

    def writers(self, image: ImageRef) -> List[str]:
        """Raise AnotherWriter if a guest is seen to write to the image; return who else has it open."""

    def snapshots(self, image: ImageRef) -> List[int]:
        """Return the numbers of an image's snapshots, as OpenNebula counts them."""

    def digest(self, image: ImageRef, kind: str) -> tuple[str, int]:
        """Return the hex digest of a whole image, `kind` as hashlib names it, and its size."""

    def capacity(self, where: str) -> Tuple[int, int, int]:
        """Return bytes used, total and free of the directory or pool."""

    def leftovers(self, root: str) -> List[str]:
        """Return what is there unpublished: of an action under way, or of one that was killed."""

    # -- images -------------------------------------------------------------------------------------

    def publish(
        self, image: ImageRef, path: str, known: Manifest | None = None, *, sparse: bool = True
    ) -> str:
        """Publish a private file, which the store may take; return its generation. `known`: its content."""

    def receive(
        self, image: ImageRef, size: int, extents: Iterable[tuple[int, bytes]], said: Callable[[], str]
    ) -> str:
        """Make the new image from extents that arrive; return its generation, which is what was `said`, or
        raise TransferCorrupt.
        """

    def create(self, image: ImageRef, size: int, fs: str) -> None:
        """Make a new empty image, with a file system unless `fs` is ''."""

    def copy(self, image: ImageRef, source: str, snapshot: int = -1, most: int = 0) -> None:
        """Make the new `image` an independent copy of another one of this kind that nobody writes to, or of a
        snapshot of it.

        Raise UploadTooLarge if it has more than `most` bytes, unless that is 0.
        """

    def made(self, image: ImageRef, size: int) -> ContextManager[Draft]:
        """Yield the draft of a new image; it is published when the block ends well, else removed."""

    def remove(self, image: ImageRef) -> None:
        """Remove an image, its snapshots and all of ours that belongs to it; raise ImageInUse if something
        depends on it.
        """

    def grow(self, image: ImageRef, size: int) -> None:
        """Grow an image to `size` bytes, at least."""

    # -- what its content is called -----------------------------------------------------------------

    def freeze(self, image: ImageRef) -> str:
        """Have the present content in a state in which hosts can read it; return its generation, '' if nobody
        knows it yet.
        """

    def name(self, image: ImageRef, snapshot: int, generation: str) -> None:
        """Say which generation the frozen content `snapshot` is, as `Content.unnamed` has it."""

    def begin_session(self, image: ImageRef) -> None:
        """End the generations of an image, before a guest writes to it."""

    def session(self, image: ImageRef) -> str:
        """Return what names the session that was begun last, '' if none is noted: what was planned in another
        one is late.
        """

    def replaced(self, image: ImageRef, size: int, session: str = "") -> ContextManager[Draft]:
        """Yield the draft of new content, of at least `size` bytes; the image has it when the block ends
        well, else what it had.

        A new session begins. Raise AnotherWriter, ImageInUse, or Overtaken if one has begun meanwhile, or
        since `session`.
        """

    # -- snapshots and clones -----------------------------------------------------------------------

    def keep(
        self,
        image: ImageRef,
        snapshot: int,
        fill: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Keep the present content of an image as its snapshot; `check` is called before that is published.

        Where the store sees no more than what a running guest has written out, its QEMU writes the snapshot:
        `fill`, to a path.
        """

    def forget(self, image: ImageRef, snapshot: int, session: str = "") -> None:
        """Remove a snapshot of an image; one that is not there is removed already.

        Raise Overtaken in another `session` than that, unless it is ''.
        """

    def revert(self, image: ImageRef, snapshot: int, size: int = 0, session: str = "") -> None:
        """Give an image the content of its snapshot, and at least `size` bytes; all snapshots stay, a new
        session begins.

        Raise AnotherWriter, ImageInUse, or Overtaken as `forget`, or if a session has begun meanwhile.
        """

    def flatten(self, image: ImageRef, snapshot: int, size: int = 0) -> None:
        """Revert an image and remove all of its snapshots; without any that is done already."""

    def clone_of(self, image: ImageRef, vm: int, disk: int) -> str:
        """Return the name of the image's clone for a disk."""

    def clone(self, image: ImageRef, clone: str, size: int) -> None:
        """Make a copy-on-write clone of the image's present content, of at least `size` bytes, in place of
        what has its name.
        """

    def remove_clone(self, image: ImageRef, clone: str) -> None:
        """Remove a clone with its snapshots; one that is not there is removed already."""

    def clone_found(self, image: ImageRef, vm: int, number: int) -> str:
        """Return what `clone` has made for a disk, as its guest last wrote to it: an active layer or an
        image; '' for nothing.
        """

    # -- diffs (model/refs.py): told by hosts, but for `settle` -----------------------------------------

    def settle(self, image: ImageRef) -> None:
        """End what a killed commit has begun, or undo it; what looks at an image or changes it here does that
        first by itself.
        """

    def claim(self, image: ImageRef, owner: Owner) -> Optional[Owner]:
        """Make a disk the only one that may commit to the image, which is `owner.generation` now; return
        whose it was before.

        Again for the same diff, on another host or later: what it has committed stays noted. Raise StaleDiff,
        CommitRefused.
        """

    def owner(self, image: ImageRef) -> Optional[Owner]:
        """Return the last claim, None for none."""

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Forget a claim, if it is this disk's."""

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Raise what `commit` would refuse for: NotOwner, StaleDiff, CommitRefused, AnotherWriter."""

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Make the image what `diff` is: its layers over its base. Returns when that is durable.

        For every reader it is the old or the new content. Killed anywhere, and done again or not, it is one
        of both, and the diff is as it was. A store with a bridge is told `settle` there, before the next
        commit at the latest. Raise NotOwner, StaleDiff, CommitRefused, AnotherWriter, NoSpace.
        """

    # -- whose a VM is ------------------------------------------------------------------------------

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Note that what was made of a VM before SEQ `epoch` of its history is not the VM's any more; never
        an earlier one.
        """

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Return what `note_epoch` has noted, -1 for nothing; asked by hosts."""


class Bridged(Store, Protocol):
    """A store whose images one machine changes and another one fills; image.source is then what the first has
    told.
    """

    def keyed(self) -> Access:
        """Return how the store is reached with the keys of this machine: the front-end may have the bridge's
        alone.
        """

    def is_settled(self, image: ImageRef) -> bool:
        """Tell whether hosts may claim the image and commit to it: no `settle` is due; asked by hosts."""

    def look(self, image: ImageRef) -> Dict[str, object]:
        """Return whether the present content is frozen, and its generation."""

    def lend(self, image: ImageRef) -> Dict[str, str]:
        """Have a `snapshot` of the present content that keeps its name until a session begins; return it, and
        its `generation`.
        """

    def hold(self, image: ImageRef) -> None:
        """Keep the present moment of an image that a guest writes to, for `copy_held`."""

    def copy_held(self, image: ImageRef, source: str) -> None:
        """Make the new `image` a copy of the moment that is held of `source`."""

    def stage(self, image: ImageRef, size: int) -> str:
        """Return the name of a new empty image that is not published."""

    def show(self, image: ImageRef, staged: str) -> None:
        """Publish what was staged."""

    def clone_for(self, image: ImageRef, clone: str, size: int, seq: int = -1) -> Dict[str, str]:
        """Make a clone as `clone` does, for a VM at that SEQ of its history (-1: not known); return what was
        `made`, by its id.

        Raise LateAction if the name is that of one for a later SEQ.
        """

    def take_back(self, image: ImageRef, made: str) -> None:
        """Remove an image, if its id is that."""

    def refuse_late(self, source: str, seq: int) -> None:
        """Raise LateAction if an image was made for its VM at a later SEQ than that."""

    def begin_change(self, image: ImageRef, size: int) -> Dict[str, str]:
        """Hide and empty an image; return its `hidden` name meanwhile, and what names this `change`."""

    def end_change(self, image: ImageRef, whole: bool, change: str = "") -> None:
        """Show it again: with its new content, or with what it had. Raise Overtaken if another change of it
        is under way by then.
        """

    def draft(self, image: ImageRef) -> Draft:
        """Return what a host fills that was staged, or hidden."""

    def names(self, where: str) -> List[str]:
        """Return the names of all images of a pool."""

    def describe(self, where: str, names: Iterable[str]) -> Dict[str, Dict[str, object]]:
        """Return age, size, maker, watchers and clones of images of a pool, by name, of those that are
        there.
        """

    def passing(self, where: str, names: Iterable[str]) -> Dict[str, Dict[str, object]]:
        """Return the snapshots of images of a pool that are no generations, and who has these images open, by
        name.
        """

    def drop_snapshot(self, image: ImageRef, snapshot: int) -> Dict[str, bool]:
        """Remove such a snapshot, by its id; say whether it is `removed`."""


def _dir(access: Access) -> Store:
    from .dir.store import DirStore

    return DirStore(access)


def _rbd(access: Access) -> Bridged:
    from .rbd.store import RbdStore

    return RbdStore(access)


KINDS: Dict[str, Callable[[Access], Any]] = {"dir": _dir, "rbd": _rbd}


def of(access: Access) -> Store:
    """Return the store behind an access."""
    store: Store = KINDS[access.kind](access)
    return store


def bridged(access: Access) -> Bridged:
    """Return a store whose kind has a bridge."""
    store: Bridged = KINDS[access.kind](access)
    return store


def receive(
    image: ImageRef, size: int, extents: Iterable[tuple[int, bytes]], sha256: Callable[[], str]
) -> Dict[str, str]:
    """Make the new image from extents that arrive; return its `generation`."""
    return {"generation": of(image.access).receive(image, size, extents, sha256)}


def begin_session(image: ImageRef, readonly: bool, shareable: bool) -> Dict[str, List[str]]:
    """Begin a session of an image, unless its guest only reads it; return who has it `open_by` now."""
    at = of(image.access)
    at.check(image)
    others: List[str] = []
    if not readonly:
        if not shareable:
            others = at.writers(image)
        at.begin_session(image)
    return {"open_by": others}


def content(image: ImageRef) -> Content:
    """Return the content of an image."""
    return of(image.access).content(image)
