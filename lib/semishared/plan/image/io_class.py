# SPDX-License-Identifier: Apache-2.0
"""The I/O class of a disk: said by attributes, noted in its record. What follows: plan/libvirt/domain.py.

clone, ln               SEMISHARED_IO_CLASS of the image, else of its datastore
mkimage, mkswap         of the system datastore
context                 both again, of all disks: OpenNebula calls it before each boot, so what has changed
since holds then
"""

from __future__ import annotations

from typing import Optional

from ... import NAME
from ...errors import BadAttribute, OnedUnavailable
from ...model import steps as s
from ...model.attributes import IO_CLASS
from ...model.disk.place import NORMAL
from ...model.exchange import AskOned, On, Part, Plan, warn
from ...opennebula.args import VmPlace
from ...opennebula.xml import Datastore, Image, Vm


def noted(host: str, disk: s.DiskRef, io_class: str) -> Plan:
    """Note the class of a disk that was just made: its record says that it is of the usual one."""
    if io_class != NORMAL:
        yield On(host, (s.NoteIoClasses(disk.vm, disk.vm_dir, (disk.disk,), (io_class,)),))


def volatile(place: VmPlace) -> Part[str]:
    """Return the class of the volatile disks in a VM directory: what its system datastore says."""
    datastore = yield AskOned("datastore", _system(place))
    return IO_CLASS.value(None, datastore)


def brought_up_to_date(place: VmPlace) -> Plan:
    """Note of each disk of ours which class it has now; if oned does not say it, or says what none is, what
    was noted before stays.
    """
    try:
        vm = yield AskOned("vm", place.vm)
        found = yield from _classes(vm, _system(place))
    except (OnedUnavailable, BadAttribute) as e:
        yield warn(f"the I/O classes of the disks of VM {place.vm} stay as they were: {e.detail}")
        return
    if found:
        yield On(place.host, (s.NoteIoClasses(place.vm, place.path, tuple(found), tuple(found.values())),))


def _classes(vm: Vm, system: int) -> Part[dict[int, str]]:
    """Return the class of each disk of ours; oned is asked once for each image and datastore."""
    images: dict[int, Optional[Image]] = {-1: None}
    datastores: dict[int, Datastore] = {}
    found = {}
    for disk in vm.disks:
        if disk.driver != NAME or disk.is_directory:
            continue
        image, store = disk.image_id, system if disk.image_id == -1 else disk.store_id
        if image not in images:
            images[image] = yield AskOned("image", image)
        if store not in datastores:
            datastores[store] = yield AskOned("datastore", store)
        found[disk.id] = IO_CLASS.value(images[image], datastores[store])
    return found


def _system(place: VmPlace) -> int:
    return int(place.path.split("/")[-2])
