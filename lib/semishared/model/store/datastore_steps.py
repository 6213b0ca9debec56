# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that datastore actions are made of.

What concerns a store is one of its verbs (table.py), for the machine that changes it: the store's bridge, or
the front-end in its own process (exchange.Here). Uploads are measured, read, judged and converted on the
front-end whatever the store is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named import Named
from ..refs import ImageRef, Step, looks
from .access import Access

if TYPE_CHECKING:
    from ..shapes import Count, Digest, Generation  # noqa: F401 - answers in quotes

# -- of the front-end alone ---------------------------------------------------------------------------


class MeasureSource(Step[int]):
    """Return the size in bytes of the future image at the action's PATH; its content stays where it is."""

    path: str


class ListRoots(Step["list[str]"]):
    """Return the directories that all datastores have what they keep in, as oned says."""


class StoreUpload(Step[str]):
    """Publish what is at the action's PATH as `image`, by way of `directory`; return its format.

    The format of `image` is '' if what is there and the datastore decide it.
    """

    path: str
    directory: str
    image: ImageRef
    machine: str
    """The machine that changes the store, '' for this one."""


class MakeStore(Step[None]):
    """Make the directory of a store without a marker."""

    directory: str


class RefuseMountPoint(Step[None]):
    """Fail if the directory of a store without a marker seems to be only its mount point."""

    directory: str
    store: int
    """The datastore of which oned is asked for images, -1 if it has none."""
    removed: str
    """SOURCE of the image that is to be removed, '' if none is."""


# -- of a store ---------------------------------------------------------------------------------------


@looks
class CheckStore(Step[None]):
    """Fail unless the store is there: its directory has its marker, or its cluster answers."""

    access: Access
    where: str
    """Its directory or pool."""


class MarkStore(Step[str]):
    """Mark a mounted store unless it has a marker, and return its id; fail if it might not be the store."""

    directory: str
    store: str
    """The id of a new marker."""
    sources: tuple[str, ...]
    """Its images, by oned."""
    is_store: bool
    """Whether the administrator says that the directory is the store, whatever is mounted."""


class CreateImage(Step[None]):
    """Publish an empty image of `size` bytes, with a file system unless `fs` is ''."""

    image: ImageRef
    size: int
    fs: str
    fs_options: tuple[str, ...] = ()
    """Words for mkfs, by the site (front/stock_conf.py)."""


class Received(Named):
    """The image that has come."""

    generation: Generation


class ReceiveImage(Step[Received]):
    """Publish an image whose extents follow the plan, with its generation."""

    image: ImageRef
    size: int


class CopyStored(Step[None]):
    """Publish `image`, an independent copy of `source`, at snapshot `snapshot` (-1: its present content)."""

    image: ImageRef
    source: str
    snapshot: int = -1
    most: int = 0
    """Size in bytes beyond which an image is refused; 0: none."""


class CopyAcross(Step[None]):
    """Publish `image`, an independent copy of `source` in another format or another kind of store.

    For a machine that reaches both.
    """

    image: ImageRef
    source: str
    format: str
    """The format of `source`."""
    access: Access
    """How its store is reached."""
    most: int
    """Size in bytes beyond which an image is refused."""


class RemoveImage(Step[None]):
    """Remove an image with its snapshots and all that is staged for it."""

    image: ImageRef
    trash: bool = False
    """Whether a store that has a trash is to keep it there (CEPH_TRASH)."""


@looks
class MeasureStore(Step["tuple[Count, Count, Count]"]):
    """Report bytes used, in total and free of a store."""

    access: Access
    where: str


class DigestImage(Step["tuple[Digest, Count]"]):
    """Report the hex digest (`kind` as hashlib names it) of a whole image, and its size."""

    image: ImageRef
    kind: str


class ForgetSnapshot(Step[None]):
    """Remove a snapshot of an image."""

    image: ImageRef
    snapshot: int
    session: str = ""
    """The session that the image must be in still, '' for any."""


class RevertImage(Step[None]):
    """Give an image the content of its snapshot, and at least `size` bytes."""

    image: ImageRef
    snapshot: int
    size: int = 0
    session: str = ""
    """As ForgetSnapshot has it."""


class FlattenImage(Step[None]):
    """Give an image the content of its snapshot, and at least `size` bytes, and remove all snapshots."""

    image: ImageRef
    snapshot: int
    size: int = 0


LOOKS = frozenset(
    {"CheckStore", "DigestImage", "ListRoots", "MeasureSource", "MeasureStore", "RefuseMountPoint"}
)
"""Those that change nothing where the front-end itself carries them out; elsewhere `looks` says it."""
__all__ = [
    "CheckStore",
    "CopyAcross",
    "CopyStored",
    "CreateImage",
    "DigestImage",
    "FlattenImage",
    "ForgetSnapshot",
    "MarkStore",
    "MeasureStore",
    "ReceiveImage",
    "RemoveImage",
    "RevertImage",
]
"""Those that cross the wire too (model/store/image_steps.py)."""
