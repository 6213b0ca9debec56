# SPDX-License-Identifier: Apache-2.0
"""Where manifests and extents come from: this host's bases, or the store."""

from __future__ import annotations

from typing import Callable, Iterator

from .. import store
from ..base import cache
from ..errors import MissingImage, SemisharedError
from ..model.base import names as base_names
from ..model.base.ranges import within
from ..model.base.steps import SendManifest, StreamBases
from ..model.refs import ImageRef
from ..tools import extents
from ..wire import packets
from . import peers
from .extent_index import manifest_in


def manifest(root: str, image: ImageRef) -> extents.Manifest | None:
    """Return the manifest of the image's generation, None if neither this host nor the store has it."""
    for directory in (
        cache.named(root, image, image.generation).directory,
        base_names.staging(root, image.base_prefix),
    ):
        found = manifest_in(directory, image.generation)
        if found:
            return found
    try:
        # It is named by its hash: that of no other content can be taken for it.
        found = store.content(image).expected(image.generation)
    except SemisharedError:
        return None
    return found if found and found.generation == image.generation else None


def send_manifest(step: SendManifest, write: Callable[[bytes], None]) -> None:
    """Send a manifest; raise MissingImage."""
    text = _required(step.root, step.image).text()
    for at in range(0, len(text), extents.EXTENT):
        write(text[at : at + extents.EXTENT])


def _required(root: str, image: ImageRef) -> extents.Manifest:
    found = manifest(root, image)
    if found is None:
        raise MissingImage(f"nobody knows the hashes of image {image.id}")
    return found


def shared(step: StreamBases) -> Iterator[tuple[bytes, list[packets.Extent]]]:
    """Yield the manifests of a session's bases, (text, []), then their shared extents, (b"", extents)."""
    known = [(part, _required(step.root, part.image)) for part in step.parts]
    for _, found in known:
        yield found.text(), []
    where = {
        found.extents[at]: (part.image, at)
        for part, found in known
        for at in within(part.shared, sorted(found.extents))
    }
    for group in peers.groups_of(step.root, list(where), step.rate, lambda left: _of_store(left, where)):
        if group:
            yield b"", group


def _of_store(left: list[str], where: dict[str, tuple[ImageRef, int]]) -> Iterator[packets.Extent]:
    """Yield extents that the sender of a stream neither has nor wants: others of the session lack them."""
    for image in dict.fromkeys(where[digest][0] for digest in left):
        wanted = {where[digest][1]: digest for digest in left if where[digest][0] == image}
        for index, content in store.content(image).read(sorted(wanted)):
            yield packets.Extent(index, wanted[index], content)
