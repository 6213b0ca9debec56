# SPDX-License-Identifier: Apache-2.0
"""Plan the snapshots of one disk: from the host's facts and the request to the steps.

Own disks are trees of layers (tools/layers.py); a layer holds what differs from the layer below it.

    create 1:   base <- 0 <- (1)           ->   base <- 0 <- 1 <- (2)
                the active layer is frozen under the snapshot's number, a new one is put over it

    revert 0:   base <- 0 <- 1 <- (2)      ->   base <- 0 <- 1
                                                        ^---- (2')    a new active layer replaces (2)

    delete 0:   base <- 0 <- 1             ->   base <- 1'            each child takes what 0 holds and it
                        ^---- (2)                  ^---- (2')         does not, and lies on what 0 lay on

No request changes the content of another snapshot; () is the active layer. The driver announces
ALLOW_ORPHANS=YES: a snapshot with children may go, and so may one that the active layer stands on.

Disks in place have independent copies beside the image instead, so that SOURCE is always the current content
in the image's own format, for all its readers.
"""

from __future__ import annotations

from typing import Mapping

from ...errors import BadArguments, BadRecord, MissingImage, MissingVm, NotSupported
from ...model import steps as s
from ...model.disk.place import PLACES, Place
from ...model.exchange import On, Part, Plan, Say, ask
from ...model.store.access import is_path
from ...named import NamedTuple
from ...opennebula.args import DiskPlace, Resize, SnapshotPlace
from ...opennebula.states import LcmState
from ...opennebula.xml import Vm
from ..image import placement
from . import freeze as disk_freeze
from .disks import disk_ref, running_domain

NO_LAYER = -1


class Tree(NamedTuple):
    """All layers of a disk, and which one the guest writes to."""

    layers: Mapping[int, s.SeenLayer]
    active: int

    def children(self, number: int) -> list[int]:
        """Return the layers directly over `number`."""
        return sorted(child for child, layer in self.layers.items() if layer.parent == number)

    def chain(self) -> list[int]:
        """Return the active layer and all below it."""
        found = [self.active]
        while self.layers[found[-1]].parent != NO_LAYER:
            found.append(self.layers[found[-1]].parent)
            if found[-1] not in self.layers or len(found) > len(self.layers):
                raise BadRecord(f"layer {found[-2]} lies over {found[-1]}, which is not there")
        return found


class Facts(NamedTuple):
    """What DescribeDisk found: the kind of disk, its layers or snapshot copies, its guest."""

    place: Place
    tree: Tree
    snapshots: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    """Numbers of layers that have a higher number too."""
    target: str = ""
    system_snapshots: int = 0
    image: s.ImageRef | None = None
    """The image that the disk is, None for a disk of its own layers."""
    session: str = ""
    """The session in which this image is open."""

    @classmethod
    def parse(cls, said: s.OnStore | s.DescribedDisk) -> Facts:
        """Return the facts in the answer of a DescribeDisk."""
        if isinstance(said, s.OnStore) or said.how not in PLACES:
            raise BadArguments("not a description of a disk")
        place, layers = PLACES[said.how], {int(number): layer for number, layer in said.layers.items()}
        if place.snapshots != "none" and not said.image and said.active not in layers:
            raise BadRecord(f"its guest is said to write to layer {said.active}, which is not there")
        image = s.ImageRef.from_data(said.image) if said.image else None
        of_guest = said.target, said.system_snapshots
        return cls(
            place, Tree(layers, said.active), said.snapshots, said.aliases, *of_guest, image, said.session
        )

    @property
    def is_running(self) -> bool:
        return bool(self.target)


def _check(facts: Facts, request: SnapshotPlace) -> None:
    if facts.place.commits:
        # oned lists snapshots with the image, whatever VM has it; these would go with the disk on its host.
        raise NotSupported(
            f"disk {request.disk.disk} is a local disk of a persistent image "
            f"({facts.place.name}): its snapshots would stay on the host, "
            "those of a persistent image belong to the image; save the disk as another image "
            "instead (onevm disk-saveas)"
        )
    if facts.place.snapshots == "none":
        raise NotSupported(f"disk {request.disk.disk} is volatile, it cannot have snapshots")
    if facts.system_snapshots:
        # Internal snapshots live in the active layer and need the layers below it as they are.
        raise NotSupported(
            f"the VM has {facts.system_snapshots} system snapshots; delete them before those of disks"
        )


def create(request: SnapshotPlace, facts: Facts, domain: str, freeze: str = "NONE") -> list[s.Step]:
    """Plan snap_create, or snap_create_live of `domain`: the present content gets the snapshot's number.

    `freeze`: how the guest rests meanwhile. A suspended VM is off: its memory image names the layer that is
    frozen here, and vmm/restore corrects that.
    """
    _check(facts, request)
    disk, number = disk_ref(request.disk), request.snapshot
    if facts.image:
        return [s.CopyOut(disk, number, domain, facts.target, freeze if domain else "NONE")]
    tree = facts.tree
    top, new = tree.active, number + 1
    unused = [
        s.DropLayer(disk, alias) for alias in sorted({top, *facts.aliases} - {number, new}) if not domain
    ]
    if top == new and tree.layers[top].parent == number:
        return [s.ActivateLayer(disk, new, "qcow2"), *unused]  # done before
    if top > number:
        raise BadArguments(f"snapshot {number} of disk {disk.disk} is older than its active layer {top}")
    steps: list[s.Step] = [s.NameLayer(disk, top, number)] if top != number else []
    steps += [s.AddLayer(disk, new, number, tree.layers[top].format), s.ActivateLayer(disk, new, "qcow2")]
    if domain:
        # The record first: if a later step fails, both layers hold the guest's data, and only the newer says
        # so.
        return [*steps[:-1], s.SwitchLayer(disk, top, new, domain, facts.target, freeze)]
    return steps + unused


def delete(request: SnapshotPlace, facts: Facts, domain: str) -> list[s.Step]:
    """Plan snap_delete, off or of the running `domain`; it does nothing for a snapshot that is not there."""
    _check(facts, request)
    disk, number, tree = disk_ref(request.disk), request.snapshot, facts.tree
    if facts.image:
        from ...model.store.image_steps import ForgetSnapshot

        return [ForgetSnapshot(facts.image, number, facts.session)]
    if number == tree.active:
        raise BadArguments(f"snapshot {number} of disk {disk.disk} is its active layer")
    if number not in tree.layers:
        return []
    gone = tree.layers[number]
    open_by_guest = tree.chain() if facts.is_running else []
    steps: list[s.Step] = []
    for child in tree.children(number):
        if facts.is_running and child == tree.active:
            steps.append(s.PullLayer(disk, child, domain, facts.target, gone.backing))
        else:
            steps.append(
                s.MergeLayer(disk, child, gone.backing, gone.backing_format, copy=child in open_by_guest)
            )
    return [*steps, s.DropLayer(disk, number)]


def tidy(request: SnapshotPlace, facts: Facts, known: tuple[int, ...], domain: str) -> list[s.Step]:
    """Plan what follows every change: remove leftovers of failed snapshots; `known`: OpenNebula's list."""
    if facts.image or not known:
        return []
    return [s.DropStrays(disk_ref(request.disk), tuple(sorted({*known, request.snapshot})), domain)]


def revert(request: SnapshotPlace, facts: Facts) -> list[s.Step]:
    """Plan snap_revert of a VM that is off: the snapshot's content replaces the active layer's."""
    _check(facts, request)
    disk, number, tree = disk_ref(request.disk), request.snapshot, facts.tree
    if facts.image:
        from ...model.store.image_steps import RevertImage

        if number not in facts.snapshots:
            raise MissingImage(f"snapshot {number} of disk {disk.disk} is not there")
        return [RevertImage(facts.image, number, session=facts.session)]
    if number not in tree.layers or number == tree.active:
        raise MissingImage(f"snapshot {number} of disk {disk.disk} is not there")
    over = tree.layers[number]
    return [s.AddLayer(disk, tree.active, number, over.format), s.ActivateLayer(disk, tree.active, "qcow2")]


def snap_create(asked: SnapshotPlace, vm: Vm, freeze: str) -> Plan:
    """Plan snap_create: keep the present content of a disk of a VM that is off."""
    return change("create", asked, vm, live=False, freeze=freeze)


def snap_create_live(asked: SnapshotPlace, vm: Vm, freeze: str) -> Plan:
    """Plan snap_create_live: keep the present content of a running guest's disk."""
    return change("create", asked, vm, live=True, freeze=freeze)


def snap_delete(asked: SnapshotPlace, vm: Vm, freeze: str) -> Plan:
    """Plan snap_delete: forget a snapshot; the guest may be running."""
    return change("delete", asked, vm, live=False, freeze=freeze)


def snap_revert(asked: SnapshotPlace, vm: Vm, freeze: str) -> Plan:
    """Plan snap_revert: go back to a snapshot, giving up the present content."""
    return change("revert", asked, vm, live=False, freeze=freeze)


def change(what: str, asked: SnapshotPlace, vm: Vm, *, live: bool, freeze: str) -> Plan:
    """Plan a change of a disk's snapshots, by a look at the disk; the guest is not asked unless `live`."""
    place, number = asked.disk, asked.disk.disk or 0
    domain = running_domain(vm) if live or vm.lcm_state == LcmState.DISK_SNAPSHOT_DELETE else ""
    if live and is_path(vm.disk(number).source):
        # Before the guest is asked. Ceph copies a disk on the network, below QEMU; QEMU copies a local one.
        placement.check_running(vm, [number], "snapshot")
    found = yield from ask(place.host, s.DescribeDisk(disk_ref(asked.disk), domain))
    if isinstance(found, s.OnStore):
        from ..image import disk_image
        from ..store import rbd

        guest = disk_freeze.Guest(domain, freeze) if live else disk_freeze.Guest()
        image = yield from disk_image.confirmed(vm, number, found.on_store)
        if found.readonly:
            raise NotSupported(f"{image.source} is attached read-only, it cannot have snapshots of a VM")
        yield from rbd.snapshot(what, place.host, disk_ref(asked.disk), image, asked.snapshot, vm, guest)
        return
    facts = Facts.parse(found)
    if what != "create":
        from ..under_way import still

        # The host sees by itself what comes after this.
        yield from still(vm)
    if what == "create":
        placement.check_snapshot(vm, number, facts.place.is_image, bool(domain))
        steps = create(asked, facts, domain, freeze)
    elif what == "delete":
        steps = delete(asked, facts, domain)
    else:
        # oned's SIZE of the disk does not go back with the snapshot.
        steps = [*revert(asked, facts), s.GrowDisk(disk_ref(asked.disk), vm.disk(number).size)]
    steps += tidy(asked, facts, vm.snapshots_of(number), domain)
    if steps:
        rested = yield On(place.host, tuple(steps))
        yield Say(disk_freeze.lines, tuple(rested))


def resize(asked: Resize, vm: Vm) -> Plan:
    """Plan resize: grow a disk; the hypervisor action that follows grows that of a running guest."""
    place, host, disk = asked.disk, asked.disk.host, disk_ref(asked.disk)
    if vm.disk(disk.disk).is_readonly:
        raise NotSupported(_readonly(disk))
    if vm.lcm_state == LcmState.DISK_RESIZE:
        yield On(host, (s.AllowGrowth(disk, asked.size),))
        return
    if vm.lcm_state == LcmState.DISK_RESIZE_UNDEPLOYED:
        # argv names the last host, the directory has moved to the front-end.
        host = yield from _machine_of(place, vm)
    found = yield from ask(host, s.GrowDisk(disk, asked.size))
    if found:
        from ..image import disk_image
        from ..store import rbd

        if found.readonly:
            raise NotSupported(_readonly(disk))
        yield from rbd.grow((yield from disk_image.confirmed(vm, disk.disk, found.on_store)), asked.size)
    elif placement.is_dense(vm.disk(disk.disk)):
        from ...model.device.steps import AllocateDisk

        yield On(host, (AllocateDisk(disk),))


def _readonly(disk: s.DiskRef) -> str:
    """Return why a read-only disk is not grown: oned checks USE of the VM, not of the image."""
    return f"disk {disk.disk} of VM {disk.vm} is read-only, and is not grown"


def _machine_of(place: DiskPlace, vm: Vm) -> Part[str]:
    """Return the machine that has the VM: the front-end, another one, or the disk's last host."""
    at = place.vm_place
    from ..vm import at_rest

    for host in ("localhost", place.host):
        found = yield from ask(host, s.LookAtVm(at.vm, at.path))
        # A front-end that led once may have kept what the VM was in an earlier stay.
        if found.present and not at_rest.is_older_stay(found.seq, vm):
            return host
    rests = yield from at_rest.elsewhere(at, vm)
    if not rests.machine:
        rests.refuse(at.vm, f"is neither on this front-end nor on {place.host}")
        raise MissingVm(f"VM {at.vm} is neither on the front-end nor on {place.host}")
    return rests.machine
