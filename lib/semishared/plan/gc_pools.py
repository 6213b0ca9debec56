# SPDX-License-Identifier: Apache-2.0
"""What is left over in the pools of datastores on Ceph, against what oned knows.

    one-35.semishared-<x>         nobody has it open: a killed action left it
    one-35.semishared-changing    kept: the next action on one-35 puts its content back
    one-35-23-1                   oned has VM 23 among those that are DONE, with that disk; nobody has it
    open, no clone depends
                                  on it, and we made it
    one-35                        kept: no image of oned has this SOURCE, though we made it
    one-35@semishared-undo        the image is there: what it was before a change that is over
          @semishared-saved       nobody has an image open that is being made, of which this might be the
          source
          @semishared-old-<x>     no clone depends on it any more
          @semishared-lent-<id>   no VM of oned has the image, and nobody has it open

Names are collected before oned is asked, and looked into after that: whatever was there then and is not known
to oned will not be known to it later. Others may have images in the same pool: what has not our mark on it is
not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator

from ..model import layout_pool
from ..model import steps as s
from . import images
from .gc import Finding, Known


@dataclass(frozen=True)
class Pool:
    """A pool, the datastore whose it is, and the names in it."""

    machine: str
    store: int
    name: str
    access: s.Access
    images: tuple[str, ...]

    def source(self, name: str) -> str:
        return f"{self.name}/{name}"


REASONS = {
    layout_pool.UNDO: "what the image was before a change that is over",
    layout_pool.SAVED: "a killed save-as left it",
    layout_pool.LENT: "no VM reads it",
    layout_pool.OLD: "no clone depends on it",
}


@dataclass(frozen=True)
class Look:
    """What an image turned out to be (store/rbd_pool.py)."""

    age: int
    size: int
    made: str
    watchers: list[str] = field(hash=False)
    clones: list[str] = field(hash=False)


def suspicious(pool: Pool, known: Known) -> list[str]:
    """Return the names that need a look: of ours, and of nothing that oned knows."""
    found = []
    for name in pool.images:
        said = layout_pool.named(name)
        if not said:
            continue
        is_known = said.vm in known.vms if said.vm is not None else pool.source(name) in known.stored
        if said.is_staged or said.is_changing or not is_known:
            found.append(name)
    return found


def find(pool: Pool, looks: dict[str, Any], older_than: int, known: Known) -> Iterator[Finding]:
    """Yield what is left over in a pool, of the names that were looked at."""
    for name, data in sorted(looks.items()):
        said, look = layout_pool.named(name), Look(**data)
        if said is None or look.age < older_than:
            continue
        image = images.ref_at(pool.store, pool.access, said.image, pool.source(name))
        in_use = (
            f"{look.watchers[0]} has it open"
            if look.watchers
            else f"{look.clones[0]} is a clone of it"
            if look.clones
            else ""
        )
        ours = look.made == layout_pool.made_for(pool.store, pool.source(name))
        if said.is_changing:
            reason, keep, kind = (
                "a killed change of its content",
                "the next action on the image undoes it",
                "changing",
            )
        elif said.is_staged:
            reason, keep, kind = "a killed action left it", in_use, "staged"
        elif not ours:
            continue
        elif said.vm is not None and said.disk is not None:
            foreign = known.why_not(said.vm) or known.whose(
                said.vm, said.disk, pool.source(layout_pool.image(said.image)), ""
            )
            reason, keep, kind = f"VM {said.vm} is not known to oned", foreign or in_use, "clone"
        else:
            reason, kind = "no image of oned has this SOURCE", "image"
            keep = "it may hold somebody's data: register it again, or remove it by hand"
        yield Finding(
            pool.machine, "", kind, image.source, reason, look.size, look.age, keep=keep, image=image
        )


def with_snapshots(pool: Pool) -> list[str]:
    """Return the names of the images whose snapshots need a look: of ours, but for those that an action is
    about to put back.
    """
    named = {name: layout_pool.named(name) for name in pool.images}
    return [name for name, said in named.items() if said and not said.is_staged and not said.is_changing]


def snapshots(
    pool: Pool, found: dict[str, Any], looks: dict[str, Any], older_than: int, known: Known
) -> Iterator[Finding]:
    """Yield the snapshots that are left over, of those that were found; `looks` has the images that are being
    made.
    """
    making = [look["watchers"][0] for look in looks.values() if look["watchers"]]
    for name, data in sorted(found.items()):
        said, source = layout_pool.named(name), pool.source(name)
        for number, snapshot in sorted(data["snapshots"].items()):
            kind = next((kind for kind in REASONS if snapshot["name"].startswith(kind)), "")
            if (
                said is None
                or not kind
                or snapshot["age"] < older_than
                or (kind == layout_pool.LENT and source not in known.idle)
            ):
                continue
            keep = f"{snapshot['clones'][0]} is a clone of it" if snapshot["clones"] else ""
            if kind == layout_pool.LENT and data["watchers"]:
                keep = f"{data['watchers'][0]} has the image open"
            if kind == layout_pool.SAVED and making:
                keep = f"{making[0]} makes an image, perhaps of this"
            image = images.ref_at(pool.store, pool.access, said.image, source)
            yield Finding(
                pool.machine,
                "",
                "lent" if kind == layout_pool.LENT else "snapshot",
                f"{source}@{snapshot['name']}",
                REASONS[kind],
                0,
                snapshot["age"],
                seen=number,
                keep=keep,
                image=image,
            )
