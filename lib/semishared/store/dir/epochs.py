# SPDX-License-Identifier: Apache-2.0
"""The SEQ since which a VM runs on another host than a lost one, as the name of an empty file.

    <datastore>/.semishared/.epochs/VM-SEQ-CLOUD

The host that takes a VM over writes it (store.Store.note_epoch). Every host reads it before it starts, sends
or saves its files of a VM; so reading imports as little as possible.
"""

from __future__ import annotations

import os

from ...errors import StoreAbsent
from ...model.refs import ImageRef
from ...model.store import dir_names


def note(image: ImageRef, vm: int, epoch: int) -> None:
    """Record an epoch and remove earlier ones, unless a later one is recorded."""
    from ...tools import beneath, files
    from ...tools.effects import point

    cloud = image.access.cloud
    with (
        files.enough_space(image.root),
        beneath.directory(image.root, dir_names.epochs(), make=True) as where,
    ):
        noted = [
            said
            for said in map(dir_names.epoch_named, os.listdir(where))
            if said and (said.vm, said.cloud) == (vm, cloud)
        ]
        if any(said.epoch >= epoch for said in noted):
            return
        os.close(
            os.open(
                f"{where}/{dir_names.epoch_name(vm, epoch, cloud)}",
                os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW,
                0o644,
            )
        )
        point("epoch noted")
        for said in noted:
            files.unlink(f"{where}/{dir_names.epoch_name(*said)}")
        files.fsync(where)


def read(image: ImageRef, vm: int) -> int:
    """Return the recorded epoch, -1 for none.

    Raise UnexpectedLink, OSError, or StoreAbsent if the store is not mounted.
    """
    from ...tools import beneath

    # Same check as store/dir/marker.py, which takes longer to load than all of this.
    ours = f"{image.root}/{dir_names.side(dir_names.MARKER if image.access.marker else '')}"
    try:
        with beneath.directory(image.root, dir_names.epochs()) as where:
            names = os.listdir(where)
    except FileNotFoundError:
        # The store may have no file of ours yet; its image then shows that it is mounted.
        if os.path.lexists(ours) or (not image.access.marker and os.path.lexists(image.source)):
            return -1
        raise StoreAbsent(
            f"{image.root} on {os.uname().nodename} is not the store of image {image.id}: {ours} is not there"
        ) from None
    own = (vm, image.access.cloud)
    return max(
        (said.epoch for said in map(dir_names.epoch_named, names) if said and (said.vm, said.cloud) == own),
        default=-1,
    )
