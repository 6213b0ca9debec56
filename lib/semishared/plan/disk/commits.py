# SPDX-License-Identifier: Apache-2.0
"""Diffs: overlays on hosts over persistent images, and the commits that write them into the images.

    ln              the image is claimed for the disk; an empty overlay over the base of its present content
    mvds            all is committed, the claim is given up, the disk goes (plan/disk/removals.py)
    on request      what is there now is frozen under a new layer, and committed; the guest runs on

                    base <- 0 <- (1)           0 is committed; () is written
                    base <- 0 <- 1 <- (2)      1 is to be: if that is refused, the next request commits it
                                               first, then freezes; so refusals do not add up to layers
                    base <- 1' <- (2)          1 was: it takes over what 0 holds

Until the commit the overlay is the only copy of what was written. So nothing here removes an uncommitted one:
`delete` has it kept (disk/retained_diffs.py), and a refused commit leaves the disk as it is.

oned knows nothing of a commit on request, and may begin any action with the VM. So the commit ends no other
action on the disks. It asks oned once it has its turn at them. An action that comes later ends the commit,
and the next commit repeats it.
"""

from __future__ import annotations

from ...errors import CommitRefused, NotSupported, VmBusy
from ...model import steps as s
from ...model.disk import commit_steps as c
from ...model.exchange import AskOned, On, Part, Plan, Say, ask
from ...opennebula.args import DiskPlace
from ...opennebula.xml import Image, Vm
from ..store import commit_turns
from . import disks, snapshots
from . import freeze as disk_freeze


def commit(place: DiskPlace, vm: Vm, domain: str, freeze: str, rate: int = 0) -> Part[int]:
    """Plan a commit on request; return how many bytes were committed.

    `domain`: libvirt's name of the guest, whether it runs or not; '' on a machine without domains. `rate`:
    bytes per second to the store, 0 for no limit.
    """
    host, disk = place.host, disks.disk_ref(place)
    runs = yield from _turn(host, disk, domain)
    yield from _still(vm)
    guest = disk_freeze.Guest(domain, freeze) if runs else disk_freeze.Guest()
    described = yield from ask(host, s.DescribeDisk(disk, guest.domain))
    facts = snapshots.Facts.parse(described)
    if not isinstance(described, s.DescribedDisk) or not facts.place.commits:
        raise NotSupported(
            f"disk {disk.disk} of VM {disk.vm} is {facts.place.name}: it has nothing to commit to an image"
        )
    if facts.system_snapshots:
        # Internal snapshots live inside the layer that would be frozen; libvirt looks for them in the active
        # one.
        raise NotSupported(
            f"VM {disk.vm} has {facts.system_snapshots} system snapshots: delete them before its "
            f"disks are committed"
        )
    waiting, active, done = set(map(int, described.uncommitted or ())), facts.tree.active, 0
    if waiting - {active}:
        done += yield from _committed(host, disk, facts.tree.layers[active].parent, guest.domain, rate)
    if active in waiting:
        yield from commit_turns.settled(host, c.CheckDiff(disk))
        yield from _frozen(host, disk, facts, guest)
        done += yield from _committed(host, disk, active, guest.domain, rate)
    return done


def kept(host: str, disk: s.DiskRef, image: int, rate: int = 0) -> Part[int]:
    """Plan to commit and remove a disk that was kept when its VM was deleted; return the bytes.

    `image`: the id of its image, which must still be persistent: disks of other VMs may lie over any other.
    `rate` as of `commit`.
    """
    known: Image = yield AskOned("image", image)
    if not known.is_persistent:
        raise CommitRefused(
            f"image {image} ({known.name}) is not persistent any more: disks of other VMs may lie over it"
        )
    yield from _turn(host, disk, "")
    done = yield from commit_turns.settled(host, c.FinishDisk(disk, rate=rate))
    return sum(answer.bytes for answer in done)


def _turn(host: str, disk: s.DiskRef, domain: str) -> Part[bool]:
    """Take the turn at a VM's disks, or be refused; return whether the guest runs."""
    return (yield from ask(host, c.TakeTurn(disk.vm, disk.vm_dir, domain))).runs


def _still(then: Vm) -> Plan:
    """Raise VmBusy unless oned has the VM in the same state as `then`."""
    now = yield AskOned("vm", then.id)
    states = [(vm.state, vm.lcm_state, vm.seq) for vm in (then, now)]
    if states[0] != states[1]:
        before, after = (f"state {state}, LCM state {lcm}, SEQ {seq}" for state, lcm, seq in states)
        raise VmBusy(
            f"OpenNebula has begun something with VM {then.id}: it was in {before}, and is in {after}"
        )


def _frozen(host: str, disk: s.DiskRef, facts: snapshots.Facts, guest: disk_freeze.Guest) -> Plan:
    """Put an empty layer over what the disk holds now."""
    top, new = facts.tree.active, facts.tree.active + 1
    add = s.AddLayer(disk, new, top, facts.tree.layers[top].format)
    if guest.domain:
        rested = yield On(
            host, (add, s.SwitchLayer(disk, top, new, guest.domain, facts.target, guest.freeze))
        )
        yield Say(disk_freeze.lines, tuple(rested))
    else:
        yield On(host, (add, s.ActivateLayer(disk, new, "qcow2")))


def _committed(host: str, disk: s.DiskRef, top: int, domain: str, rate: int) -> Part[int]:
    """Commit the frozen layers up to `top`, and merge them into that: so chains do not grow.

    Return how many bytes were committed.
    """
    done = yield from commit_turns.settled(host, c.CommitDisk(disk, top, rate))
    described = yield from ask(host, s.DescribeDisk(disk, domain))
    tree = snapshots.Facts.parse(described).tree
    below = tree.chain()[tree.chain().index(top) + 1 :]
    # Also layers over which no other one lies: the commit that merged them was killed.
    gone = tuple(
        s.DropLayer(disk, number)
        for number in sorted(tree.layers, reverse=True)
        if number < tree.active and number != top
    )
    if below:
        lowest = tree.layers[below[-1]]
        yield On(
            host, (s.MergeLayer(disk, top, lowest.backing, lowest.backing_format, copy=bool(domain)), *gone)
        )
    elif gone:
        yield On(host, gone)
    return sum(answer.bytes for answer in done)
