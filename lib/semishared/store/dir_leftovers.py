# SPDX-License-Identifier: Apache-2.0
"""What lies in a mounted store: images, what is ours beside them, and what nobody has published (yet)."""

from __future__ import annotations

import os

from ..model import layout, layout_store
from ..tools import beneath, inventory, locks


def look(path: str) -> dict[str, object]:
    """Return what lies in the directory of a datastore, for plan/gc.py to judge."""
    side = f"{path}/{layout_store.side()}"
    # Nothing else is looked into: lost+found of a file system, for one, is root's.
    images = [name for name in inventory.names(path, root=True) if layout_store.is_image(layout.disk_of(name))]
    sides, staged = [], inventory.staged(path) + inventory.staged(side)
    if beneath.is_link(side):
        return {"path": path, "images": [], "sides": [], "staged": [], "uploads": [], "epochs": []}
    for name in images:
        if layout.are_layers(name):
            staged += inventory.staged(f"{path}/{name}")
    for name in inventory.names(side):
        if not layout_store.is_side(name):
            continue
        directory = f"{side}/{name}"
        folder, clones = layout_store.clones(directory), []
        for entry in inventory.names(folder):
            own = layout_store.clone_named(entry)
            if own:
                clones.append(inventory.seen(f"{folder}/{entry}", vm=own.vm, disk=own.disk, cloud=own.cloud))
                if own.are_layers:
                    staged += inventory.staged(f"{folder}/{entry}")
        staged += inventory.staged(directory) + inventory.staged(folder) + inventory.staged(layout_store.commits(directory))
        entries = inventory.names(directory)
        sides.append(inventory.seen(directory, name=name, clones=clones, entries=entries, image=os.path.lexists(f"{path}/{name}")))
    uploads, epochs = f"{side}/{layout_store.UPLOADS}", f"{path}/{layout_store.epochs()}"
    return {
        "path": path,
        "images": [inventory.seen(f"{path}/{name}", name=name) for name in images],
        "sides": sides,
        "staged": staged,
        "epochs": [
            inventory.seen(f"{epochs}/{name}", vm=said.vm, cloud=said.cloud)
            for name in inventory.names(epochs) for said in (layout_store.epoch_named(name),) if said
        ],
        # After the sides: an upload makes its own directory before that of its image.
        "uploads": [
            inventory.seen(f"{uploads}/{name}", name=name, held=locks.is_held(layout_store.upload_lock(f"{uploads}/{name}")))
            for name in inventory.names(uploads)
        ],
    }  # fmt: skip


def unpublished(path: str) -> list[str]:
    """Return the staged files, and the uploads, below the directory of a datastore."""
    found = look(path)
    return sorted(str(item["path"]) for key in ("staged", "uploads") for item in found[key])  # type: ignore[attr-defined]
