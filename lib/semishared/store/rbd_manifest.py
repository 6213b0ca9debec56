# SPDX-License-Identifier: Apache-2.0
"""The manifest of an RBD image's content, kept in its metadata: so hosts know what it has in common with
other images.

It is packed, and in pieces; a first key says of which generation it is, and of how many. A killed writer
leaves a mixture that is the manifest of nothing: it is taken only if its hash is the generation. Metadata
goes with the image, and every key may read it.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from ..errors import ImageChanged
from ..model import layout, layout_pool
from ..tools import extents

PIECE = 32 << 10
"""Characters in one value."""
MOST = 256
"""Pieces: of an image of some 700 GiB of random data; the hashes of a larger one are found out by reading
it.
"""


def write(image: Any, manifest: extents.Manifest) -> None:
    """Keep the manifest of an open image's content, in place of any other."""
    packed = base64.b64encode(zlib.compress(manifest.text(), 9)).decode("ascii")
    pieces = [packed[at : at + PIECE] for at in range(0, len(packed), PIECE)]
    if len(pieces) > MOST:
        return
    before = [key for key in dict(image.metadata_list()) if layout_pool.is_manifest(key)]
    for number, piece in enumerate(pieces):
        image.metadata_set(layout_pool.manifest(number), piece)
    image.metadata_set(layout_pool.MANIFEST, f"{manifest.generation} {len(pieces)}")
    for key in set(before) - {layout_pool.MANIFEST, *map(layout_pool.manifest, range(len(pieces)))}:
        image.metadata_remove(key)


def read(image: Any, generation: str) -> extents.Manifest | None:
    """Return the manifest of a generation of an open image, None if it is not kept."""
    found = dict(image.metadata_list())
    name, _, count = str(found.get(layout_pool.MANIFEST, "")).partition(" ")
    if name != generation or not layout.is_number(count) or len(count) > len(str(MOST)) or int(count) > MOST:
        return None
    try:
        packed = "".join(str(found[layout_pool.manifest(number)]) for number in range(int(count)))
        inflating = zlib.decompressobj()
        text = inflating.decompress(base64.b64decode(packed, validate=True), MOST * PIECE * 4)
        return extents.parse(text) if extents.generation_of(text) == generation else None
    except (KeyError, ValueError, zlib.error, ImageChanged):
        return None
