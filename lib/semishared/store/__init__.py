# SPDX-License-Identifier: Apache-2.0
"""Where images live: the operations of a store, and one class for each kind of store.

A kind is a class, loaded when a store of it is used, and its capabilities (model/store/access.py), by which
callers decide which operations to use. SOURCE of an image is ROOT/NAME in every kind: the datastore's
directory or its pool, and a name in it.

A caller may repeat each method after a crash; it then completes the rest. What a method makes is there whole
or not at all. The methods run on the machine that changes the kind's images: any machine that mounts the
store, or the store's bridge.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Protocol,
    Sequence,
    Tuple,
)

from ..model.refs import ImageRef
from ..model.store.access import Access

if TYPE_CHECKING:
    from ..model.disk.network_disk import NetworkDisk
    from ..model.refs import Owner
    from ..model.store.datastore_steps import Received
    from ..model.store.image_steps import (
        BegunChange,
        BegunSession,
        Dropped,
        LentContent,
        MadeClone,
        PassingSnapshots,
        SeenImage,
        StoredImage,
    )
    from ..tools.extents import Manifest
    from .commit.claims import Committed, Diff


class Content(Protocol):
    """The content of one image in its store.

    Only the store itself interprets what `see` returns. If it is equal before and after, no write happened in
    between.
    """

    def see(self) -> Any:
        """Return the image's state; raise MissingImage, StoreUnavailable, CephUnavailable."""

    def generation(self, seen: Any) -> str:
        """Return the name of the generation of the state `seen`, '' if its content is unknown."""

    def glance(self) -> tuple[Any, str]:
        """Return what `see` and `generation` would, and change nothing.

        No state where the content has to be frozen first, no generation where it has to be settled or read.
        """

    def allocated(self, seen: Any) -> int:
        """Return the estimated bytes of a copy of the state `seen`."""

    def copy(self, seen: Any, target: str, format: str) -> Manifest:
        """Copy the content to the new sparse file `target` and return the manifest of what was read."""

    def read(self, wanted: Iterable[int], seen: Any = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted`, as `seen` now; the caller verifies their hashes."""

    def expected(self, generation: str) -> Manifest | None:
        """Return the manifest of `generation` if the store keeps it; errors then say where a copy differs."""

    def publish(self, found: Manifest, seen: Any) -> None:
        """Publish `found` as the content of `seen`, if this machine may write to the store."""

    def unnamed(self) -> int:
        """Return the snapshot that `publish` was not allowed to name, -1 for none."""

    def tidy(self) -> None:
        """Remove the staged files that killed writers left beside the image."""


class Draft(Protocol):
    """New content that is not published as an image yet."""

    @property
    def path(self) -> str:
        """Return the path or name to which QEMU writes."""

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        """Write the content of `source`, with its backing chain, as qemu-img opens it in `format`.

        `share`: another process has `source` open.
        """


class Store(Protocol):
    """A store of one kind, as its Access reaches it."""

    # -- looking ------------------------------------------------------------------------------------

    def reach(self, where: str) -> None:
        """Raise unless the store can be reached and is the one that the datastore names."""

    def check(self, image: ImageRef) -> None:
        """Raise unless the store is the right one and the image exists and is fit for a guest."""

    def content(self, image: ImageRef) -> Content:
        """Return the content of an image, for hosts that copy it to a base."""

    def opened(self, image: ImageRef, snapshot: int = -1) -> ContextManager[str]:
        """Yield the name by which qemu-img reads an image, or one of its snapshots, as a guest sees it."""

    def attach(self, image: ImageRef) -> Tuple[str, Optional[NetworkDisk]]:
        """Return the image's path, or its network disk, for the disk's record; make the link for a path."""

    def writers(self, image: ImageRef) -> List[str]:
        """Raise AnotherWriter if a guest is seen to write to the image; return the other openers."""

    def snapshots(self, image: ImageRef) -> List[int]:
        """Return OpenNebula's numbers of the image's snapshots."""

    def digest(self, image: ImageRef, kind: str) -> tuple[str, int]:
        """Return the hex digest of a whole image (`kind`: hashlib's name) and its size."""

    def capacity(self, where: str) -> Tuple[int, int, int]:
        """Return bytes used, total and free of the directory or pool."""

    def leftovers(self, root: str) -> List[str]:
        """Return what is unpublished in the store: of a running action, or of a killed one."""

    # -- images -------------------------------------------------------------------------------------

    def publish(
        self, image: ImageRef, path: str, known: Manifest | None = None, *, sparse: bool = True
    ) -> str:
        """Publish a private file and return its generation; may rename the file. `known`: its manifest."""

    def receive(
        self, image: ImageRef, size: int, extents: Iterable[tuple[int, bytes]], said: Callable[[], str]
    ) -> str:
        """Make a new image from the extents that arrive; return its generation.

        Raise TransferCorrupt if the sender `said` another one.
        """

    def create(self, image: ImageRef, size: int, fs: str, fs_options: Sequence[str] = ()) -> None:
        """Make a new empty image, with a file system unless `fs` is ''; `fs_options` are words for mkfs."""

    def copy(self, image: ImageRef, source: str, snapshot: int = -1, most: int = 0) -> None:
        """Make the new `image` an independent copy of a closed image of this kind, or of a snapshot of it.

        Raise UploadTooLarge if it has more than `most` bytes, unless that is 0.
        """

    def made(self, image: ImageRef, size: int) -> ContextManager[Draft]:
        """Yield the draft of a new image; publish it when the block ends well, else remove it."""

    def remove(self, image: ImageRef, trash: bool = False) -> None:
        """Remove an image, its snapshots and its records; raise ImageInUse if a clone depends on it.

        `trash`: keep it in the store's trash, if it has one.
        """

    def grow(self, image: ImageRef, size: int) -> None:
        """Grow an image to at least `size` bytes."""

    # -- what its content is called -----------------------------------------------------------------

    def freeze(self, image: ImageRef) -> str:
        """Make the present content readable for hosts; return its generation, '' if that is unknown."""

    def name(self, image: ImageRef, snapshot: int, generation: str) -> None:
        """Record that the frozen content `snapshot` is `generation` (see `Content.unnamed`)."""

    def begin_session(self, image: ImageRef) -> None:
        """End the generations of an image, before a guest writes to it."""

    def session(self, image: ImageRef) -> str:
        """Return the token of the current session, '' for none; a plan of another session is outdated."""

    def replaced(self, image: ImageRef, size: int, session: str = "") -> ContextManager[Draft]:
        """Yield the draft of new content of at least `size` bytes; publish it if the block ends well.

        This begins a new session. Raise AnotherWriter, ImageInUse, or Overtaken if another session has begun
        meanwhile, or since `session`.
        """

    # -- snapshots and clones -----------------------------------------------------------------------

    def keep(
        self,
        image: ImageRef,
        snapshot: int,
        fill: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Keep the present content of an image as a snapshot; call `check` before publishing it.

        Where the store sees only what QEMU has flushed, `fill` makes the guest's QEMU write the snapshot, to
        a path.
        """

    def forget(self, image: ImageRef, snapshot: int, session: str = "") -> None:
        """Remove a snapshot of an image, if it exists.

        Raise Overtaken if the image is in another session than `session`, unless that is ''.
        """

    def revert(self, image: ImageRef, snapshot: int, size: int = 0, session: str = "") -> None:
        """Revert an image to a snapshot, with at least `size` bytes; keep its snapshots, begin a session.

        Raise AnotherWriter, ImageInUse, or Overtaken as `forget`, or if a session has begun meanwhile.
        """

    def flatten(self, image: ImageRef, snapshot: int, size: int = 0) -> None:
        """Revert an image and remove all of its snapshots; an image without snapshots is flat already."""

    def clone_of(self, image: ImageRef, vm: int, disk: int) -> str:
        """Return the name of the image's clone for a disk."""

    def clone(self, image: ImageRef, clone: str, size: int) -> None:
        """Make a copy-on-write clone of at least `size` bytes; replace an existing clone of that name."""

    def remove_clone(self, image: ImageRef, clone: str) -> None:
        """Remove a clone and its snapshots, if it exists."""

    def clone_found(self, image: ImageRef, vm: int, number: int) -> str:
        """Return the active layer or image that `clone` made for a disk, '' if there is none."""

    # -- diffs (model/refs.py): told by hosts, but for `settle` -----------------------------------------

    def settle(self, image: ImageRef) -> None:
        """Complete or undo a killed commit. Methods that read or change the image here do so first."""

    def keyed(self) -> Access:
        """Return the access that this machine's keys allow: the front-end may have only the bridge's key."""

    def reached(self, image: ImageRef) -> None:
        """Raise StoreUnavailable unless an image is there, if this machine changes the store."""

    def claimable(self, image: ImageRef) -> None:
        """Raise AnotherWriter if a guest writes to the image, if this machine changes the store."""

    def is_settled(self, image: ImageRef) -> bool:
        """Return True if hosts may claim the image and commit to it: no `settle` is due. Hosts call this."""

    def claim(self, image: ImageRef, owner: Owner) -> Optional[Owner]:
        """Make a disk the only one that may commit to the image; return the disk that had the claim before.

        `owner.generation` must be the image's present content. A repeated claim of the same diff, on another
        host or later, keeps the record of its commits. Raise StaleDiff, CommitRefused.
        """

    def owner(self, image: ImageRef) -> Optional[Owner]:
        """Return the owner of the last claim, None if the image has no claim."""

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove a claim, if this disk holds it."""

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Raise the error that `commit` would raise: NotOwner, StaleDiff, CommitRefused, AnotherWriter."""

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Commit `diff`, the layers over their base, to the image; return once the result is durable.

        Readers see either the old or the new content. A crash leaves either of them, and leaves the diff
        unchanged; the commit may be repeated. The machine of the store has to `settle` it before the next
        commit, unless it `is_settled`. Raise NotOwner, StaleDiff, CommitRefused, AnotherWriter, NoSpace.
        """

    def refuse_late(self, image: ImageRef, seq: int) -> None:
        """Raise LateAction if an image was made for its VM at a later SEQ than `seq`."""

    # -- whose a VM is ------------------------------------------------------------------------------

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Note that files of a VM from before SEQ `epoch` of its history are void; keep a later epoch."""

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Return the epoch that `note_epoch` has recorded, -1 for none; hosts call this."""


class Bridged(Store, Protocol):
    """A store whose images the bridge changes and a host fills; image.source is what the bridge returned."""

    def look(self, image: ImageRef) -> SeenImage:
        """Return whether the present content is frozen, and its generation."""

    def lend(self, image: ImageRef) -> LentContent:
        """Return a `snapshot` of the present content that lasts until the next session; its `generation`."""

    def hold(self, image: ImageRef) -> None:
        """Snapshot the image of a running guest, for `copy_held`."""

    def copy_held(self, image: ImageRef, source: str) -> None:
        """Make the new `image` a copy of the snapshot that `hold` made of `source`."""

    def stage(self, image: ImageRef, size: int) -> str:
        """Make a new empty image that is not published; return its name."""

    def show(self, image: ImageRef, staged: str) -> None:
        """Publish an image that `stage` made."""

    def clone_for(self, image: ImageRef, clone: str, size: int, seq: int = -1) -> MadeClone:
        """Make a clone as `clone` does and return its id as `made`; `seq` is the VM's SEQ (-1: unknown).

        Raise LateAction if a clone of this name exists for a later SEQ.
        """

    def take_back(self, image: ImageRef, made: str) -> None:
        """Remove an image, if its id is `made`."""

    def begin_change(self, image: ImageRef, size: int) -> BegunChange:
        """Hide and empty an image; return its temporary `hidden` name and the id of this `change`."""

    def end_change(self, image: ImageRef, whole: bool, change: str = "") -> None:
        """Give the image its name back, with its new content if `whole`, else rolled back.

        Raise Overtaken if another change of the image is under way.
        """

    def draft(self, image: ImageRef) -> Draft:
        """Return the draft of a staged or hidden image, for a host to fill."""

    def names(self, where: str) -> List[str]:
        """Return the names of all images of a pool."""

    def describe(self, where: str, names: Iterable[str]) -> Dict[str, StoredImage]:
        """Return age, size, maker, watchers and clones of the pool's images that exist, by name."""

    def passing(self, where: str, names: Iterable[str]) -> Dict[str, PassingSnapshots]:
        """Return the pool's images with snapshots that are no generations: those snapshots, and watchers."""

    def drop_snapshot(self, image: ImageRef, snapshot: int) -> Dropped:
        """Remove such a snapshot by its id; return whether it is `removed`."""

    # -- marks for backups (model/disk/marks.py), snapshots of an image: hosts make them ---------------

    def marking(self, image: ImageRef, vm: int, mark: str) -> ContextManager[Callable[[], None]]:
        """Open an image, and yield what makes the mark: at once, as a guest rests meanwhile."""

    def refuses_marks(self, image: ImageRef) -> str:
        """Return why an image cannot be marked, '' if it can."""

    def has_mark(self, image: ImageRef, vm: int, mark: str) -> bool:
        """Return True if an image has the mark."""

    def marked(self, network: NetworkDisk, vm: int, mark: str) -> NetworkDisk:
        """Return how QEMU reads what a disk held when it was marked."""

    def changed(self, image: ImageRef, vm: int, since: str, mark: str = "") -> List[Tuple[int, int]]:
        """Return offset and length of what may have changed between two marks, or since one."""

    def drop_marks(self, image: ImageRef, vm: int, keep: Collection[str] = ()) -> None:
        """Remove all marks of a VM from an image but some."""


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
) -> Received:
    """Make a new image from the extents that arrive; return its generation."""
    from ..model.store.datastore_steps import Received

    return Received(of(image.access).receive(image, size, extents, sha256))


def copy_across(image: ImageRef, source: str, format: str, access: Access, most: int) -> None:
    """Make the new `image` a copy of a closed image in another format, or of another kind of store.

    Raise UploadTooLarge if it has more than `most` bytes, and what the stores raise.
    """
    from ..errors import UploadTooLarge
    from ..tools import qemu_img
    from ..units import human

    original = ImageRef(image.store, image.id, format, source, access=access)
    at, to = of(access), of(image.access)
    at.reach(original.root)
    to.reach(image.root)
    at.check(original)
    with at.opened(original) as opened:
        size = qemu_img.virtual_size(opened, format)
        if size > most:
            raise UploadTooLarge(f"{source} has {human(size)}, and a disk of {human(most)} was approved")
        with to.made(image, size) as draft:
            draft.fill(opened, format, share=True)


def begin_session(image: ImageRef, readonly: bool, shareable: bool) -> BegunSession:
    """Begin a session of an image unless its guest only reads; return the other clients."""
    from ..model.store.image_steps import BegunSession

    at = of(image.access)
    at.check(image)
    others: List[str] = []
    if not readonly:
        if not shareable:
            others = at.writers(image)
        at.begin_session(image)
    return BegunSession(others)


def content(image: ImageRef) -> Content:
    """Return the content of an image."""
    return of(image.access).content(image)
