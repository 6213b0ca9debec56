# SPDX-License-Identifier: Apache-2.0
"""Plan of cpds: a disk is saved as another image, which its store has to reach first (plan/store/rbd.py)."""

from __future__ import annotations

from ...model import steps as s
from ...model.exchange import On, Plan, Say
from ...model.store import access as store_access
from ...model.store import template
from ...named import NamedTuple
from ...opennebula.args import ToImage
from ...opennebula.states import LcmState
from ...opennebula.xml import Datastore, Vm
from ..image import encryption, images
from . import freeze as disk_freeze
from .disks import check_store, disk_ref, running_domain

AWAY = (LcmState.HOTPLUG_SAVEAS_UNDEPLOYED, LcmState.HOTPLUG_SAVEAS_STOPPED)
"""In which the files of the VM are on the front-end."""


class Told(NamedTuple):
    """What the front-end knows of the machines."""

    host: str
    """Where the disk is."""
    is_bridge: bool
    """That host is the bridge of the other image's store, whatever each is called."""
    freeze: str
    """How a running guest is to rest."""


def cpds(asked: ToImage, vm: Vm, datastore: Datastore, told: Told) -> Plan:
    """Plan cpds: save a disk as another image; a running guest is frozen for a moment."""
    disk, access = disk_ref(asked.disk), template.access(datastore)
    # A snapshot does not change while the guest runs.
    is_running = vm.lcm_state == LcmState.HOTPLUG_SAVEAS and asked.snapshot == -1
    guest = disk_freeze.Guest(running_domain(vm), told.freeze) if is_running else disk_freeze.Guest()
    if access.can.has_bridge:
        yield from _to_rbd(asked, vm, datastore, told, guest)
        return
    if is_running:
        encryption.check_running(vm, [disk.disk], "copy")
    path, format = store_access.check_source(access, asked.image, "image"), vm.disk(disk.disk).format or "raw"
    save = s.SaveDisk(disk, path, format, guest.domain, asked.snapshot, guest.freeze)
    found = yield On(told.host, (*check_store(access, path), save))
    yield Say(disk_freeze.lines, tuple(found))


def _to_rbd(asked: ToImage, vm: Vm, datastore: Datastore, told: Told, guest: disk_freeze.Guest) -> Plan:
    from ..image import disk_image
    from ..store import rbd

    access, disk, bridge = (
        template.access(datastore),
        disk_ref(asked.disk),
        template.bridge(datastore, vm.id),
    )
    target = images.ref_at(asked.store, access, vm.id, asked.image, "image")
    record = yield from rbd.record_of(told.host, disk)
    if record.bridged:
        source = yield from disk_image.confirmed(vm, disk.disk, record.bridged.to_data())
        yield from rbd.copy(told.host, bridge, source.source, target, disk, asked.snapshot, guest)
        return
    if guest.domain:
        # An image on the network is copied by Ceph, which knows no secret; a file of a running guest by QEMU.
        encryption.check_running(vm, [disk.disk], "copy")
    if told.is_bridge:
        access = access.by_bridge()
    local = rbd.Local(told.host, disk, vm.disk(disk.disk).size, access)
    yield from rbd.fill(local, bridge, target, asked.snapshot, guest)
