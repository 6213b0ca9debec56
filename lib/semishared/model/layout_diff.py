# SPDX-License-Identifier: Apache-2.0
"""The names of what lies beside a diff, a local disk of a persistent image (disk/commits.py)."""

from __future__ import annotations

import posixpath

from . import layout

CARRIED = "base"


def last(vm_dir: str, disk: int) -> str:
    """Return the manifest of what the last commit has made of the image: the next one leaves out what that
    has.
    """
    return f"{layout.records(vm_dir)}/committed.{disk}"


def carried(path: str) -> str:
    """Return the base that goes along with the disk `path`, beside its layers (base/carried.py)."""
    return f"{layout.layers(path)}/{CARRIED}"


def is_carried(path: str) -> bool:
    """Tell whether a file is that."""
    folder, name = posixpath.split(path)
    return name == CARRIED and layout.are_layers(posixpath.basename(folder))
