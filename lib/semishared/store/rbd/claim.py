# SPDX-License-Identifier: Apache-2.0
"""The claim in an RBD image's metadata, and changes of an image that complete or roll back."""

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
    """Return the record of an open image, None if no disk has claimed it; raise UnknownClaim."""
    said = dict(image.metadata_list()).get(CLAIM)
    return claims.parse(f"{image.get_name()} ({CLAIM})", said) if said else None


def write(image: Any, claim: Claim | None, done: str = "claim written") -> None:
    """Write or remove the record of an open image; `done` names the crash point after a write."""
    if claim:
        image.metadata_set(CLAIM, json.dumps(claim.to_data(), sort_keys=True))
    elif CLAIM in dict(image.metadata_list()):
        image.metadata_remove(CLAIM)
    point(done)


def now(image: Any, owner: Owner, claim: Claim | None) -> Claim:
    """Return a record of an open image as it is; its state is the snapshot with the present content.

    If several snapshots have that content, the claim's one counts.
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
    """Roll a killed commit back; give the content of a finished commit its snapshot.

    A commit begins only if the image has a snapshot of its present generation, for the roll-back. The host
    records `changing`, writes, and records the new state: that one write of metadata decides the commit.
    Before that, the bridge rolls the image back once the host has closed it; the diff stays on the host,
    which commits it again. A host that was cut off can write no more when it comes back: the roll-back takes
    the image's exclusive lock, which that host had held, and Ceph blocklists it.
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
            # A crash before the record is settled: the next caller completes the rest.
            frozen = _frozen(image, claim.generation)
            rbd_image.end_generations(image, keep=frozen)
            write(image, claim._replace(state=(frozen,)))
    except MissingImage:
        return  # a caller that needs the image reports it
    point("commit settled")


def is_settled(claim: Claim | None) -> bool:
    """Return True if no commit needs a roll-back or a snapshot of its content."""
    return claim is None or (not claim.changing and bool(claim.state))


def _undo(image: Any, claim: Claim, shown: str) -> str:
    found = next((it.name for it in rbd_image.snapshots(image) if (it.id,) == claim.state), "")
    if not found:
        raise JournalDamaged(f"the snapshot of {shown} that a commit could be undone by was removed")
    return found


def _frozen(image: Any, generation: str) -> int:
    """Return the id of a new snapshot named by the image's generation; rename an older one of that name."""
    name = rbd_names.frozen(generation) if generation else NEW
    if rbd_image.find(image, name):
        image.rename_snap(name, rbd_names.set_aside(os.urandom(4).hex()))
        point("generation set aside")
    rbd_image.create(image, name)
    found = rbd_image.find(image, name)
    assert found
    return found.id


def change_exists(where: ceph.Pool, name: str) -> bool:
    """Return True if an image of that name exists."""
    try:
        with ceph.opened(where, name, read_only=True):
            return True
    except MissingImage:
        return False


def begin_change(where: ceph.Pool, name: str) -> str:
    """Hide an image under another name, so that its content can be replaced; return that name.

    No client can open the image with half of its content.

        one-35@semishared-undo        the image before the change
        one-35.semishared-changing    the hidden image
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
    """Return the id of the running change of an image, '' for none: a snapshot id, unique in the pool."""
    try:
        with ceph.opened(where, rbd_names.changing(name), read_only=True) as image:
            found = find(image, UNDO)
    except MissingImage:
        return ""
    return str(found.id) if found else ""


def end_change(where: ceph.Pool, name: str) -> None:
    """Give a changed image its name back, and remove the snapshot for its roll-back."""
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, rbd_names.changing(name), name)
    point("image shown")
    with ceph.opened(where, name) as image:
        drop(image, UNDO)


def settle_change(where: ceph.Pool, name: str) -> None:
    """Roll back a killed change of an image, or settle a killed commit to it.

    Raise SemisharedError if both the image and its hidden name exist.
    """
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
    """Yield the hidden name of an image; publish the new content if the block ends well, else roll back."""
    hidden = begin_change(where, name)
    try:
        yield hidden
    except Exception:
        settle_change(where, name)
        raise
    end_change(where, name)


def grow(where: ceph.Pool, name: str, size: int) -> None:
    """Grow an image to at least `size` bytes."""
    with ceph.opened(where, name) as image:
        if image.size() < size:
            image.resize(size)
    point("image grown")
