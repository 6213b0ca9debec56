# SPDX-License-Identifier: Apache-2.0
"""Who may commit to an RBD image, noted in its metadata, and changes that are whole or undone."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import Any, Iterator

from ...errors import JournalDamaged, MissingImage, SemisharedError
from ...model.refs import Owner
from ...model.store import rbd_names
from ...model.store.rbd_names import CLAIM, NEW, UNDO
from ...tools.effects import point
from ..commit import claims
from ..commit.claims import Claim
from . import ceph
from . import image as rbd_image
from .image import create, drop, end_generations, find, roll_back, wait_unused


def read(image: Any) -> Claim | None:
    """Return the record of an open image, None if it was claimed for no disk; raise UnknownClaim."""
    said = dict(image.metadata_list()).get(CLAIM)
    return claims.parse(f"{image.get_name()} ({CLAIM})", said) if said else None


def write(image: Any, claim: Claim | None, done: str = "claim written") -> None:
    """Write the record of an open image, or remove it; `done` is then the name of the point."""
    if claim:
        image.metadata_set(CLAIM, json.dumps(claim.to_data(), sort_keys=True))
    elif CLAIM in dict(image.metadata_list()):
        image.metadata_remove(CLAIM)
    point(done)


def now(image: Any, owner: Owner, claim: Claim | None) -> Claim:
    """Return an open image as it is; what it is known by is the snapshot that holds its content, the claim's
    if that does.
    """
    found = rbd_image.content(image)
    held = next((it for it in rbd_image.snapshots(image) if claim and (it.id,) == claim.state), None)
    if held and (not found or found.id != held.id) and rbd_image.is_unchanged(image, held):
        found = held
    numbers = sorted(int(it.name) for it in rbd_image.snapshots(image) if it.name.isdigit())
    return Claim(
        owner, found.generation if found else "", image.size(), (found.id,) if found else (), tuple(numbers)
    )


def settle_commit(where: ceph.Pool, name: str) -> None:
    """Roll an image back to before a killed commit; give a finished commit's content its snapshot.

    The snapshot of a known content, a generation's, is what undoes a commit: without it none begins. The host
    notes `changing`, writes, and notes what the image is then: that one write of metadata decides. Until then
    the bridge rolls the image back, once the host has let go of it; the diff stays on the host and is
    committed again from there. A host that was cut off and comes back can write no more: the roll-back takes
    the image's exclusive lock, which the host has had from the beginning, and Ceph puts that host on its
    blocklist.
    """
    try:
        with ceph.opened(where, name, read_only=True) as image:
            if is_settled(read(image)):
                return
        with ceph.opened(where, name) as image:
            rbd_image.wait_unused(image, f"{where.name}/{name}")
            claim = read(image)
            if claim is None or is_settled(claim):
                return
            if claim.changing:
                rbd_image.roll_back(image, _undo(image, claim, f"{where.name}/{name}"))
                claim = claim._replace(changing=False, state=())
                write(image, claim, "change undone")
            # Until the record says that it is settled, whoever comes next does the rest.
            frozen = _frozen(image, claim.generation)
            rbd_image.end_generations(image, keep=frozen)
            write(image, claim._replace(state=(frozen,)))
    except MissingImage:
        return  # who needs it says so
    point("commit settled")


def is_settled(claim: Claim | None) -> bool:
    """Tell whether nothing of a commit is left to be undone, or to be made known."""
    return claim is None or (not claim.changing and bool(claim.state))


def _undo(image: Any, claim: Claim, shown: str) -> str:
    found = next((it.name for it in rbd_image.snapshots(image) if (it.id,) == claim.state), "")
    if not found:
        raise JournalDamaged(f"the snapshot of {shown} that a commit could be undone by was removed")
    return found


def _frozen(image: Any, generation: str) -> int:
    """Return the id of a new snapshot of an open image's content, under the name of its generation; what had
    that stays, aside.
    """
    name = rbd_names.frozen(generation) if generation else NEW
    if rbd_image.find(image, name):
        image.rename_snap(name, rbd_names.set_aside(os.urandom(4).hex()))
        point("generation set aside")
    rbd_image.create(image, name)
    found = rbd_image.find(image, name)
    assert found
    return found.id


def change_exists(where: ceph.Pool, name: str) -> bool:
    """Tell whether an image is there."""
    try:
        with ceph.opened(where, name, read_only=True):
            return True
    except MissingImage:
        return False


def begin_change(where: ceph.Pool, name: str) -> str:
    """Take an image out of everybody's sight, so that its content can be replaced; return its name meanwhile.

    Meanwhile no client can open half of the content.

        one-35@semishared-undo        the image before the change that is under way
        one-35.semishared-changing    the image under its name meanwhile
    """
    settle_change(where, name)
    hidden = rbd_names.changing(name)
    with ceph.opened(where, name) as image:
        wait_unused(image, f"{where.name}/{name}")
        end_generations(image)
        drop(image, UNDO)
        create(image, UNDO)
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, name, hidden)
    point("image hidden")
    return hidden


def change_under_way(where: ceph.Pool, name: str) -> str:
    """Return what names the change of an image that is under way, '' for none: no other snapshot of the pool
    has ever had that id.
    """
    try:
        with ceph.opened(where, rbd_names.changing(name), read_only=True) as image:
            found = find(image, UNDO)
    except MissingImage:
        return ""
    return str(found.id) if found else ""


def end_change(where: ceph.Pool, name: str) -> None:
    """Give an image whose content was replaced its name back."""
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, rbd_names.changing(name), name)
    point("image shown")
    with ceph.opened(where, name) as image:
        drop(image, UNDO)


def settle_change(where: ceph.Pool, name: str) -> None:
    """Undo a change of an image that was killed half-way, or a commit to it."""
    hidden = rbd_names.changing(name)
    if not change_exists(where, hidden):
        return settle_commit(where, name)
    if change_exists(where, name):
        raise SemisharedError(
            f"both {where.name}/{name} and {hidden} are there: look at them, and remove one by hand"
        )
    with ceph.opened(where, hidden) as image:
        wait_unused(image, f"{where.name}/{hidden}")
        if find(image, UNDO):
            roll_back(image, UNDO)
    end_change(where, name)


@contextmanager
def changing(where: ceph.Pool, name: str) -> Iterator[str]:
    """Yield the name under which to change an image: the new content if the block ends well, else the old."""
    hidden = begin_change(where, name)
    try:
        yield hidden
    except Exception:
        settle_change(where, name)
        raise
    end_change(where, name)


def grow(where: ceph.Pool, name: str, size: int) -> None:
    """Grow an image to `size` bytes, unless it is that large."""
    with ceph.opened(where, name) as image:
        if image.size() < size:
            image.resize(size)
    point("image grown")
