# SPDX-License-Identifier: Apache-2.0
"""A datastore's directory without a marker: whether it is only the mount point of its store."""

from __future__ import annotations

import os
from typing import Optional

from ..errors import OnedUnavailable, StoreAbsent, here
from ..model.disk import names as disk_names
from ..model.store import dir_names
from ..opennebula.xml import Datastore, Image


def refuse(datastore: Datastore, directory: str, removed: Optional[Image]) -> None:
    """Raise StoreAbsent if a directory has no image and nothing of ours, but OpenNebula has images there."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        names = []
    if any(name == disk_names.SIDE or dir_names.is_image(name) for name in names):
        return
    if removed and removed.source and dir_names.is_image(os.path.basename(removed.source)):
        known = 1
    elif datastore.element.find("IMAGES/ID") is not None:
        known = _settled(datastore)
    else:
        return
    if known:
        what = (
            f"OpenNebula has {known} image{'s' * (known > 1)} of datastore {datastore.id} there, and "
            f"there is none"
        )
        raise StoreAbsent(f"{here(directory)} is where its store is to be mounted, or was: {what}")


def _settled(datastore: Datastore) -> int:
    """Return how many images of a datastore were made; oned is asked only where that is in doubt."""
    from ..opennebula.oned import Oned
    from .stores import SETTLED

    try:
        images = Oned().images()
    except OnedUnavailable:
        return 0
    return sum(image.store_id == datastore.id and image.state in SETTLED for image in images)
