# SPDX-License-Identifier: Apache-2.0
"""The transfer actions: what was asked, what oned knows, the plan, and the hosts that carry it out (docs/explanation/contract.md)."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Dict, Iterable, Iterator

from ..config import Config, load
from ..errors import BadArguments, NotSupported
from ..model import steps as s
from ..model import stores
from ..opennebula import args
from ..opennebula.report import Report
from ..plan import disks
from . import migration, snapshots
from .vm_location import everywhere, source_of_copy

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore, Disk, Image
    from ..wire.session import Session

Answer = Callable[[Dict[str, object]], object]
"""What is said to a host that asks."""


class Action:
    """One transfer action under way."""

    def __init__(self, name: str, argv: list[str], report: Report) -> None:
        self.name = name
        self.argv = argv
        self.report = report
        self.config: Config = load()
        self.seq = -1
        """SEQ of the VM's last history record, -1 if it is not known: every plan carries it (disk/epochs.py)."""

    def session(self, host: str, *, bulk: bool = False) -> Session:
        """Return a conversation with a host."""
        from ..wire.session import Session

        session = Session(host, self.name, self.config, bulk=bulk)
        session.seq = self.seq
        return session

    def on(self, host: str, steps: Iterable[s.Step], answer: Answer | None = None) -> list[object]:
        """Carry out `steps` on `host` and return what each found out; with `answer`, it may ask."""
        with self.session(host) as session:
            results = session.run(steps, answer=answer)
            self.tell(host, session.moved)
        return results

    def tell(self, host: str, moved: dict[str, int]) -> None:
        """Log the bytes that were moved."""
        if moved:
            amounts = ", ".join(f"{name} {size}" for name, size in sorted(moved.items()))
            self.report.info(f"bytes on {host}: {amounts}")


def _facts(action: Action, request: args.FromImage) -> tuple[Disk, Image, Datastore]:
    from ..opennebula.oned import Oned

    oned = Oned()
    vm = oned.vm(request.target.vm_place.vm)
    action.seq = vm.seq
    disk = vm.disk(request.target.disk or 0)
    return disk, oned.image(disk.image_id), _marked(action, oned.datastore(disk.store_id))


def _marked(action: Action, datastore: Datastore) -> Datastore:
    """Return the datastore; say it if nobody could tell its store from the place where that is to be mounted."""
    access = stores.access(datastore)
    if access.can.is_mounted and not access.marker:
        action.report.warn(stores.unmarked(datastore))
    return datastore


def clone(action: Action) -> None:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - give a VM its own disk from an image."""
    request = args.FromImage.parse(action.argv)
    if request.target.disk is None:
        from ..opennebula.oned import Oned

        action.on(request.target.host, disks.copy_kernel(request, _marked(action, Oned().datastore(request.store))))
        return
    disk, image, datastore = _facts(action, request)
    if not stores.access(datastore).can.is_mounted:
        from . import rbd

        with _answering(action, request.target) as answer:
            rbd.clone(action, request, disk, image, datastore, answer)
        return
    steps = disks.clone(request, disk, image, datastore, action.config.overlays_options)
    with _answering(action, request.target) as answer:
        action.on(request.target.host, steps, answer)


@contextmanager
def _answering(action: Action, target: args.DiskPlace) -> Iterator[Answer]:
    """Yield what answers a host that lacks the base. Only then is loaded what knows about staging: most clones are warm."""
    root, asked = f"{target.vm_place.datastore_location}/.semishared", []

    def answer(question: dict[str, object]) -> object:
        from . import base_tracker

        asked.append(str(question.get("name")))
        return base_tracker.answer(root, question, target.host, action.config)

    has_it = False
    try:
        yield answer
        has_it = True
    finally:
        if asked:
            from . import base_tracker

            base_tracker.leave(root, asked[0], {target.host: has_it})


def ln(action: Action) -> None:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - attach an image in place."""
    request = args.FromImage.parse(action.argv)
    disk, image, datastore = _facts(action, request)
    if not stores.access(datastore).can.is_mounted:
        from . import rbd

        rbd.ln(action, request, disk, image, datastore)
        return
    action.on(request.target.host, disks.ln(request, disk, image, datastore))


def mkimage(action: Action) -> None:
    """SIZE_MIB FORMAT HOST:VMDIR/disk.N VM DATASTORE - make an empty disk."""
    from ..opennebula.oned import Oned

    request = args.NewDisk.parse(action.argv)
    vm = Oned().vm(request.target.vm_place.vm)
    action.seq = vm.seq
    disk = vm.disk(request.target.disk or 0)
    action.on(request.target.host, disks.mkimage(request, disk))


def mkswap(action: Action) -> None:
    """SIZE_MIB HOST:VMDIR/disk.N VM DATASTORE - make a swap area."""
    request = args.NewDisk.parse_swap(action.argv)
    action.on(request.target.host, disks.mkswap(request))


def context(action: Action) -> None:
    """context.sh [FILE[:NAME] ...] HOST:VMDIR/disk.N VM DATASTORE - build the CONTEXT ISO and bring it to the host."""
    import hashlib

    from ..tools import context_iso

    request = args.Context.parse(action.argv)
    place = request.target
    with context_iso.built(request.files) as path:
        with open(path, "rb") as file:
            data = file.read()
        digest = hashlib.sha256(data).hexdigest()
        steps = [
            s.PrepareVm(place.vm_place.vm, place.vm_place.path),
            s.ReceiveFile(place.path, place.vm_place.vm, len(data), digest),
        ]
        with action.session(place.host) as session:
            chunks = (data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20))
            session.run(steps, chunks, digest)


def mvds(action: Action) -> None:
    """HOST:VMDIR/disk.N SOURCE VM DATASTORE - end the session of an in-place disk."""
    request = args.ToImage.parse(action.argv)
    everywhere(action, request.disk.vm_place, disks.mvds(request))


def cpds(action: Action) -> None:
    """HOST:VMDIR/disk.N SOURCE SNAPSHOT|-1 VM DATASTORE - save a disk as another image."""
    from ..opennebula.oned import Oned

    request = args.ToImage.parse_copy(action.argv)
    oned = Oned()
    vm = oned.vm(request.disk.vm_place.vm)
    action.seq = vm.seq
    host = source_of_copy(request.disk.vm_place, vm.host) if vm.lcm_state in disks.SAVEAS_AWAY else request.disk.host
    if not request.image.startswith("/"):
        from . import rbd

        rbd.cpds(action, request, vm, host, oned.datastore(request.store))
        return
    steps = disks.cpds(request, vm, _marked(action, oned.datastore(request.store)), action.config.freeze)
    snapshots.tell_rest(action, action.on(host, steps))


def delete(action: Action) -> None:
    """HOST:VMDIR[/disk.N] VM DATASTORE - remove a disk or a VM directory."""
    request = args.Delete.parse(action.argv)
    steps = disks.delete(request)
    if not steps:
        return
    action.seq = _seq(request.vm_place.vm)
    found = everywhere(action, request.vm_place, steps)
    if any(found):
        from . import rbd

        rbd.delete(action, request, found)


def _seq(vm: int) -> int:
    """Return the SEQ of a VM that oned may not know any more, or of an oned that does not answer: -1 then."""
    from ..errors import OnedUnavailable
    from ..opennebula.oned import Oned

    try:
        return Oned().vm(vm).seq
    except OnedUnavailable:
        return -1


def mv(action: Action) -> None:
    """HOST:VMDIR[/disk.N] HOST:VMDIR[/disk.N] VM DATASTORE - move a VM directory; its disks travel with it."""
    request = args.Move.parse(action.argv)
    if not request.disk:
        from . import move

        move.move(action, request)


def prebackup(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a VM that is off for a backup driver."""
    from . import backup

    backup.before(action, live=False)


def prebackup_live(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a running VM, as of one moment."""
    from . import backup

    backup.before(action, live=True)


def postbackup(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - remove what prebackup left."""
    from . import backup

    backup.after(action, live=False)


def postbackup_live(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - end what prebackup_live began and remove what it left."""
    from . import backup

    backup.after(action, live=True)


def restore(action: Action) -> None:
    """HOST:VMDIR VM IMAGE INCREMENT DISK - replace the disks of a VM by those of a backup."""
    from . import backup

    backup.restore(action)


def monitor(action: Action) -> None:
    """DATASTORE - only asked for a system datastore with SHARED=YES, which cannot be ours."""
    raise NotSupported("a system datastore of semishared must have SHARED=NO: its disks are local to each host")


def monitor_ds(action: Action) -> None:
    """DIRECTORY - print the disk sizes of all VMs of a system datastore (runs on the host)."""
    from ..host import vm_sizes

    if len(action.argv) != 1:
        raise BadArguments("one directory is wanted")
    sys.stdout.write(vm_sizes.report(args.absolute(action.argv[0], "datastore directory")))


ACTIONS = {
    function.__name__: function
    for function in (
        clone, ln, mkimage, mkswap, context, mvds, cpds, delete, mv, monitor, monitor_ds,
        migration.premigrate, migration.postmigrate, migration.failmigrate,
        snapshots.snap_create, snapshots.snap_create_live, snapshots.snap_delete, snapshots.snap_revert, snapshots.resize,
        prebackup, prebackup_live, postbackup, postbackup_live, restore,
    )
}  # fmt: skip


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a transfer action; nothing goes to stdout but what monitor_ds prints."""
    ACTIONS[action](Action(action, argv, report))
    return ""
