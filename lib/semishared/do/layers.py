# SPDX-License-Identifier: Apache-2.0
"""The layers of a disk that can have snapshots: files beside it, and a link to the one that is written.

    disk.N      -> disk.N.snap/2
    disk.N.snap/0  a snapshot; over the base, or (a raw copy) over nothing
               /1  a snapshot, over 0
               /2  the active layer, over 1; every backing name inside is relative, so the directory may move

The same on the store: clones/VM-DISK -> VM-DISK.snap/2. A disk is laid out like this from its first moment: after a
live snapshot libvirt must never hold a name that means another layer than before.
"""

from __future__ import annotations

import os
import shutil

from . import files
from .trace import point


def folder(path: str) -> str:
    """Return the directory that holds the layers of the disk `path`."""
    return f"{path}.snap"


def publish_first(path: str, staged: str) -> None:
    """Make the file `staged` the only layer of the disk `path`; the caller holds whatever lock there is."""
    directory = folder(path)
    try:
        older = [name for name in os.listdir(directory) if name != "0"]
    except FileNotFoundError:
        os.mkdir(directory)
        older = []
    if older:
        # A disk made anew: its predecessor's active layer is another one, and goes before what it lies over.
        files.unlink(path)
        for name in older:
            files.unlink(f"{directory}/{name}")
    os.rename(staged, f"{directory}/0")
    point(f"{os.path.basename(path)} layer renamed")
    files.fsync(directory)
    files.symlink(f"{os.path.basename(directory)}/0", path)


def remove(path: str) -> bool:
    """Remove the disk `path` with all of its layers; tell whether anything was there."""
    found = files.unlink(path)
    if os.path.isdir(folder(path)):
        point("disk unlinked")
        shutil.rmtree(folder(path))
        found = True
    return found
