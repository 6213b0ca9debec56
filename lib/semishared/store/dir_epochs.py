# SPDX-License-Identifier: Apache-2.0
"""Since when a VM is elsewhere than on a host that was lost (store.Store.note_epoch): a file for each such VM.

    <datastore>/.semishared/.epochs/VM-CLOUD      {"version": 1, "epoch": 9}

Written by whoever takes the VM over, read by every host before it starts, sends or saves what it has of a VM.
"""

from __future__ import annotations

from ..model import layout_store
from ..model.refs import ImageRef
from ..tools import beneath, counter_file, files
from ..tools.crash_points import point

VERSION = 1


def note(image: ImageRef, vm: int, epoch: int) -> None:
    """Note an epoch, unless a later one is."""
    if read(image, vm) >= epoch:
        return
    name = layout_store.epoch_name(vm, image.access.cloud)
    with beneath.directory(image.root, layout_store.epochs(), make=True) as where:
        files.remove_staged(where, name)
        with files.enough_space(image.root):
            files.write_json(f"{where}/{name}", {"version": VERSION, "epoch": epoch})
    point("epoch noted")


def read(image: ImageRef, vm: int) -> int:
    """Return the epoch that is noted, -1 for none; nothing is made of one that nobody understands."""
    return counter_file.read(f"{image.root}/{layout_store.epochs()}", layout_store.epoch_name(vm, image.access.cloud), "epoch")
