# SPDX-License-Identifier: Apache-2.0
"""Parts of plans for disks whose image is reached over the network: host and bridge take turns.

             host                                   bridge
ln                                                  no client writes to it? its generations end
             record
clone, shared
             record (so that delete knows)
                                                    clone of the frozen image
             still wanted? else it is removed again
clone, remote-first
                                                    a snapshot that is there as long as the image is in use
             overlay over that
clone, local
             is the content frozen, and which?
                                                    frozen, if it is not
             base, straight from RBD
                                                    generation named, if it was not
             overlay or copy
cpds of a disk on the network
             record read; guest rests
                                                    its moment held
                                                    copied
cpds of a local disk
             record read
                                                    empty image staged
             filled
                                                    published
delete of a clone
             deletion noted
                                                    clone removed
             record removed
snapshots, resize
             record read; turn taken
                                                    done there
restore
                                                    hidden and emptied
             filled
                                                    shown again
"""

from __future__ import annotations

from typing import Sequence

from ...errors import BadRecord, ForeignImage, SemisharedError, VmGone
from ...model import steps as s
from ...model.disk.network_disk import NetworkDisk
from ...model.disk.place import IN_PLACE, STORE_CLONE
from ...model.disk.record import Record, described
from ...model.exchange import AskOned, Download, Feed, Lines, On, Part, Plan, Say, agree, ask
from ...model.store import image_steps as i
from ...model.store import rbd_names, template
from ...named import NamedTuple
from ...opennebula.xml import Vm
from ..disk import freeze
from ..image import images
from ..under_way import still


def bridge_of(image: s.ImageRef) -> Part[str]:
    """Return the bridge of a recorded image's datastore."""
    datastore = yield AskOned("datastore", image.store)
    return (yield from images.machine(datastore, image.id))


def clone(host: str, bridge: str, image: s.ImageRef, disk: s.DiskRef, min_size: int) -> Plan:
    """Make a disk that is a copy-on-write clone beside its image; the record comes first, for delete."""
    # As OpenNebula's own driver names it.
    made = image._replace(source=rbd_names.clone(image.source, disk.vm, disk.disk))
    network = NetworkDisk.of(made.source, image.access)
    yield agree(bridge)
    yield On(
        host,
        (
            s.PrepareVm(disk.vm, disk.vm_dir),
            i.RecordNetwork(disk, image, network, STORE_CLONE.name, readonly=False),
        ),
    )
    done = yield from ask(bridge, i.CloneStored(image, made.source, min_size))
    try:
        yield On(host, (i.ConfirmDisk(disk),))
    except VmGone:
        # Meanwhile the name may be the clone's of a VM that was made anew.
        yield On(bridge, (i.TakeBackClone(made, done.made),))
        raise


def remote(host: str, bridge: str, image: s.ImageRef, create: s.CreateRemote) -> Plan:
    """Make a disk on the host over a snapshot of the image, which is read only as its guest reads."""
    NetworkDisk.below(image.source, "", image.access)
    yield agree(host)
    lent = yield from ask(bridge, i.LendContent(image))
    over = create._replace(image=image._replace(generation=lent.generation), snapshot=lent.snapshot)
    yield On(host, (s.PrepareVm(create.disk.vm, create.disk.vm_dir), over))


def frozen(host: str, bridge: str, image: s.ImageRef, root: str) -> Part[s.ImageRef]:
    """Have the image's content frozen; return the image with its generation.

    A content without a hash is staged in the base store `root`, if given, to be hashed; else the generation
    stays ''.
    """
    seen = yield from ask(host, i.SeeImage(image))
    if not seen.frozen:
        yield On(bridge, (i.FreezeImage(image),))
    generation = seen.generation
    if not generation and root:
        staged = yield from ask(host, s.StageBase(root, image))
        generation = staged.generation
        if staged.snapshot >= 0:
            yield On(bridge, (i.NameGeneration(image, staged.snapshot, generation),))
    return image._replace(generation=generation)


def ln(
    host: str, bridge: str, image: s.ImageRef, disk: s.DiskRef, *, readonly: bool, shareable: bool
) -> Plan:
    """Attach an image in place."""
    network = NetworkDisk.of(image.source, image.access)
    yield agree(host)
    begun = yield from ask(bridge, i.BeginSession(image, readonly, shareable))
    yield Say(_open_by, (image.source, begun))
    yield On(
        host,
        (s.PrepareVm(disk.vm, disk.vm_dir), i.RecordNetwork(disk, image, network, IN_PLACE.name, readonly)),
    )


def _open_by(source: str, begun: i.BegunSession) -> Lines:
    return who_has_it_open(source, begun.open_by)


def who_has_it_open(source: str, clients: Sequence[str] | None) -> Lines:
    """Warn of the clients that have an image open, as far as the cluster shows them."""
    if clients:
        yield (
            "warn",
            f"{source} is open by {', '.join(clients)}; without its exclusive lock nobody sees who writes",
        )


def record_of(host: str, disk: s.DiskRef) -> Part[Record]:
    """Return the record of a disk on its host."""
    found = yield from ask(host, s.DescribeVm(disk.vm, disk.vm_dir))
    for record in described(found):
        if record.disk == disk.disk:
            return record
    raise BadRecord(f"disk {disk.disk} of VM {disk.vm} has no record on {host}")


def copy(
    host: str,
    bridge: str,
    source: str,
    target: s.ImageRef,
    disk: s.DiskRef,
    snapshot: int,
    guest: freeze.Guest,
) -> Plan:
    """Save the disk `source` on the network as the image `target`; a running guest rests for its moment."""
    if guest.domain:
        yield from freeze.meanwhile(
            host, disk, guest, On(bridge, (i.HoldMoment(target._replace(source=source)),))
        )
        yield On(bridge, (i.CopyHeld(target, source),))
    else:
        yield On(bridge, (i.CopyStored(target, source, snapshot),))


class Local(NamedTuple):
    """A disk on a host, and the facts for writing its content."""

    host: str
    disk: s.DiskRef
    size: int
    access: s.Access


def fill(local: Local, bridge: str, target: s.ImageRef, snapshot: int, guest: freeze.Guest) -> Plan:
    """Save a local disk as the image `target`, which the bridge makes and the disk's host fills."""
    name = yield from ask(bridge, i.StageImage(target, local.size))
    staged = target._replace(source=_unpublished(target, name), access=local.access)
    try:
        found = yield On(local.host, (i.FillImage(local.disk, staged, guest.domain, snapshot, guest.freeze),))
        yield Say(freeze.lines, tuple(found))
    except SemisharedError:
        yield On(bridge, (i.RemoveImage(staged),))
        raise
    yield On(bridge, (i.PublishImage(target, staged.source),))


def _unpublished(image: s.ImageRef, said: str) -> str:
    """Return an image's name until it is published, as its bridge has `said`; raise ForeignImage."""
    pool, _, name = said.rpartition("/")
    of = image.source.rpartition("/")[2]
    if pool != image.root or not (rbd_names.is_staged(name, of) or name == rbd_names.changing(of)):
        raise ForeignImage(f"the bridge of {image.source} says that this is written as {said!r}")
    return said


def fill_beside(local: Local, image: s.ImageRef, bridge: str, random: str) -> Part[str]:
    """Save a local disk beside its image, as one unknown to oned; return its SOURCE."""
    source = f"{image.root}/{rbd_names.rescued(rbd_names.image(image.id), random)}"
    yield from fill(local, bridge, image._replace(source=source, generation=""), -1, freeze.Guest())
    return source


def remove_clone(image: s.ImageRef) -> Plan:
    """Remove the clone that a disk turned out to be."""
    datastore = yield AskOned("datastore", image.store)
    removed = i.RemoveImage(image, template.is_trashed(datastore))
    yield On((yield from images.machine(datastore, image.id)), (removed,))


def snapshot(
    what: str, host: str, disk: s.DiskRef, image: s.ImageRef, number: int, vm: Vm, guest: freeze.Guest
) -> Plan:
    """Create, delete or revert snapshot `number` of a disk that is `image`, on the network; `guest` rests.

    oned's SIZE of the disk in `vm` does not go back with the snapshot.
    """
    bridge = yield from bridge_of(image)
    session = ""
    if what != "create":
        session = yield from ask(bridge, i.SeeSession(image))
        yield from still(vm)
    steps = {
        "create": i.KeepSnapshot(image, number),
        "delete": i.ForgetSnapshot(image, number, session),
        "revert": i.RevertImage(image, number, vm.disk(disk.disk).size, session),
    }
    done = On(bridge, (steps[what],))
    if guest.domain:
        yield from freeze.meanwhile(host, disk, guest, done)
    else:
        yield done


def grow(image: s.ImageRef, size: int) -> Plan:
    """Grow a disk that turned out to be on the network."""
    bridge = yield from bridge_of(image)
    yield On(bridge, (i.GrowImage(image, size),))


def restore(host: str, disk: s.DiskRef, image: s.ImageRef, size: int, source: Download) -> Plan:
    """Replace the content of a disk that is `image`, on the network, by a backup's: all of it or nothing."""
    bridge = yield from bridge_of(image)
    begun = yield from ask(bridge, i.BeginChange(image, size))
    try:
        unseen = image._replace(source=_unpublished(image, begun.hidden))
        yield Feed(On(host, (i.RestoreImage(disk, unseen),)), source)
    except SemisharedError:
        yield On(bridge, (i.EndChange(image, False, begun.change),))
        raise
    yield On(bridge, (i.EndChange(image, True, begun.change),))
