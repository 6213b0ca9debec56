# SPDX-License-Identifier: Apache-2.0
"""mv of a VM from a lost host: oned has lost sight of it (LCM states 60 and 61), or it is off (43).

                       target                                      the machine that changes the image
    which clones                                                   looked for
    older stay         removed, unless the VM runs there
    share              nothing                                     a client guest's key for it is taken back
    in place           linked or recorded anew                     no client writes to it? a session begins
    clone on the store linked or recorded anew
    swap area          made anew
    diff               made anew, if it may begin at what was committed last
    any other          made anew, if it may begin without what it held
    epoch                                                          noted: older directories do not count

No step asks the lost host or needs the front-end's own files: oned and the stores have all. Anything that can
refuse is asked first, so that nothing is half-done. The epoch comes last: until then what the lost host has
is the VM still, and `recover --failure` gives it back. oned has context made when it boots the VM here.

A host that is not shut out of the stores may be alive, and only oned may have lost sight of that VM. Then the
move is an ordinary one, if the host says that the guest does not run.
"""

from __future__ import annotations

from typing import Optional

from ...errors import BadArguments, DiskLost, HostNotLost, HostUnreachable, NotSupported
from ...model import steps as s
from ...model.attributes import IO_CLASS, ON_HOST_FAILURE
from ...model.disk import names as disk_names
from ...model.disk.network_disk import NetworkDisk
from ...model.disk.place import STORE_CLONE
from ...model.exchange import AskOned, On, Part, Plan, agree, ask
from ...model.store import image_steps as i
from ...model.store.access import is_path
from ...named import NamedTuple
from ...opennebula.args import DiskPlace, FromImage, Move, NewDisk, VmPlace, image_source
from ...opennebula.states import ImageType, LcmState
from ...opennebula.xml import Datastore, Disk, Image, View, Vm
from ..disk import disks
from ..image import images, placement

FAILED = LcmState.PROLOG_MIGRATE_UNKNOWN_FAILURE
"""The VM did not come to its new host; `recover --retry` asks for the same mv again."""
TYPES = {"KERNEL": ImageType.KERNEL, "INITRD": ImageType.RAMDISK}
"""What OS of a VM may take from a datastore of files, as <name>_DS, and the type of image that it is."""


def _is_swap(disk: Disk) -> bool:
    return disk.type == "SWAP"


def _has_no_file(disk: Disk) -> bool:
    """Tell whether a disk, of any driver, has no file in the VM directory: RBD, or a shared directory."""
    return disk.type in ("RBD", "FILESYSTEM")


class _Rebuilt(NamedTuple):
    """How one disk comes to the target; its image, and the machine that changes that."""

    plan: Plan
    image: Optional[s.ImageRef] = None
    machine: str = ""


def mv(asked: Move, vm: Vm, overlay_options: str, file_systems: disks.FileSystems = disks.ALL) -> Plan:
    """Plan mv of a VM directory from a host that can write to no store any more; raise DiskLost or
    NotSupported before anything is done.
    """
    place, found = asked.target, []
    for disk in vm.disks:
        if not disk.is_directory and (disk.driver in ("", disks.DRIVER) or not _has_no_file(disk)):
            found.append((yield from _decided(asked, vm, disk, overlay_options, file_systems)))
    for name in TYPES:
        if View(vm.element).text(f"TEMPLATE/OS/{name}_DS"):
            found.append((yield from _kernel(place, vm, name)))
    for machine in sorted({rebuilt.machine for rebuilt in found if rebuilt.image} - {place.host}):
        yield agree(machine)
    yield from _cleared(place, vm)
    yield On(place.host, (s.PrepareVm(vm.id, place.path),))
    for rebuilt in found:
        yield from rebuilt.plan
    noted = {rebuilt.image.epochs: rebuilt for rebuilt in found if rebuilt.image}
    for rebuilt in noted.values():
        assert rebuilt.image
        yield On(rebuilt.machine, (i.NoteEpoch(rebuilt.image, vm.id, vm.seq),))


def _decided(
    asked: Move, vm: Vm, disk: Disk, overlay_options: str, file_systems: disks.FileSystems
) -> Part[_Rebuilt]:
    place = DiskPlace(asked.target, disk_names.disk_name(disk.id), disk.id)
    if disk.image_id < 0:
        _may_begin_anew(asked.source.host, vm, disk)
        request = NewDisk(disk.size, "raw" if _is_swap(disk) else disk.format, place)
        made = disks.mkswap(request) if _is_swap(disk) else disks.mkimage(request, disk, file_systems)
        return _Rebuilt(made)
    if disk.driver not in ("", disks.DRIVER):
        raise NotSupported(
            f"disk {disk.id} of VM {vm.id} is of driver {disk.driver}, and is not brought elsewhere"
        )
    image: Image = yield AskOned("image", disk.image_id)
    if not_acquired(vm, disk, image):
        raise BadArguments(not_acquired(vm, disk, image))
    datastore: Datastore = yield AskOned("datastore", image.store_id)
    request_image = FromImage(image_source(image.source, "SOURCE"), place, image.store_id)
    ref = images.image_ref(image, datastore, request_image.source)
    machine = yield from images.machine(datastore, image.id, place.host)
    if not disk.is_clone:
        if placement.attached(image, datastore, disk).commits:
            # Uncommitted changes are lost with the host: the image's owner decides whether to give them up.
            _may_begin_anew(asked.source.host, vm, disk, image, datastore)
        return _Rebuilt(
            disks.ln(request_image, disk, image, datastore, overlay_options, is_taken_over=True), ref, machine
        )
    # The store shows where the disk was: attributes may have changed since.
    clone = yield from ask(machine, i.FindClone(ref, vm.id, disk.id))
    if clone:
        return _Rebuilt(_adopted(place, ref, clone, IO_CLASS.value(image, datastore)), ref, machine)
    _may_begin_anew(asked.source.host, vm, disk, image, datastore)
    return _Rebuilt(disks.clone(request_image, disk, image, datastore, overlay_options), ref, machine)


def not_acquired(vm: Vm, disk: Disk, image: Image) -> str:
    """Return why oned did not acquire this image for a disk, '' if it did: users may write DISK."""
    of = f"disk {disk.id} of VM {vm.id}"
    if vm.id not in image.vms:
        return f"{of} names image {image.id}, which oned has not given to that VM"
    if (disk.source, disk.store_id) != (image.source, image.store_id):
        said, right = (
            f"{disk.source!r} in datastore {disk.store_id}",
            f"{image.source!r} in datastore {image.store_id}",
        )
        return f"{of} names {said}, and its image {image.id} is {right}"
    return ""


def _adopted(place: DiskPlace, image: s.ImageRef, clone: str, kind: str) -> Plan:
    """Give the VM the clone that it has on the store."""
    disk = disks.disk_ref(place)
    if is_path(clone):
        yield On(place.host, (s.AdoptClone(disk, image, clone),))
    else:
        network = NetworkDisk.of(clone, image.access)
        yield On(place.host, (i.RecordNetwork(disk, image, network, STORE_CLONE.name, readonly=False),))
    yield from placement.noted(place.host, disk, kind)


def _may_begin_anew(
    host: str, vm: Vm, disk: Disk, image: Optional[Image] = None, datastore: Optional[Datastore] = None
) -> None:
    why = why_not_anew(vm, disk, image, datastore)
    if why:
        raise DiskLost(f"disk {disk.id} of VM {vm.id} was only on {host}: {why}")


def why_not_anew(
    vm: Vm, disk: Disk, image: Optional[Image] = None, datastore: Optional[Datastore] = None
) -> str:
    """Return why a disk of a lost host may not begin anew elsewhere, '' if it may; raise BadAttribute.

    A volatile disk (of no image) has the attribute in the VM's template. What a swap area held is worth
    nothing without the guest.
    """
    if _is_swap(disk):
        return ""
    if image is None or datastore is None:
        said = disk.text(ON_HOST_FAILURE.name) or ON_HOST_FAILURE.default
        may = ON_HOST_FAILURE.parsed(said, f"disk {disk.id} of VM {vm.id}")
    else:
        may = ON_HOST_FAILURE.value(image, datastore)
    if may != "recreate":
        return "SEMISHARED_ON_HOST_FAILURE is wait" + (f" for image {image.id}" if image else "")
    if vm.snapshots_of(disk.id):
        # oned would still list them, and revert to one that is not there.
        return f"its snapshots {', '.join(map(str, vm.snapshots_of(disk.id)))} were there too"
    return ""


def is_unseen(vm: Vm) -> bool:
    """Tell whether oned has a VM running but unseen: when rescheduled, such a VM starts elsewhere."""
    return vm.is_active and vm.lcm_state == LcmState.UNKNOWN


def why_waits(vm: Vm, disk: Disk, image: Image, datastore: Datastore) -> str:
    """Return why a VM with this disk would not come up elsewhere, '' if it would, by what oned knows."""
    if disk.is_directory:
        # its host is off, or only read it (front/fence_facts.py); where it is not mounted, deploy refuses
        return ""
    if disk.driver not in ("", disks.DRIVER):
        return "" if _has_no_file(disk) else f"it is of driver {disk.driver}"
    if not_acquired(vm, disk, image):
        return not_acquired(vm, disk, image)
    place = placement.place(image, datastore) if disk.is_clone else placement.attached(image, datastore, disk)
    if not place.is_local:
        return ""
    return why_not_anew(vm, disk, image, datastore)


def _kernel(place: VmPlace, vm: Vm, name: str) -> Part[_Rebuilt]:
    """Decide how a datastore's kernel or initrd comes to the target: as it came to the host before."""
    image: Image = yield AskOned("image", View(vm.element).number(f"TEMPLATE/OS/{name}_DS_ID"))
    datastore: Datastore = yield AskOned("datastore", image.store_id)
    if image.type != TYPES[name] or datastore.driver != disks.DRIVER:
        of = (
            f"of driver {datastore.driver}"
            if image.type == TYPES[name]
            else f"image {image.id}, which is none"
        )
        raise NotSupported(f"the {name.lower()} of VM {vm.id} is {of}, and is not brought elsewhere")
    target = DiskPlace(place, name.lower(), None)
    return _Rebuilt(
        disks.copy_kernel(FromImage(image_source(image.source, "SOURCE"), target, datastore.id), datastore)
    )


def _cleared(place: VmPlace, vm: Vm) -> Plan:
    """Remove what an earlier stay of the VM left at the target, and its keys for shares at the lost host.

    What this move made there before it was killed is used.
    """
    not_running, look = s.CheckNotRunning(disks.running_domain(vm)), s.LookAtVm(vm.id, place.path)
    found = yield from ask(place.host, look, after=(not_running,))
    if any(disk.is_directory for disk in vm.disks):
        from ..share import client_keys

        # The guest is off with its host if it could write. What it left open would have the next one wait.
        yield from client_keys.withdrawn(vm)
    if found.disks and found.seq != vm.seq:
        yield On(place.host, (s.RemoveVm(vm.id, place.path),))


def is_away(place: VmPlace) -> Part[bool]:
    """Tell whether a host does not answer; one that answers still has its own disks' content."""
    try:
        yield On(place.host, (s.LookAtVm(place.vm, place.path),))
    except HostUnreachable:
        return True
    return False


def seen_to_be_off(host: str, vm: Vm, why_not_fenced: str) -> Plan:
    """Check that an unfenced host answers and does not run the VM; raise HostNotLost or MigrationRefused."""
    try:
        yield On(host, (s.CheckNotRunning(disks.running_domain(vm)),))
    except HostUnreachable as e:
        raise HostNotLost(f"VM {vm.id}: {e.detail}, and {why_not_fenced}") from None
