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

from typing import Any

from ..errors import NotSupported
from ..model import steps as s
from ..model import steps_commit as c
from ..model.exchange import On, Part, Plan, Say
from ..opennebula.args import DiskPlace
from . import disks, resting, snapshots


def commit(place: DiskPlace, domain: str, freeze: str, rate: int = 0) -> Part["dict[str, Any]"]:
    """Plan a commit on request: of a running guest if `domain` names one. Return what the host says of it.

    `rate`: bytes per second that go to the store, 0 for no limit.
    """
    host, disk = place.host, disks.disk_ref(place)
    (described,) = yield On(host, (s.DescribeDisk(disk, domain),))
    facts = snapshots.Facts.parse(described)
    if not facts.place.commits:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is {facts.place.name}: it has nothing to commit to an image")
    if not described["waiting"]:
        return {"bytes": 0}
    top = facts.tree.active
    yield from _frozen(host, disk, facts, domain, freeze)
    (done,) = yield On(host, (c.CommitDisk(disk, top, rate),))
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
