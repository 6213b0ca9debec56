# SPDX-License-Identifier: Apache-2.0
"""Plans in which a host claims images on Ceph and commits: what its user may not do, the bridge does.

                 host                                   bridge
    ln                                                  no client writes to the image? what a killed
                                                        commit has begun is undone
                 is the content frozen, and which?
                                                        frozen, if it is not
                 base, straight from RBD
                                                        generation named, if it was not
                 claimed; an empty overlay over the base
    commits      was the commit before settled?
                                                        undone or made known, if it was not
                 written, recorded
                                                        made known by a snapshot
                 the rest: claim given up, disk removed

A host says that it can go on only after the bridge has (disk/commits.py): its answer has `settle`, the image.
Then it is asked the same again. Of a mounted store no answer has that, and all of this is one message.

And the lines that the log says of commits.
"""

from __future__ import annotations

from typing import Any, Sequence, Union

from ...errors import CommitRefused
from ...model import steps as s
from ...model.disk import commit_steps as c
from ...model.exchange import AskOned, Lines, On, Part, Plan, Say, T, agree, ask
from ...model.refs import Owner
from ...units import human

TURNS = 4
"""Undone; written; made known; and one more, for another commit in between."""


def claimable(host: str, bridge: str, image: s.ImageRef, root: str) -> Part[s.ImageRef]:
    """Stage the base of an image that no client writes to on a host; return the image with its generation."""
    from ...model.store import image_steps as i
    from . import rbd

    yield agree(host)
    open_by = yield from ask(bridge, i.CheckWriters(image))
    yield Say(rbd.who_has_it_open, (image.source, open_by))
    return (yield from rbd.frozen(host, bridge, image, root))


def settled(host: str, step: s.Step[T]) -> Part[list[T]]:
    """Have a committing step carried out, as often as an image must be settled for it; return all answers."""
    found: list[T] = []
    for _ in range(TURNS):
        answer = yield from ask(host, step)
        found.append(answer)
        images = yield from _due(step, answer)
        if not images:
            return found
        for image in images:
            yield from _settle(image)
    raise CommitRefused(f"{images[0].source} is committed to, or changed, by somebody else again and again")


def _due(step: Any, answer: Any) -> Part[list[s.ImageRef]]:
    """Return the images to settle for the disk or disks of a step: those that oned has for them."""
    disks = answer.disks if isinstance(answer, c.RenewedVm) else [answer]
    said = [(getattr(disk, "disk", -1), getattr(disk, "settle", None)) for disk in disks]
    said = [(number, image) for number, image in said if image is not None]
    if not said:
        return []
    from ..image import disk_image

    own = getattr(step, "disk", None)
    vm, found = (yield AskOned("vm", own.vm if own else step.vm)), []
    for number, image in said:
        found.append((yield from disk_image.confirmed(vm, own.disk if own else number, image)))
    return list(dict.fromkeys(found))


def _settle(image: s.ImageRef) -> Plan:
    from ...model.store import image_steps as i
    from . import rbd

    bridge = yield from rbd.bridge_of(image)
    yield On(bridge, (i.SettleImage(image),))


# Log lines about disks whose changes belong into an image (plan/disk/commits.py).


def made(vm: int, disk: int, found: c.MadeDiff) -> Lines:
    """Name the disk whose changes the image waits for no more, now that a disk has claimed it."""
    before = found.before
    if before and (before.vm, before.disk) != (vm, disk):
        yield (
            "warn",
            (
                f"the image waited for disk {before.disk} of VM {before.vm} on {before.host}: "
                f"what that has not committed can only become "
                f"another image now (semishared commit {before.vm} {before.disk} --as-new-image NAME)"
            ),
        )
    yield from _kept(vm, found.kept)


def left_behind(vm: int, disk: int, before: Owner) -> Lines:
    """Name the changes that an image waited for before its VM was made anew."""
    yield (
        "warn",
        f"the image waited for this disk as it was before the VM was made anew, on "
        f"{before.host}: what that has not committed can only "
        f"become another image now (semishared commit {vm} {disk} --as-new-image NAME; if "
        f"that host was away, after semishared gc)",
    )


def finished(vm: int, *answers: Any) -> Lines:
    """Name the committed and the kept changes of removed disks."""
    for answer in answers:
        if isinstance(answer, c.CommittedDisk) and answer.bytes:
            yield "info", f"{human(answer.bytes)} were committed to the image"
        yield from _kept(vm, answer.kept)


def renewed(*answers: c.RenewedVm) -> Lines:
    """Name the changes of a VM that were committed before its move, and those that go with it."""
    for disk in (disk for answer in answers for disk in answer.disks):
        if disk.bytes:
            yield "info", f"{human(disk.bytes)} of disk {disk.disk} were committed to the image"
    # A disk that was asked for twice was refused twice.
    for disk in answers[-1].disks if answers else ():
        if isinstance(disk, c.UncommittedDisk):
            how = "was not committed to its image, and goes" if disk.waiting else "goes"
            base = ", its base with it" if disk.with_base else ""
            yield "warn", f"disk {disk.disk} {how} with the VM as it is{base}: {disk.why}"


def _kept(vm: int, kept: Union[str, Sequence[str]]) -> Lines:
    for place in [kept] if isinstance(kept, str) else kept:
        if place:
            yield (
                "warn",
                f"what was not committed is kept in {place}: semishared commit {vm} brings it to its image",
            )
