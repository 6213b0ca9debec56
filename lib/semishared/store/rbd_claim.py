# SPDX-License-Identifier: Apache-2.0
"""Who may commit to an RBD image, noted in its metadata, and what becomes of a commit that was killed.

The snapshot of the content that is known, a generation's, is what a commit can be undone by: without it none
begins. The host notes `changing`, writes, and notes what the image is then: that one write of metadata
decides. Until then whoever comes to the bridge rolls the image back, as soon as the host has let go of it;
the diff is on the host as it was, and is committed again from there. A host that was cut off and comes back
can write no more: who rolls back takes the image's exclusive lock, which the host has had from the beginning,
and Ceph puts it on its blocklist.
"""

from __future__ import annotations

import json
import os
from typing import Any

from ..errors import JournalDamaged, MissingImage
from ..model import layout_pool
from ..model.layout_pool import CLAIM, NEW
from ..model.owner import Owner
from ..tools.crash_points import point
from . import ceph, claims, rbd_image
from .claims import Claim


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


def settle(where: ceph.Pool, name: str) -> None:
    """Roll an image back to what it was before a commit that was killed; make one that was committed known by
    a snapshot.
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
    name = layout_pool.frozen(generation) if generation else NEW
    if rbd_image.find(image, name):
        image.rename_snap(name, layout_pool.set_aside(os.urandom(4).hex()))
        point("generation set aside")
    rbd_image.create(image, name)
    found = rbd_image.find(image, name)
    assert found
    return found.id
