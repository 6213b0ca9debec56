# SPDX-License-Identifier: Apache-2.0
"""What a host asks of a store to have a base or a copy of an image; which module answers, the image's access says."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Protocol

from ..model.steps import ImageRef
from ..tools.extents import Manifest
from . import dir_store


class Content(Protocol):
    """The content of one image in its store.

    What `see` returns means something to its own store only; equal before and after means that nobody wrote in between.
    """

    def see(self) -> Any:
        """Return the image's state; raise MissingImage, StoreUnavailable, CephUnavailable."""

    def generation(self, seen: Any) -> str:
        """Return the name of the generation that was seen, '' if its content is unknown."""

    def allocated(self, seen: Any) -> int:
        """Return about how many bytes a copy of what was seen takes."""

    def copy(self, seen: Any, target: str, format: str) -> Manifest:
        """Copy what was seen to the new sparse file `target` and return the manifest of what was read."""

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted` of the image as it is now, for whoever knows their hashes."""

    def expected(self, generation: str) -> Manifest | None:
        """Return the manifest of `generation` if the store keeps it, to say where a copy differs."""

    def publish(self, found: Manifest, seen: Any) -> None:
        """Make `found` known as the content that was seen, if this machine may say so."""

    def unnamed(self) -> dict[str, object]:
        """Return what somebody else must be told to make known what `publish` could not; nothing if it could."""

    def tidy(self) -> None:
        """Remove what writers killed long ago have left beside the image."""


def content(image: ImageRef) -> Content:
    """Return the content of an image."""
    if image.access.can.is_mounted:
        return dir_store.Content(image.source, image.access.marker, image.format)
    from .rbd_store import RbdContent

    return RbdContent(image)
