# SPDX-License-Identifier: Apache-2.0
"""Sizes of disks that lie on a store, for the monitoring probe: what a store has of the disk, and of each of
its snapshots.

A store may hang. So a child process looks at each, for a limited time, and what it cannot tell is left out:
oned keeps the last value.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Callable, Dict, Iterable, Optional, Tuple, TypeVar

from ..errors import SemisharedError
from ..model.disk import names as disk_names
from ..tools import hung_store
from ..tools.files import allocated

MOUNTED_S, CEPH_S = 3.0, 10.0
"""Seconds that one store may take; the probe's own limit is minutes."""
FAST_DIFF = 16
"""Feature of an RBD image (RBD_FEATURE_FAST_DIFF): without it, its objects would be asked one by one."""
Key = TypeVar("Key")
Sizes = Tuple[int, Dict[int, int]]
"""Bytes of a disk, and of its snapshots by their numbers."""


def of_files(links: Iterable[str]) -> dict[str, Sizes]:
    """Return the sizes of disks by their links, which lead to files of mounted stores."""
    stores: dict[str, list[str]] = {}
    for link in links:
        try:
            target = os.readlink(link)
        except OSError:
            continue  # its VM has gone since
        stores.setdefault(target.partition(f"/{disk_names.SIDE}/")[0], []).append(link)
    found: dict[str, Sizes] = {}
    for names in stores.values():
        found.update(_looked(partial(_of_links, names), MOUNTED_S))
    return found


def _of_links(links: Iterable[str]) -> dict[str, Sizes]:
    found = {link: _of_file(link) for link in links}
    return {link: sizes for link, sizes in found.items() if sizes}


def _of_file(link: str) -> Optional[Sizes]:
    """Return the sizes of what is there, None if nothing is: the store may not be mounted."""
    path = os.path.realpath(link)
    if not os.path.exists(path):
        return None
    folder, name = os.path.split(path)
    if not disk_names.are_layers(folder):
        folder, name = disk_names.layers(path), ""
    try:
        layers = [one for one in os.listdir(folder) if disk_names.is_number(one) and one != name]
    except OSError:
        layers = []
    return allocated(path), {int(one): allocated(f"{folder}/{one}") for one in layers}


def of_networks(vm_dirs: dict[str, list[int]]) -> dict[tuple[str, int], Sizes]:
    """Return the sizes of disks that libvirt opens over the network, by VM directory and number."""
    found: dict[tuple[str, int], Sizes] = {}
    for vm_dir, disks in vm_dirs.items():
        found.update(_looked(partial(_of_records, vm_dir, disks), CEPH_S))
    return found


def _of_records(vm_dir: str, disks: Iterable[int]) -> dict[tuple[str, int], Sizes]:
    from ..disk import records

    found = {}
    for disk in disks:
        record = records.read_record(vm_dir, disk)
        sizes = _of_image(record.bridged) if record and record.bridged else None
        if sizes:
            found[vm_dir, disk] = sizes
    return found


def _of_image(image: object) -> Optional[Sizes]:
    """Return the sizes of an RBD image, opened as its guest's user; None for one that cannot tell them."""
    from ..model.refs import ImageRef
    from ..store.rbd import ceph
    from ..store.rbd import image as rbd_image

    assert isinstance(image, ImageRef)
    with ceph.opened(*ceph.pool_of(image, image.access.user), read_only=True) as opened:
        if not opened.features() & FAST_DIFF:
            return None
        kept = [one for one in reversed(rbd_image.snapshots(opened)) if disk_names.is_number(one.name)]
        snapshots, before = {}, None
        for one in kept:
            opened.set_snap(one.name)
            snapshots[int(one.name)] = _changed(opened, before)
            before = one.name
        opened.set_snap(None)
        return _changed(opened, None), snapshots


def _changed(opened: object, since: Optional[str]) -> int:
    """Return the bytes that an open image has of its own since its snapshot `since`, None: in all."""
    lengths: list[int] = []

    def count(_offset: int, length: int, is_there: bool) -> None:
        if is_there:
            lengths.append(length)

    opened.diff_iterate(0, opened.size(), since, count, include_parent=False, whole_object=True)  # type: ignore[attr-defined]
    return sum(lengths)


def _looked(look: Callable[[], Dict[Key, Sizes]], limit_s: float) -> Dict[Key, Sizes]:
    try:
        return hung_store.unless_its_process_hangs(look, {}, limit_s)
    except (OSError, SemisharedError):
        return {}
