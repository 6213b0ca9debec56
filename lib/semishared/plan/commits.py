# SPDX-License-Identifier: Apache-2.0
"""Diffs: a persistent image whose place is local. Its guest writes to an overlay on the host; a commit brings that to the image.

    ln              the image is claimed for the disk; an empty overlay over the base of its present content
    mvds            all is committed, the claim is given up, the disk goes
    on request      what is there now is frozen under a new layer, and committed; the guest runs on

                    base <- 0 <- (1)      0 is committed; () is written
                    base <- 1' <- (2)     then 1: it takes over what 0 holds

Until the commit the overlay is the only copy of what was written. So nothing here removes one that is not committed: `delete` has
it kept (disk/kept.py), and a commit that cannot be is refused, and leaves the disk as it is.
"""

from __future__ import annotations

from typing import Any, Iterable

from ..errors import NotSupported
from ..model import layout
from ..model import steps as s
from ..model import steps_commit as c
from ..model.exchange import On, Part, Plan, Say
from ..model.owner import Owner
from ..opennebula.args import DiskPlace, FromImage
from ..units import human
from . import disks, resting, snapshots

Lines = Iterable["tuple[str, str]"]


def attach(asked: FromImage, image: s.ImageRef, bridge: str, min_size: int, options: str) -> Plan:
    """Plan ln of a persistent image whose place is local."""
    if bridge:
        raise NotSupported(
            f"SEMISHARED_PLACE = local of image {image.id}: it is persistent and on Ceph, and commits to Ceph are not done yet; "
            "without the attribute it is attached in place"
        )
    target, host = disks.disk_ref(asked.target), asked.target.host
    root = layout.base_store(asked.target.vm_place.datastore_location)
    prepare = s.PrepareVm(target.vm, target.vm_dir)
    found = yield On(host, (s.StageBase(root, image), prepare, c.CreateDiff(target, image, min_size, options)))
    yield Say(_made, (target, *found))


def _made(target: s.DiskRef, *answers: Any) -> Lines:
    made = answers[-1] or {}
    before, own = Owner.from_data(made.get("before")), (target.vm, target.disk)
    if before and (before.vm, before.disk) != own:
        yield "warn", (
            f"the image waited for disk {before.disk} of VM {before.vm} on {before.host}: what that has not committed can only be made "
            f"another image now (semishared commit {before.vm} {before.disk} --as-new-image NAME)"
        )
    yield from _kept(target.vm, made)


def finished(vm: int, answers: Iterable[Any]) -> Lines:
    """Return what the log says of disks that were taken away, with what they held or without."""
    for answer in answers:
        if answer and answer.get("bytes"):
            yield "info", f"{human(answer['bytes'])} were committed to the image"
        yield from _kept(vm, answer)


def _kept(vm: int, answer: Any) -> Lines:
    """Return what the log says of diffs that were not removed."""
    found = (answer or {}).get("kept") or []
    for place in [found] if isinstance(found, str) else found:
        yield "warn", f"what was not committed is kept in {place}: semishared commit {vm} brings it to its image"


def commit(place: DiskPlace, domain: str, freeze: str) -> Part["dict[str, Any]"]:
    """Plan a commit on request: of a running guest if `domain` names one. Return what the host says of it."""
    host, disk = place.host, disks.disk_ref(place)
    (described,) = yield On(host, (s.DescribeDisk(disk, domain),))
    facts = snapshots.Facts.parse(described)
    if not facts.place.commits:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is {facts.place.name}: it has nothing to commit to an image")
    top = facts.tree.active
    yield from _frozen(host, disk, facts, domain, freeze)
    (done,) = yield On(host, (c.CommitDisk(disk, top),))
    yield from _merged(host, disk, top, domain)
    return dict(done)


def _frozen(host: str, disk: s.DiskRef, facts: snapshots.Facts, domain: str, freeze: str) -> Plan:
    """Put an empty layer over what the disk holds now."""
    top, new = facts.tree.active, facts.tree.active + 1
    add = s.AddLayer(disk, new, top, facts.tree.layers[top].format)
    if domain:
        rested = yield On(host, (add, s.SwitchLayer(disk, top, new, domain, facts.target, freeze)))
        yield Say(resting.lines, tuple(rested))
    else:
        yield On(host, (add, s.ActivateLayer(disk, new, "qcow2")))


def _merged(host: str, disk: s.DiskRef, top: int, domain: str) -> Plan:
    """Let the committed layer take over what those below it hold: a chain does not grow with every commit."""
    (described,) = yield On(host, (s.DescribeDisk(disk, domain),))
    tree = snapshots.Facts.parse(described).tree
    for number in sorted(set(tree.chain()) - {tree.active, top}):
        below = tree.layers[number]
        (over,) = tree.children(number)
        yield On(host, (s.MergeLayer(disk, over, below.backing, below.backing_format, copy=bool(domain)), s.DropLayer(disk, number)))
