# SPDX-License-Identifier: Apache-2.0
"""What is left over in the pools of Ceph datastores, and of shares, that oned does not know.

gc collects names before it asks oned, and looks at them after that: what was there then and is unknown to
oned will be unknown to it later. Other programs may have images in the same pool: gc does not look at what
lacks our mark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Optional

from ...model import steps as s
from ...model.share import names as share_names
from ...model.share.share import Tree
from ...model.share.steps import HeldKey, ListedShare, RemoveShare, TakeKeys
from ...model.store import rbd_names
from ...model.store.image_steps import (
    DropSnapshot,
    PassingSnapshot,
    PassingSnapshots,
    RemoveImage,
    StoredImage,
)
from ..image import images
from .gc import Finding, Known


@dataclass(frozen=True)
class Pool:
    """A datastore's pool and the names in it."""

    machine: str
    store: int
    name: str
    access: s.Access
    images: tuple[str, ...]

    def source(self, name: str) -> str:
        return f"{self.name}/{name}"


REASONS = {
    rbd_names.UNDO: "what the image was before a change that is over",
    rbd_names.SAVED: "a killed save-as left it",
    rbd_names.LENT: "no VM reads it",
    rbd_names.OLD: "no clone depends on it",
}


def _left(
    machine: str,
    kind: str,
    path: str,
    reason: str,
    keep: str,
    step: Optional[s.Step],
    size: int = 0,
    age: int = 0,
) -> Finding:
    image = step.image if isinstance(step, (RemoveImage, DropSnapshot)) else None
    return Finding(machine, "", kind, path, reason, size, age, keep=keep, image=image, step=step)


def suspicious(pool: Pool, known: Known) -> list[str]:
    """Return the names that need a look: of ours, and of nothing that oned knows."""
    found = []
    for name in pool.images:
        said = rbd_names.named(name)
        if not said:
            continue
        is_known = said.vm in known.vms if said.vm is not None else pool.source(name) in known.stored
        if said.is_staged or said.is_changing or not is_known:
            found.append(name)
    return found


def find_in_pool(pool: Pool, looks: dict[str, StoredImage], known: Known) -> Iterator[Finding]:
    """Yield what is left over in a pool, of the names that were looked at, of whatever age."""
    for name, look in sorted(looks.items()):
        said = rbd_names.named(name)
        if said is None:
            continue
        image = images.ref_at(pool.store, pool.access, said.image, pool.source(name))
        opener = f"{look.watchers[0]} has it open" if look.watchers else ""
        in_use = opener or (f"{look.clones[0]} is a clone of it" if look.clones else "")
        ours = look.made == rbd_names.made_for(pool.store, pool.source(name))
        if said.is_changing:
            reason, kind = "a killed change of its content", "changing"
            keep = "the next action on the image undoes it"
        elif said.is_staged:
            reason, keep, kind = "a killed action left it", in_use, "staged"
        elif not ours:
            continue
        elif said.vm is not None and said.disk is not None:
            source = pool.source(rbd_names.image(said.image))
            foreign = known.why_not(said.vm) or known.whose(said.vm, said.disk, source, "")
            reason, keep, kind = f"VM {said.vm} is not known to oned", foreign or in_use, "clone"
        else:
            reason, kind = "no image of oned has this SOURCE", "image"
            keep = "it may hold somebody's data: register it again, or remove it by hand"
        yield _left(pool.machine, kind, image.source, reason, keep, RemoveImage(image), look.size, look.age)


def with_snapshots(pool: Pool) -> list[str]:
    """Return the images whose snapshots need a look: ours, but for those that an action will put back."""
    named = {name: rbd_names.named(name) for name in pool.images}
    return [name for name, said in named.items() if said and not said.is_staged and not said.is_changing]


def snapshots(
    pool: Pool,
    found: dict[str, PassingSnapshots],
    looks: dict[str, StoredImage],
    known: Known,
) -> Iterator[Finding]:
    """Yield those snapshots of `found` that are left over; `looks` has the images that are being made."""
    making = [look.watchers[0] for look in looks.values() if look.watchers]
    for name, data in sorted(found.items()):
        said, source = rbd_names.named(name), pool.source(name)
        for number, snapshot in sorted(data.snapshots.items()):
            if rbd_names.backed_up(snapshot.name) is not None:
                yield from _mark(pool, name, int(number), snapshot, known)
            kind = next((kind for kind in REASONS if snapshot.name.startswith(kind)), "")
            if said is None or not kind or (kind == rbd_names.LENT and source not in known.idle):
                continue
            keep = f"{snapshot.clones[0]} is a clone of it" if snapshot.clones else ""
            if kind == rbd_names.LENT and data.watchers:
                keep = f"{data.watchers[0]} has the image open"
            if kind == rbd_names.SAVED and making:
                keep = f"{making[0]} makes an image, perhaps of this"
            image = images.ref_at(pool.store, pool.access, said.image, source)
            name_of, step = f"{source}@{snapshot.name}", DropSnapshot(image, int(number))
            what = "lent" if kind == rbd_names.LENT else "snapshot"
            yield _left(pool.machine, what, name_of, REASONS[kind], keep, step, 0, snapshot.age)


def _mark(pool: Pool, name: str, number: int, snapshot: PassingSnapshot, known: Known) -> Iterator[Finding]:
    """Yield a mark for backups of a VM that is gone; those in its clone go with that."""
    said, vm, source = rbd_names.named(name), rbd_names.backed_up(snapshot.name), pool.source(name)
    if said is None or vm is None or vm in known.vms or source not in known.stored:
        return
    keep = known.why_not(vm) or (f"{snapshot.clones[0]} is a clone of it" if snapshot.clones else "")
    step = DropSnapshot(images.ref_at(pool.store, pool.access, said.image, source), number)
    reason = f"VM {vm}, for whose backups it was made, is not known to oned"
    yield _left(pool.machine, "mark", f"{source}@{snapshot.name}", reason, keep, step, 0, snapshot.age)


@dataclass(frozen=True)
class Shares:
    """What the machine that makes the shares of a datastore has of them."""

    machine: str
    store: int
    tree: Tree
    rows: tuple[ListedShare, ...]
    keys: tuple[HeldKey, ...] = ()
    cloud: str = ""
    """The OpenNebula that the root names: this one, as another's is not looked at; '' if it names none."""


def is_of(row: ListedShare, store: int, having: int, born: int) -> bool:
    """Tell whether a share in datastore `store` belongs to the image of its id.

    `having`: the datastore of that image; `born`: when it was made (-1: unknown). An oned whose database was
    restored uses ids again, also in other datastores. An unreadable record does not say when.
    """
    return store == having and (born < 0 or row.born in (-1, born))


def find_in_shares(shares: Shares, known: Known) -> Iterator[Finding]:
    """Yield what is left over in a datastore.

    A root of an older version names no OpenNebula: all in it is kept. The shares were listed before oned was
    asked; oned knows an image before its share is made and until that is gone.
    """
    says_so = f"`semishared share init {shares.store}` does"
    unknown = "" if shares.cloud else f"{shares.tree.root} does not say of which OpenNebula it is: {says_so}"
    stores = {image: store for store, image in known.images}
    for row in shares.rows:
        image = row.image
        path = row.source or f"{shares.tree.root}/{share_names.tree(image)}"
        if image in stores and is_of(row, shares.store, stores[image], known.born.get(image, -1)):
            continue
        has = f"oned has another image {image}" if image in stores else f"oned has no image {image}"
        # A person judges an id that was used again.
        is_left = not row.source and not row.wrong and image not in stores
        with_them = f", and {len(row.snapshots)} of its snapshots are there" if row.snapshots else ""
        reason = f"a killed action left it, and {has}" if is_left else f"{has}{with_them}"
        of_others = ("it stands for a directory of others, which stays", "its record")
        what, it = of_others if row.directory else ("it may hold somebody's data", "it")
        held = "" if is_left else f"{what}: `semishared share drop {shares.store} {image}` removes {it}"
        keep = unknown or held
        step = None if keep else RemoveShare(shares.tree, image, "", row.born)
        yield _left(shares.machine, "share", path, reason, keep, step, max(0, row.used))
    unread = {(key.image, key.vm): key.wrong.detail for key in shares.keys if key.wrong}
    for key in shares.keys:
        image, vm = key.image, key.vm
        if vm >= 0 and vm not in known.vms:
            path = f"{shares.tree.root}/{share_names.key(image, vm, key.readonly)}"
            reason = f"client.{key.user} has a key for the share, and oned has no VM {vm}"
            keep = unknown or known.why_not(vm) or _unread(image, vm, unread.get((image, vm), ""))
            yield _left(shares.machine, "key", path, reason, keep, TakeKeys(shares.tree, image, vm))


def _unread(image: int, vm: int, wrong: str) -> str:
    return (
        wrong and f"{wrong}: `semishared share credentials {image} --vm {vm} --revoke` takes it all the same"
    )
