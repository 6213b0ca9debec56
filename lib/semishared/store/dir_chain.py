# SPDX-License-Identifier: Apache-2.0
"""A clone on a store, as qemu-img is to open it: all that it lies over, opened here, without asking its
headers once more.

    clones/VM-DISK.snap/2  over 1  over 0  over .semishared/NAME/image -> ../../NAME

Every host can write there. QEMU would follow what a header names, and every link on the way; so what is below
what is said here in full, with a path to each open file. A header is believed in two things: which layer
beside it comes next, or that none does and the image is below.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, contextmanager
from typing import Iterator

from ..errors import BadRecord, UnexpectedFile
from ..tools import beneath, inspection, layers
from . import dir_image

DEEPEST = 1000


@contextmanager
def opened(
    stored: dir_image.Stored, path: str, format: str, image_format: str, raw_layer: object = None
) -> Iterator[str]:
    """Yield a `json:` name for the layer `path` of a clone of `stored`; raise UnexpectedFile if it lies over
    anything else.
    """
    folder, _, layer = path[len(stored.datastore) + 1 :].rpartition("/")
    if not layer.isdigit():
        raise BadRecord(f"{path} is no layer of a clone")
    with ExitStack() as stack:
        directory = stack.enter_context(beneath.directory(stored.datastore, folder))
        nodes: list[dict[str, object]] = []
        name = layer
        while len(nodes) < DEEPEST:
            file = stack.enter_context(beneath.file(directory, name))
            nodes.append(_node(format, file))
            if format == "raw" or (name.isdigit() and int(name) == raw_layer):
                break
            trouble = layers.reaches_out(file)
            below, below_format = layers.backing_of(file)
            if trouble and trouble != layers.outside(stored.link):
                raise UnexpectedFile(f"{path} on {os.uname().nodename} lies over a layer that has {trouble}")
            if not below:
                break
            if below == stored.link:
                image = stack.enter_context(dir_image.opened(stored.source))
                inspection.check(image, image_format, stored.source)
                nodes.append(_node(image_format, image))
                break
            name, format = below, below_format or "qcow2"
        else:
            raise UnexpectedFile(f"{path} on {os.uname().nodename} lies over itself")
        chain: dict[str, object] | None = None
        for node in reversed(nodes):
            if node["driver"] != "raw":
                node["backing"] = chain
            chain = node
        yield f"json:{json.dumps(chain)}"


def _node(format: str, path: str) -> dict[str, object]:
    return {"driver": format, "file": {"driver": "file", "filename": path}}
