# SPDX-License-Identifier: Apache-2.0
"""Plans of the transfer actions for one disk, or one VM directory, on one host."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Mapping, Optional, Tuple

from ...errors import BadArguments, NotSupported
from ...model import steps as s
from ...model.attributes import BASES, IO_CLASS
from ...model.disk import names as disk_names
from ...model.disk.place import Place
from ...model.exchange import Feed, File, On, Plan, Say, ask
from ...model.store import access as store_access
from ...model.store import template
from ...opennebula.args import Context, DiskPlace, FromImage, NewDisk
from ...opennebula.states import LcmState
from ...opennebula.xml import Datastore, Disk, Image, View, Vm
from ..image import images, placement

if TYPE_CHECKING:
    from ..share.client_keys import Clients

FORMATS = ("raw", "qcow2")
DRIVER = "semishared"
"""TM_MAD of the disks that are ours."""


def disk_ref(place: DiskPlace) -> s.DiskRef:
    """Return the disk at a place; raise BadArguments for a kernel."""
    if place.disk is None:
        raise BadArguments(f"{place.path} is no disk")
    return s.DiskRef(place.vm_place.vm, place.disk, place.vm_place.path)


def _prepare(place: DiskPlace) -> s.PrepareVm:
    return s.PrepareVm(place.vm_place.vm, place.vm_place.path)


def grown(disk: Disk) -> int:
    """Return the least size of the disk in bytes, 0 if the image's own will do."""
    return disk.size if disk.size > disk.original_size else 0


def check_store(access: store_access.Access, path: str) -> list[s.Step]:
    """Plan to check that the store is there before `path` in it is read or written."""
    if not access.marker:
        return []
    from ...model.store.datastore_steps import CheckStore

    return [CheckStore(access, posixpath.dirname(path))]


def copy_kernel(asked: FromImage, datastore: Datastore) -> Plan:
    """Plan clone of a kernel or initrd, for which the VM has no DISK."""
    place = asked.target
    source = store_access.check_source(store_access.MOUNTED, asked.source)
    copy = s.CopyFile(source, place.path, place.vm_place.vm)
    yield On(place.host, (*check_store(template.access(datastore), source), _prepare(place), copy))


def clone(
    asked: FromImage,
    disk: Optional[Disk],
    image: Optional[Image],
    datastore: Datastore,
    options: str,
    vm: Optional[Vm] = None,
) -> Plan:
    """Plan clone: a writable disk that goes at shutdown; `options`: of overlays, by semishared.conf."""
    if disk is None or image is None:
        yield from copy_kernel(asked, datastore)
        return
    if vm:
        yield from can_start(vm, asked.target.host)
    options = placement.overlay_options(options, disk.size)
    kind, place, is_hot = (
        IO_CLASS.value(image, datastore),
        placement.place(image, datastore),
        BASES.value(image, datastore) == "ram",
    )
    yield from _where_wanted(
        asked, disk, image, datastore, place, _cloned(asked, disk, image, datastore, options)
    )
    if is_hot and place.is_local and place.backing != "none":
        from ...model.device.steps import NoteHot

        # Also of a remote-first disk: it may be detached later.
        yield On(asked.target.host, (NoteHot(disk_ref(asked.target)),))
    yield from placement.noted(asked.target.host, disk_ref(asked.target), kind)
    yield from _allocated(asked.target, disk, image)


def _allocated(target: DiskPlace, disk: Disk, image: Optional[Image] = None) -> Plan:
    """Allocate all blocks of a disk that is made, if it is not to be sparse."""
    if placement.is_dense(disk, image):
        from ...model.device.steps import AllocateDisk

        yield On(target.host, (AllocateDisk(disk_ref(target)),))


def _cloned(asked: FromImage, disk: Disk, image: Image, datastore: Datastore, options: str) -> Plan:
    if image.is_persistent:
        raise BadArguments(f"image {image.id} is persistent, it is attached in place and never cloned")
    ref, target = images.image_ref(image, datastore, asked.source, "source"), disk_ref(asked.target)
    place = placement.place(image, datastore)
    placement.check_clone(disk, image, place, ref.access.can.formats)
    host, prepare, min_size = asked.target.host, _prepare(asked.target), grown(disk)
    root = disk_names.base_store(asked.target.vm_place.datastore_location)
    machine = yield from images.machine(datastore, image.id)
    if machine:
        from ..store import rbd

        if not place.is_local:
            yield from rbd.clone(host, machine, ref, target, min_size)
            return
        if place.is_remote:
            yield from rbd.remote(host, machine, ref, s.CreateRemote(target, ref, min_size, options))
            return
        ref = yield from rbd.frozen(host, machine, ref, root if place.leases else "")
    if not place.is_local:
        yield On(host, (prepare, s.CloneOnStore(target, ref, min_size)))
    elif place.is_remote:
        yield On(host, (prepare, s.CreateRemote(target, ref, min_size, options)))
    elif not place.leases:
        yield On(host, (prepare, s.CopyImage(target, ref, min_size)))
    else:
        # The base first: it may take long, and until it is there nothing of the VM need exist.
        yield On(host, (s.StageBase(root, ref), prepare, s.CreateOverlay(target, ref, min_size, options)))


def ln(
    asked: FromImage,
    disk: Disk,
    image: Image,
    datastore: Datastore,
    options: str,
    is_taken_over: bool = False,
    vm: Optional[Vm] = None,
) -> Plan:
    """Plan ln: the image itself, in place, or a diff.

    CD-ROM and immutable images come read-only and keep their generation. `is_taken_over`: from a lost host;
    then failover notes the VM's epoch when all of it is here.
    """

    options = placement.overlay_options(options, disk.size)
    kind, place = IO_CLASS.value(image, datastore), placement.attached(image, datastore, disk)
    if vm and place.commits:
        yield from can_start(vm, asked.target.host)
    yield from _where_wanted(
        asked, disk, image, datastore, place, _attached(asked, disk, image, datastore, options, is_taken_over)
    )
    yield from placement.noted(asked.target.host, disk_ref(asked.target), kind)
    if place.commits:
        yield from _allocated(asked.target, disk, image)


def _where_wanted(
    asked: FromImage, disk: Disk, image: Image, datastore: Datastore, place: Place, made: Plan
) -> Plan:
    """Make a disk on a device of the classes that are wanted for it, if any are."""
    if not placement.device_classes(image, datastore):
        yield from made
        return
    from ..device import choose

    host, ref, classes = (
        asked.target.host,
        disk_ref(asked.target),
        choose.wanted(image, datastore, place),
    )
    yield from choose.warned(disk, image, datastore, place)
    yield from choose.placed(host, ref, disk, classes, place)
    yield from made
    yield from choose.noted(host, ref, classes)


def _attached(
    asked: FromImage, disk: Disk, image: Image, datastore: Datastore, options: str, is_taken_over: bool
) -> Plan:
    place = placement.attached(image, datastore, disk)
    placement.secret(disk, image)
    ref, target = images.image_ref(image, datastore, asked.source, "source"), disk_ref(asked.target)
    host, readonly = asked.target.host, disk.is_readonly
    machine = yield from images.machine(datastore, image.id)
    if place.commits:
        placement.check_diff(disk, image)
        yield from _diff(asked, ref, machine, grown(disk), options, is_taken_over)
        return
    if not machine:
        link = s.LinkInPlace(target, ref, readonly, session=not readonly, shareable=image.is_shareable)
        yield On(host, (_prepare(asked.target), link))
        return
    from ..store import rbd

    yield from rbd.ln(host, machine, ref, target, readonly=readonly, shareable=image.is_shareable)


def _diff(
    asked: FromImage, image: s.ImageRef, machine: str, min_size: int, options: str, is_taken_over: bool
) -> Plan:
    """Plan ln of a persistent image whose place is local: a claim, and an overlay of the VM's."""
    from ...model.disk.commit_steps import CreateDiff, LookForDiff
    from ..store import commit_turns

    target, root = disk_ref(asked.target), disk_names.base_store(asked.target.vm_place.datastore_location)
    if machine:
        image = yield from commit_turns.claimable(asked.target.host, machine, image, root)
    create = CreateDiff(target, image, min_size, options)
    if not is_taken_over:
        left = yield from ask(asked.target.host, LookForDiff(target, image))
        if left:
            from ...model.store.image_steps import NoteEpoch

            yield Say(commit_turns.left_behind, (target.vm, target.disk, left.before))
            # First of all, so that what is here of the VM is not older than its epoch.
            yield On(asked.target.host, (_prepare(asked.target),))
            yield On(machine or asked.target.host, (NoteEpoch(image, target.vm, left.epoch),))
    found = yield from ask(asked.target.host, create, (s.StageBase(root, image), _prepare(asked.target)))
    yield Say(commit_turns.made, (target.vm, target.disk, found))


FileSystems = Mapping[str, Tuple[str, ...]]
"""The file systems that the site supports, and words for mkfs (front/stock_conf.py); none: as mkfs has it."""
ALL: FileSystems = {}


def mkimage(asked: NewDisk, disk: Disk, file_systems: FileSystems = ALL) -> Plan:
    """Plan mkimage: an empty disk on the host, with the file system the VM template names."""
    format = asked.format or "raw"
    if format not in FORMATS:
        raise NotSupported(f"format {format!r} of disk {disk.id} is not {' or '.join(FORMATS)}")
    placement.check_volatile(disk)
    fs = disk.file_system
    if fs and file_systems and fs not in file_systems:
        raise NotSupported(f"FS of disk {disk.id} is {fs!r}, not one of {', '.join(sorted(file_systems))}")
    yield from _volatile(asked, format, fs, file_systems)
    yield from _allocated(asked.target, disk)


def mkswap(asked: NewDisk) -> Plan:
    """Plan mkswap: a swap area on the host."""
    yield from _volatile(asked, "raw", "swap")


def _volatile(asked: NewDisk, format: str, fs: str, file_systems: FileSystems = ALL) -> Plan:
    if not asked.size:
        raise BadArguments("a disk of size 0")
    disk = disk_ref(asked.target)
    kind = yield from placement.volatile(asked.target.vm_place)
    made = s.CreateVolatile(disk, asked.size, format, fs, file_systems.get(fs, ()))
    yield On(asked.target.host, (_prepare(asked.target), made))
    yield from placement.noted(asked.target.host, disk, kind)


def context(asked: Context, iso: File, size: int, shares: Optional[Clients] = None) -> Plan:
    """Plan context: bring the front-end's CONTEXT ISO to the host; oned calls it before each boot.

    `shares`: what to note of a VM's shares.
    """
    place = asked.target
    vm = place.vm_place
    receive = s.ReceiveFile(place.path, vm.vm, size, iso.sha256)
    roots = (
        {
            str(image): [marker, born, *([True] if reads else [])]
            for image, marker, born, reads in shares.roots
        }
        if shares
        else {}
    )
    noted = () if shares is None else (s.NoteClients(vm.vm, vm.path, shares.disks, roots),)
    yield On(place.host, (_prepare(place), *noted, s.ReplaceLostBases(vm.vm, vm.path)))
    yield from placement.brought_up_to_date(vm)
    yield Feed(On(place.host, (receive,)), iso)


STARTS_ANEW = (LcmState.PROLOG, LcmState.PROLOG_UNDEPLOY)
"""LCM_STATEs from which an active VM goes on to be started as its template says."""


def can_start(vm: Vm, host: str) -> Plan:
    """Plan to look whether a host has the machine type and the CPU that the VM's template names, if it is to
    be started there; raise MachineMissing, CpuMissing.

    Else the host refuses the guest when all of it has come.
    """
    if vm.is_active and vm.lcm_state not in STARTS_ANEW:
        return  # it has its guest already, or has none for now
    view = View(vm.element)
    names = view.text("TEMPLATE/OS/ARCH"), view.text("TEMPLATE/OS/MACHINE")
    machine = s.CheckMachine(vm.id, "", *names, "", "")
    if view.text("TEMPLATE/CPU_MODEL/MODEL"):
        from ..vm import cpu_model

        yield from cpu_model.can_start(vm, host, machine)
    elif machine.machine:
        yield On(host, (machine,))


def running_domain(vm: Vm) -> str:
    """Return libvirt's name of the VM; raise BadArguments for a DEPLOY_ID that is no plain name."""
    domain = vm.deploy_id or f"one-{vm.id}"
    if any(not (c.isalnum() or c in "-_.") for c in domain) or domain.startswith("-"):
        raise BadArguments(f"not a deploy id: {domain!r}")
    return domain
