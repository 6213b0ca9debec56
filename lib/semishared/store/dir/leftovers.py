# SPDX-License-Identifier: Apache-2.0
"""The content of a mounted store: images, the files of semishared beside them, and unpublished files."""

from __future__ import annotations

import os
from functools import partial
from typing import TypeVar

from ...errors import UnexpectedLink
from ...model.disk import names as disk_names
from ...model.leftover_steps import (
    Seen,
    SeenClone,
    SeenEpoch,
    SeenImage,
    SeenSide,
    SeenStore,
    SeenUpload,
    Staged,
)
from ...model.store import dir_names
from ...tools import beneath, inventory, locks


def look(path: str) -> SeenStore:
    """Return the content of a datastore's directory, for plan/care/gc.py to judge."""
    side = f"{path}/{dir_names.side()}"
    # Skip everything else: a file system's lost+found, for one, is root's.
    images = [
        name for name in inventory.names(path, root=True) if dir_names.is_image(disk_names.disk_of(name))
    ]
    sides, staged = list[SeenSide](), _staged(path, side)
    if beneath.is_link(side):
        return SeenStore(path, [], [], [], [], [])
    for name in images:
        if disk_names.are_layers(name):
            staged += _staged(f"{path}/{name}")
    for name in filter(dir_names.is_side, inventory.names(side)):
        try:
            with beneath.directory(path, dir_names.side(name)) as opened:
                found, unpublished_there = _side(f"{opened}/.", path, name)
        except (FileNotFoundError, NotADirectoryError, UnexpectedLink):
            continue  # gone meanwhile, or not a directory of ours
        shown = partial(_shown, opened=found.path, directory=f"{side}/{name}")
        sides.append(shown(found)._replace(clones=list(map(shown, found.clones))))
        staged += map(shown, unpublished_there)
    uploads, epochs = f"{side}/{dir_names.UPLOADS}", f"{path}/{dir_names.epochs()}"
    return SeenStore(
        path,
        [inventory.seen(SeenImage, f"{path}/{name}", name=name) for name in images],
        sides,
        staged,
        [
            inventory.seen(SeenEpoch, f"{epochs}/{name}", vm=said.vm, cloud=said.cloud)
            for name in inventory.names(epochs)
            for said in (dir_names.epoch_named(name),)
            if said
        ],
        # After the sides: an upload makes its own directory before its image's.
        [_upload(f"{uploads}/{name}", name) for name in inventory.names(uploads)],
    )


def _upload(path: str, name: str) -> SeenUpload:
    return inventory.seen(SeenUpload, path, name=name, held=locks.is_held(dir_names.upload_lock(path)))


def _staged(*directories: str) -> list[Staged]:
    return [item for directory in directories for item in inventory.staged(Staged, directory)]


def _side(directory: str, store: str, name: str) -> tuple[SeenSide, list[Staged]]:
    """Return the directory beside an image, and its unpublished files."""
    folder, clones = dir_names.clones(directory), []
    staged = _staged(directory, folder, dir_names.commits(directory))
    for entry in inventory.names(folder):
        own = dir_names.clone_named(entry)
        if own:
            place = f"{folder}/{entry}"
            clones.append(inventory.seen(SeenClone, place, vm=own.vm, disk=own.disk, cloud=own.cloud))
            if own.are_layers:
                staged += _staged(place)
    entries, image = inventory.names(directory), os.path.lexists(f"{store}/{name}")
    found = inventory.seen(SeenSide, directory, name=name, clones=clones, entries=entries, image=image)
    return found, staged


Some = TypeVar("Some", bound=Seen)


def _shown(found: Some, opened: str, directory: str) -> Some:
    """Return what was found below `opened`, which is `directory` as it was opened, by its own path."""
    return found._replace(path=directory + found.path[len(opened) :])


def unpublished(path: str) -> list[str]:
    """Return the staged files and the uploads below a datastore's directory."""
    found = look(path)
    return sorted(item.path for item in (*found.staged, *found.uploads))
