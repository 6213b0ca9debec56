# SPDX-License-Identifier: Apache-2.0
"""Where manifests and extents come from: this host's bases, or the store.

And what a host reports of an image's base before the front-end plans a session.
"""

from __future__ import annotations

import shutil
from typing import Any, Callable, Iterator

from .. import store
from ..base import cache, room
from ..device import folders
from ..errors import ImageChanged, MissingImage, SemisharedError
from ..model.base import names as base_names
from ..model.base.names import Ranges, ranges, within
from ..model.base.steps import (
    DescribeBase,
    DescribedBase,
    LookAtBase,
    Part,
    SendManifest,
    StreamBases,
)
from ..model.device import names as device_names
from ..model.refs import ImageRef
from ..tools import compress, extents
from ..tools.run import PATH
from ..wire import packets
from . import partial, peers
from .extent_index import Held, manifest_in


def manifest(root: str, image: ImageRef) -> extents.Manifest | None:
    """Return the manifest of the image's generation, None if neither this host nor the store has it."""
    base = cache.named(root, image, image.generation)
    for directory in (base.directory, base_names.staging(root, image.base_prefix)):
        found = manifest_in(directory, image.generation)
        if found:
            return found
    try:
        # The manifest's hash is the generation: no other content's manifest can pass for it.
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
    """Read from the store the extents that only other hosts of the session lack."""
    for image in dict.fromkeys(where[digest][0] for digest in left):
        wanted = {where[digest][1]: digest for digest in left if where[digest][0] == image}
        for index, content in store.content(image).read(sorted(wanted)):
            yield packets.Extent(index, wanted[index], content)


# What a host reports of an image's base before a session, and whether the image is unchanged.


def describe(step: DescribeBase) -> DescribedBase:
    """Return what the front-end plans a session with; an unreachable store is reported as `trouble`."""

    def seen(content: store.Content) -> tuple[Any, str]:
        found = content.see()
        return found, content.generation(found)

    return _described(step, seen, cache.is_published)


def look_at(step: LookAtBase) -> DescribedBase:
    """Return what `describe` does, and change nothing."""
    return _described(
        step, lambda content: content.glance(), lambda base: cache.is_published(base, only_look=True)
    )


def _described(
    step: DescribeBase | LookAtBase,
    see: Callable[[store.Content], tuple[Any, str]],
    is_published: Callable[[cache.Base], bool],
) -> DescribedBase:
    image = step.image
    content = store.content(image)
    seen, current, expected, trouble = None, "", None, ""
    try:
        seen, current = see(content)
        expected = content.expected(current) if current else None
    except SemisharedError as e:
        # A host that does not reach the store can still have the base from a peer.
        trouble = e.line()
    wanted = image._replace(generation=image.generation or current)
    has = bool(wanted.generation) and is_published(cache.named(step.root, wanted, wanted.generation))
    found = manifest(step.root, wanted) if wanted.generation else None
    wants = 0 if has or trouble or seen is None else needed(content, seen, expected)
    begun = folders.at(base_names.staging(step.root, image.base_prefix))
    uuid = begun.uuid or folders.likely(step.root, image.base_prefix, wants)
    streams = [name for name in ("udp-sender", "udp-receiver") if shutil.which(name, path=PATH)]
    return DescribedBase(
        **room.list_bases(step.root, device_names.device(step.root, uuid))._asdict(),
        generation=wanted.generation,
        current=current,
        has=has,
        manifest=found is not None,
        needed=wants,
        where=uuid,
        lacks=[] if has else _lacks(step.root, wanted, found),
        tools=[*compress.available(), *streams],
        trouble=trouble,
    )


def _lacks(root: str, image: ImageRef, found: extents.Manifest | None) -> Ranges | None:
    """Return the extents that the host must receive: neither in its partial base nor in another base.

    Return None if the manifest is unknown.
    """
    if found is None:
        return None
    staging = base_names.staging(root, image.base_prefix)
    there = partial.have(staging) if partial.generation_in(staging) == image.generation else set()
    left = {index: digest for index, digest in sorted(found.extents.items()) if index not in there}
    others = Held(root, left.values())
    others.look()
    return ranges(index for index, digest in left.items() if digest not in others)


def place(root: str, part: Part) -> None:
    """Stage a base, under its lock, on the device whose room the front-end judged; no-op without a pool."""
    if not part.device:
        return
    image = part.image
    content = store.content(image)
    try:
        seen = content.see()
        wants = needed(content, seen, content.expected(image.generation))
    except SemisharedError:
        wants = 0
    folders.stage(root, image.base_prefix, wants, part.device)


def needed(content: store.Content, seen: object, expected: extents.Manifest | None) -> int:
    """Estimate the bytes of the base; extents occupy less where they contain blocks of zeros."""
    found = content.allocated(seen)
    return min(found, len(expected.extents) * extents.EXTENT) if expected else found


def check_unchanged(image: ImageRef, content: store.Content, seen: Any) -> None:
    """Raise ImageChanged if an image has changed since `seen`, saying how."""
    now = content.see()
    if now != seen:
        # A file renamed over the image has another inode; the image itself was then never written to.
        is_new = getattr(now, "inode", None) != getattr(seen, "inode", None)
        how = "replaced by another file" if is_new else "written to"
        raise ImageChanged(f"{image.source} was {how} while it was copied")
