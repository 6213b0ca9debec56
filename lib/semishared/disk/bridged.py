# SPDX-License-Identifier: Apache-2.0
"""Images that diffs are committed to, as this machine reaches them: of a store with a bridge it reads and
writes them, no more.

What only the bridge may do, `settle`, is due before a commit if the one before was killed, and after each.
What is asked then answers with `due`, which names the image, and is asked the same again (plan/settling.py).
"""

from __future__ import annotations

from .. import store
from ..model.record import Record
from ..model.refs import ImageRef


def image_of(record: Record) -> ImageRef:
    """Return the image of a disk, by the keys that this machine has."""
    image = record.of_image._replace(generation="")
    return (
        image._replace(access=store.bridged(image.access).keyed()) if image.access.can.has_bridge else image
    )


def check(image: ImageRef) -> None:
    """Raise unless the store of an image is there; one that has a bridge says so by itself."""
    if not image.access.can.has_bridge:
        store.of(image.access).check(image)


def due(record: Record) -> dict[str, object]:
    """Return as an answer that the image is to be settled before it can be claimed or committed to, nothing
    if it need not.
    """
    image = record.of_image._replace(generation="")
    if not image.access.can.has_bridge or store.bridged(image.access).is_settled(image_of(record)):
        return {}
    return {"settle": image.to_data()}
