# SPDX-License-Identifier: Apache-2.0
"""What lies in a mounted store: images, what is ours beside them, and what nobody has published (yet)."""

from __future__ import annotations

import os
import re

from ..tools import beneath, inventory, locks
from . import marker
from .dir_image import SIDE
from .dir_upload import UPLOADS

PAIR = re.compile(r"(?P<vm>[0-9]+)-(?P<disk>[0-9]+)(?:-(?P<cloud>[0-9a-f]{32}))?(?P<snap>\.snap)?\Z")


def look(path: str) -> dict[str, object]:
    """Return what lies in the directory of a datastore, for plan/gc.py to judge."""
    side = f"{path}/{SIDE}"
    images = inventory.names(path, root=True)
    sides, staged = [], inventory.staged(path) + inventory.staged(side)
    if beneath.is_link(side):
        return {"path": path, "images": [], "sides": [], "staged": [], "uploads": []}
    for name in images:
        if name.endswith(".snap"):
            staged += inventory.staged(f"{path}/{name}")
    for name in inventory.names(side):
        if name.startswith(".") or name == marker.NAME:
            continue
        directory = f"{side}/{name}"
        clones = []
        for pair in inventory.names(f"{directory}/clones"):
            match = PAIR.match(pair)
            if match:
                owner = {"vm": int(match.group("vm")), "disk": int(match.group("disk")), "cloud": match.group("cloud") or ""}
                clones.append(inventory.seen(f"{directory}/clones/{pair}", **owner))
                if match.group("snap"):
                    staged += inventory.staged(f"{directory}/clones/{pair}")
        staged += inventory.staged(directory) + inventory.staged(f"{directory}/clones")
        entries = inventory.names(directory)
        sides.append(inventory.seen(directory, name=name, clones=clones, entries=entries, image=os.path.lexists(f"{path}/{name}")))
    uploads = f"{side}/{UPLOADS}"
    return {
        "path": path,
        "images": [inventory.seen(f"{path}/{name}", name=name) for name in images if not name.startswith(".")],
        "sides": sides,
        "staged": staged,
        # After the sides: an upload makes its own directory before that of its image.
        "uploads": [
            inventory.seen(f"{uploads}/{name}", name=name, held=locks.is_held(f"{uploads}/{name}/lock"))
            for name in inventory.names(uploads)
        ],
    }  # fmt: skip


def unpublished(path: str) -> list[str]:
    """Return the staged files, and the uploads, below the directory of a datastore."""
    found = look(path)
    return sorted(str(item["path"]) for key in ("staged", "uploads") for item in found[key])  # type: ignore[attr-defined]
