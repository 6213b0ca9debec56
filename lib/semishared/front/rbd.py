# SPDX-License-Identifier: Apache-2.0
"""The transfer actions for disks whose image is reached over the network: host and bridge take turns (plan/rbd.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable

from ..errors import BadRecord, NotSupported, SemisharedError
from ..model import steps as s
from ..model import steps_image, stores
from ..opennebula import args
from ..plan import disks, encryption, images, rbd
from .snapshots import tell_rest

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore, Vm
    from ..wire.session import Session
    from .action import Action


class Bridge:
    """The machine that changes images of a datastore."""

    def __init__(self, action: Action, datastore: Datastore, number: int) -> None:
        self._action = action
        self.host = stores.bridge(datastore, number)

    @classmethod
    def of(cls, action: Action, image: s.ImageRef) -> Bridge:
        """Return the bridge of the datastore that an image on record is of."""
        from ..opennebula.oned import Oned

        return cls(action, Oned().datastore(image.store), image.id)

    def as_seen_from(self, host: str, access: s.Access) -> s.Access:
        """Return how `host` reaches the store: the bridge has the bridge's key alone, also for what hosts do otherwise."""
        from ..wire.session import is_here

        if host == self.host or (is_here(host) and is_here(self.host)):
            return access._replace(user=access.bridge_user, reader=access.bridge_user)
        return access

    def run(self, steps: Iterable[s.Step]) -> list[Any]:
        """Carry out steps there."""
        return self._action.on(self.host, steps)


def delete(action: Action, request: args.Delete, found: Iterable[object]) -> None:
    """Remove the clone that a disk turned out to be, then its record."""
    from .vm_location import everywhere

    for result in found:
        image = on_store(result)
        if image and request.disk is not None:
            Bridge.of(action, image).run([steps_image.RemoveClone(image)])
            everywhere(action, request.vm_place, [steps_image.ForgetDisk(disks.disk_ref(request.disk))])


def on_store(result: object) -> s.ImageRef | None:
    """Return which image on the network a disk is, if that is what a host says of it."""
    return s.ImageRef.from_data(result["on_store"]) if isinstance(result, dict) and "on_store" in result else None


def cpds(action: Action, request: args.ToImage, vm: Vm, host: str, datastore: Datastore) -> None:
    """Save a disk as another image."""
    access = stores.access(datastore)
    target = images.ref_at(request.store, access, vm.id, request.image, "image")
    disk = disks.disk_ref(request.disk)
    bridge = Bridge(action, datastore, vm.id)
    running = vm.lcm_state == disks.SAVEAS_LIVE and request.snapshot == -1
    with action.session(host) as session:
        record = _record(session, disk)
        if "network" in record:
            source = str(record["network"]["name"])
            if running:
                hold = [steps_image.HoldMoment(target, source)]
                _while_resting(action, session, disk, disks.running_domain(vm), lambda: bridge.run(hold))
            bridge.run([steps_image.CopyStored(target, source, request.snapshot, running)])
            return
        if running:
            # An image on the network is copied by Ceph, which knows no secret; a file of a running guest by QEMU.
            encryption.check_running(vm, [disk.disk], "copy")
        (staged,) = bridge.run([steps_image.StageImage(target, vm.disk(disk.disk).size)])
        filled = target._replace(source=staged["staged"], access=bridge.as_seen_from(host, access))
        try:
            domain, freeze = (disks.running_domain(vm), action.config.freeze) if running else ("", "NONE")
            tell_rest(action, session.run([steps_image.FillImage(disk, filled, domain, request.snapshot, freeze)]))
        except SemisharedError:
            bridge.run([steps_image.RemoveImage(filled)])
            raise
        bridge.run([steps_image.PublishImage(target, filled.source)])
        action.tell(host, session.moved)


def _record(session: Session, disk: s.DiskRef) -> dict[str, Any]:
    (found,) = session.run([s.DescribeVm(disk.vm, disk.vm_dir)])
    records = found["records"] if isinstance(found, dict) else []
    for record in records:
        if record["disk"] == disk.disk:
            return dict(record)
    raise BadRecord(f"disk {disk.disk} of VM {disk.vm} has no record on {session.host}")


def change(action: Action, session: Session, what: str, request: args.SnapshotPlace, found: dict[str, Any], domain: str) -> None:
    """Create, delete or revert a snapshot of a disk that turned out to be on the network; `domain`: the guest that rests for it."""
    image = s.ImageRef.from_data(found["on_store"])
    bridge, steps = Bridge.of(action, image), rbd.snapshot(what, image, request.snapshot, bool(found["readonly"]))
    if domain:
        _while_resting(action, session, disks.disk_ref(request.disk), domain, lambda: bridge.run(steps))
    else:
        bridge.run(steps)


def _while_resting(action: Action, session: Session, disk: s.DiskRef, domain: str, do: Callable[[], object]) -> None:
    """Have `do` done while a guest rests; its host wakes it also if that fails, or if we die."""

    def answer(_: dict[str, object]) -> object:
        do()
        return {}

    if action.config.freeze == "NONE":
        do()
    else:
        tell_rest(action, session.run([s.RestGuest(disk.vm, disk.vm_dir, domain, action.config.freeze)], answer=answer))


def grow(action: Action, image: s.ImageRef, size: int) -> None:
    """Grow a disk that turned out to be on the network."""
    Bridge.of(action, image).run([steps_image.GrowImage(image, size)])


def restore(action: Action, disk: s.DiskRef, record: dict[str, Any], size: int, bring: Callable[[s.Step], None]) -> None:
    """Replace the content of a disk on the network; `bring` lets the host carry out a step that a backup follows."""
    if record["readonly"]:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only and cannot be restored")
    image = s.ImageRef.from_data(record["image"])._replace(source=str(record["network"]["name"]))
    bridge = Bridge.of(action, image)
    (begun,) = bridge.run([steps_image.BeginChange(image, size)])
    try:
        bring(steps_image.RestoreImage(disk, image._replace(source=begun["hidden"])))
    except SemisharedError:
        bridge.run([steps_image.EndChange(image, whole=False)])
        raise
    bridge.run([steps_image.EndChange(image, whole=True)])
