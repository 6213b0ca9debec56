# SPDX-License-Identifier: Apache-2.0
"""What lies on the devices of this host's pool and no link leads to: of disks and bases that went while their
device was away, and what moves between devices have left that were killed.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..base import device_label, devices
from ..errors import ToolTimeout
from ..model import layout, layout_devices
from ..model.layout_devices import HOT, LAYERS, PARTS, Link
from ..model.steps import Discard
from ..tools import inventory, locks


def look(location: str) -> list[dict[str, object]]:
    """Return the directories on devices to which no link leads, each with the VM whose layers are in it, -1
    for one of a base.

    `replaced`: the layers of that disk lie elsewhere here, whole.
    """
    root = layout.base_store(location)
    if locks.is_held(layout_devices.moving_lock(root)):
        return []  # what is copied to another device has no link yet
    there = [uuid for uuid in devices.registered(root) if devices.is_there(root, uuid)]
    try:
        linked = devices.layers_links(location) if there else set()
    except ToolTimeout:
        return []  # a store hangs, or is not mounted: nobody knows what leads where
    whole = [link for link in linked if os.path.isdir(layout_devices.directory(root, link))]
    found = []
    for uuid in there:
        # By its own path: what is removed is opened below that.
        place = os.readlink(layout_devices.device(root, uuid))
        for part in (*PARTS, HOT):
            for name in inventory.names(f"{place}/{part}"):
                link = Link(uuid, part, name)
                said = layout_devices.layers_named(name) if part == LAYERS else (-1, -1)
                if said and link not in linked and (part == LAYERS or not devices.is_linked(location, link)):
                    replaced = part == LAYERS and any(
                        layout_devices.layers_named(other.name) == said for other in whole
                    )
                    found.append(inventory.seen(f"{place}/{part}/{name}", vm=said[0], replaced=replaced))
    return found


@contextmanager
def nobody_moving(step: Discard) -> Iterator[bool]:
    """Tell whether nothing is moved between devices within the block."""
    file = locks.attempt(layout_devices.moving_lock(layout.base_store(step.location)))
    if file is None:
        yield False
        return
    with file:
        yield True


def is_linked(step: Discard) -> bool:
    """Tell whether a link leads there after all, seen under the lock of the VM that would have made it."""
    directory, name = os.path.split(os.path.realpath(step.path))
    root = layout.base_store(step.location)
    uuid = str(device_label.read(os.path.dirname(directory)).get("uuid"))
    link = Link(uuid, os.path.basename(directory), name)
    try:
        return uuid not in devices.registered(root) or devices.is_linked(step.location, link)
    except ToolTimeout:
        return True
