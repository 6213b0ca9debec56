# SPDX-License-Identifier: Apache-2.0
"""The names of deltas, which disks on a host have while their running guest moves (guest/deltas.py)."""

from __future__ import annotations

from . import layout

NUMBER = 1_000_000
"""Of a delta among its disk's layers: above all that snapshots of OpenNebula give."""


def delta(vm_dir: str, disk: int) -> str:
    return layout.layer(layout.disk(vm_dir, disk), NUMBER)


def is_delta(path: str) -> bool:
    """Tell whether a path is that of a delta."""
    return layout.layer_of(path) == str(NUMBER)


def kept(layer: str) -> str:
    """Return the second name of a layer, whose own another file takes while its guest goes over to a base
    (guest/base_switch.py).
    """
    return f"{layer}.kept"


def kept_layer(path: str) -> str:
    """Return the layer whose second name `path` is, '' if it is none."""
    return path[: -len(".kept")] if path.endswith(".kept") and layout.layer_of(path[: -len(".kept")]) else ""


def note(vm_dir: str) -> str:
    """Return the note of the disks that have deltas, or are to have them."""
    return f"{layout.records(vm_dir)}/{layout.DELTAS}"
