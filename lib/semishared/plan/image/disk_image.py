# SPDX-License-Identifier: Apache-2.0
"""Which image a disk of a VM is made from, by oned; a host's word is compared with it, never used alone.

    {"on_store": ..., "settle": ...} in a host's answer, the image of a record    the host's word
    the VM's DISK, its image, that image's datastore                              oned's word

A host may say that there is a disk, and which generation the disk lies over. CLONE, which oned writes, says
whether the disk is the image or its clone: a host that is believed in that could have an image changed that
other VMs use.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ... import NAME
from ...errors import ForeignImage, GoneFromOned
from ...model.disk import acquired
from ...model.exchange import AskOned, Part
from ...model.refs import ImageRef
from ...model.store import template
from ...opennebula.xml import Datastore, Disk, Image, Vm
from . import images

Known = Dict[Tuple[str, int], Any]
"""oned's answers until now, by the kind of the object and its id."""


def of_disk(vm: Vm, disk: Disk, known: Optional[Known] = None) -> Part[ImageRef]:
    """Return the image that oned has acquired for a disk of a VM.

    Raise ForeignImage for a disk that has none, GoneFromOned, OnedUnavailable.
    """
    known = {} if known is None else known
    if disk.image_id < 0:
        raise ForeignImage(f"disk {disk.id} of VM {vm.id} is volatile to OpenNebula: it has no image")
    try:
        image: Image = yield from _once(known, "image", disk.image_id)
    except GoneFromOned:
        # Deleted by force: oned has overwritten DISK, and only the datastore says how its image is reached.
        try:
            datastore: Datastore = yield from _once(known, "datastore", disk.store_id)
        except GoneFromOned:
            raise GoneFromOned(
                _kept(vm.id, disk.id, f"{disk.image_id}, of datastore {disk.store_id}: it has neither")
            ) from None
        return images.ref_at(
            datastore.id, template.access(datastore), disk.image_id, disk.source, format=disk.format
        )
    datastore = yield from _once(known, "datastore", image.store_id)
    return images.image_ref(image, datastore)


def _once(known: Known, what: str, number: int) -> Part[Any]:
    if (what, number) not in known:
        known[what, number] = yield AskOned(what, number)
    return known[what, number]


def confirmed(vm: Vm, disk: int, said: object) -> Part[ImageRef]:
    """Return oned's image or clone of a disk that is `said` to be one.

    Raise ForeignImage, OnedUnavailable.
    """
    named = ImageRef.from_data(said)
    return acquired.compared(
        named, acquired.in_store((yield from _given(vm, disk, named)), vm.id, disk), vm.id, disk
    )


def clone(vm: int, disk: int, said: object) -> Part[ImageRef]:
    """Return the clone that a host `said` a disk is; raise ForeignImage also for the image itself.

    That is not removed with a disk.
    """
    named, known = ImageRef.from_data(said), (yield AskOned("vm", vm))
    given = yield from _given(known, disk, named)
    if given.image and named.source == given.image.source:
        raise ForeignImage(
            f"disk {disk} of VM {vm} is said to be a clone, and {named.source} is an image: it is kept"
        )
    return acquired.compared(named, acquired.in_store(given, vm, disk), vm, disk)


def _given(vm: Vm, disk: int, named: ImageRef) -> Part[acquired.Given]:
    found = next((one for one in vm.disks if one.id == disk), None)
    if found:
        return acquired.Given((yield from of_disk(vm, found)), found.is_clone, found.is_readonly)
    # Detached, and kept on its host.
    try:
        image: Image = yield AskOned("image", named.id)
        datastore: Datastore = yield AskOned("datastore", image.store_id)
    except GoneFromOned as e:
        raise GoneFromOned(
            f"{_kept(vm.id, disk, str(named.id))} ({e.detail}), and the disk is detached"
        ) from None
    return acquired.Given(
        images.image_ref(image, datastore), not image.is_persistent or named.source != image.source
    )


def _kept(vm: int, disk: int, image: str) -> str:
    return f"what its host has of disk {disk} of VM {vm} is kept: OpenNebula has no more image {image}"


def of_vm(vm: Vm) -> Part[Dict[int, acquired.Given]]:
    """Return oned's images of a VM's disks of ours, by disk; raise OnedUnavailable."""
    found: Dict[int, acquired.Given] = {}
    known: Known = {}
    for disk in vm.disks:
        if disk.driver in ("", NAME) and not disk.is_directory:
            image = None if disk.image_id < 0 else (yield from of_disk(vm, disk, known))
            found[disk.id] = acquired.Given(image, disk.is_clone, disk.is_readonly)
    return found
