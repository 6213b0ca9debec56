# SPDX-License-Identifier: Apache-2.0
"""The content of a mounted store: images, the files of semishared beside them, and unpublished files."""

from __future__ import annotations

import os
from typing import Any

from ...errors import UnexpectedLink
from ...model.disk import names as disk_names
from ...model.store import dir_names
from ...tools import beneath, inventory, locks


def look(path: str) -> dict[str, object]:
    """Return the content of a datastore's directory, for plan/care/gc.py to judge."""
    side = f"{path}/{dir_names.side()}"
    # Skip everything else: a file system's lost+found, for one, is root's.
    images = [
        name for name in inventory.names(path, root=True) if dir_names.is_image(disk_names.disk_of(name))
    ]
    sides, staged = [], inventory.staged(path) + inventory.staged(side)
    if beneath.is_link(side):
        return {"path": path, "images": [], "sides": [], "staged": [], "uploads": [], "epochs": []}
    for name in images:
        if disk_names.are_layers(name):
            staged += inventory.staged(f"{path}/{name}")
    for name in filter(dir_names.is_side, inventory.names(side)):
        try:
            with beneath.directory(path, dir_names.side(name)) as opened:
                found, unpublished_there = _shown(_side(f"{opened}/."), f"{opened}/.", f"{side}/{name}")
        except (FileNotFoundError, NotADirectoryError, UnexpectedLink):
            continue  # gone meanwhile, or not a directory of ours
        sides.append({**found, "name": name, "image": os.path.lexists(f"{path}/{name}")})
        staged += unpublished_there
    uploads, epochs = f"{side}/{dir_names.UPLOADS}", f"{path}/{dir_names.epochs()}"
    return {
        "path": path,
        "images": [inventory.seen(f"{path}/{name}", name=name) for name in images],
        "sides": sides,
        "staged": staged,
        "epochs": [
            inventory.seen(f"{epochs}/{name}", vm=said.vm, cloud=said.cloud)
            for name in inventory.names(epochs)
            for said in (dir_names.epoch_named(name),)
            if said
        ],
        # After the sides: an upload makes its own directory before its image's.
        "uploads": [
            inventory.seen(
                f"{uploads}/{name}",
                name=name,
                held=locks.is_held(dir_names.upload_lock(f"{uploads}/{name}")),
            )
            for name in inventory.names(uploads)
        ],
    }


def _side(directory: str) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Return what is in an image's directory, and its unpublished files."""
    folder, clones = dir_names.clones(directory), []
    staged = (
        inventory.staged(directory)
        + inventory.staged(folder)
        + inventory.staged(dir_names.commits(directory))
    )
    for entry in inventory.names(folder):
        own = dir_names.clone_named(entry)
        if own:
            clones.append(inventory.seen(f"{folder}/{entry}", vm=own.vm, disk=own.disk, cloud=own.cloud))
            if own.are_layers:
                staged += inventory.staged(f"{folder}/{entry}")
    return inventory.seen(directory, clones=clones, entries=inventory.names(directory)), staged


def _shown(found: Any, opened: str, directory: str) -> Any:
    """Return `found` with its paths below `opened` replaced by those below `directory`."""
    if isinstance(found, dict):
        return {key: _shown(value, opened, directory) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_shown(value, opened, directory) for value in found]
    return directory + found[len(opened) :] if isinstance(found, str) and found.startswith(opened) else found


def unpublished(path: str) -> list[str]:
    """Return the staged files and the uploads below a datastore's directory."""
    found = look(path)
    return sorted(str(item["path"]) for key in ("staged", "uploads") for item in found[key])  # type: ignore[attr-defined]
