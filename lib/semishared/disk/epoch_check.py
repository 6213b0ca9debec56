# SPDX-License-Identifier: Apache-2.0
"""Whether this host's directory of a VM still counts, or another host has taken the VM over.

The directory holds the SEQ of the VM's history (vm_dir.py). A host that takes a VM over from a lost one notes
the SEQ from which it counts, the epoch, in each store that has an image of the VM; other VMs have no epoch.
So a host that comes back sees the epoch before it starts, sends or saves what it has.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Mapping, Optional

from ..errors import BadRecord, SemisharedError, StaleDirectory
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.refs import ImageRef
from ..model.store.access import is_path
from ..store.dir import epochs
from ..tools.hung_store import unless_it_hangs
from .history import seq_of

if TYPE_CHECKING:
    from ..model.disk.acquired import Given

HANGS = -2
"""Stands for an epoch: the store does not answer."""


def check(vm: int, directory: str, given: Optional[Mapping[int, Given]] = None) -> str:
    """Raise StaleDirectory if a VM directory is older than the VM's epoch; return '', or why that is unknown.

    An unreachable or hung store is no reason to refuse: a VM on the host's own disks runs without it.
    """
    seq, found = seq_of(directory), _images(directory, given)
    unknown = (
        f"whether another host has taken VM {vm} over cannot be told: a record in {directory} cannot be read"
        if None in found
        else ""
    )
    for image in filter(None, found):
        try:
            epoch = unless_it_hangs(partial(_epoch, image, vm), HANGS)
        except (SemisharedError, OSError) as e:
            unknown = f"whether another host has taken VM {vm} over cannot be told: {e}"
            continue
        if epoch == HANGS:
            unknown = (
                f"whether another host has taken VM {vm} over cannot be told: "
                f"{image.root or image.source} does not answer"
            )
        if epoch > seq:
            raise StaleDirectory(
                f"{directory} on {os.uname().nodename} is of SEQ {seq} of VM {vm}'s history; at "
                f"SEQ {epoch} another host took the VM over"
            )
    return unknown


def _images(directory: str, given: Optional[Mapping[int, Given]]) -> list[ImageRef | None]:
    """Return the images below a VM's disks, one for each mounted store; None stands for an unreadable record.

    If oned has reported the VM's disks (`given`), only their images count.
    """
    try:
        names = os.listdir(disk_names.records(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: dict[str, ImageRef | None] = {}
    for number in [number for number in map(disk_names.recorded, names) if number is not None]:
        try:
            image = (
                _image(directory, number)
                if given is None
                else given[number].image
                if number in given
                else None
            )
        except (OSError, BadRecord):
            found[""] = None  # an action on that disk reports why
            continue
        if image:
            found[image.epochs] = image
    return list(found.values())


def _image(directory: str, number: int) -> ImageRef | None:
    with open(disk_names.record(directory, number), "rb") as file:
        return Record.parse(number, file.read(disk_names.JSON_BYTES)).image


def _epoch(image: ImageRef, vm: int) -> int:
    if is_path(image.source):
        return epochs.read(image, vm)
    from .. import store  # loading its modules takes long

    return store.of(image.access).epoch(image, vm)
