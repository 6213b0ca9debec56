# SPDX-License-Identifier: Apache-2.0
"""What is left over of directories for guests (share/), against what oned knows.

    <root>/share-<image> gone-<image>    its record does not say that it is ready, and oned has no such image:
    a killed create or delete
                                         left it, and nobody has had it since kept, if it is ready, or nobody
                                         can tell: it may hold somebody's data; so is one of another image of
                                         that id than oned has, by its datastore or by when it was made
    .semishared/.keys/<image>-<vm>[-ro].json    oned has no such VM: a delete that was killed, or that Ceph
    did not answer, left it a key

A root of before that does not say of which OpenNebula it is might be another's, too: all is kept there. They
are collected before oned is asked, which knows an image before its share is made, and until its share is
gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from ..model import layout_share
from ..model import steps as s
from ..model.shares import Tree
from ..model.steps_share import RemoveShare, TakeKeys
from .gc import Finding, Known


@dataclass(frozen=True)
class Shares:
    """What the machine that makes the shares of a datastore has of them."""

    machine: str
    store: int
    tree: Tree
    rows: tuple[dict[str, Any], ...]
    keys: tuple[dict[str, Any], ...] = ()
    cloud: str = ""
    """Which OpenNebula the root says that it is of: this one, as another's is not looked at; '' if it does
    not say.
    """


@dataclass(frozen=True)
class Left(Finding):
    """A share."""

    step: s.Step | None = None

    def steps(self) -> list[s.Step]:
        """Return what removes it."""
        return [self.step] if self.step else []


def is_of(row: Mapping[str, Any], store: int, having: int, born: int) -> bool:
    """Tell whether a share in datastore `store` is that of the image of its id, which is in `having` and was
    made at `born` (-1: unknown).

    An oned whose database was restored gives ids anew, also in other datastores. A record that cannot be read
    says nothing of when.
    """
    return store == having and (born < 0 or row["born"] in (-1, born))


def find(shares: Shares, known: Known) -> Iterator[Finding]:
    """Yield what is left over in a datastore."""
    says_so = (
        f"{shares.tree.root} does not say of which OpenNebula it is: `semishared share init "
        f"{shares.store}` does"
    )
    unknown = "" if shares.cloud else says_so
    stores = {image: store for store, image in known.images}
    for row in shares.rows:
        image, path = (
            int(row["image"]),
            row["source"] or f"{shares.tree.root}/{layout_share.tree(int(row['image']))}",
        )
        if image in stores and is_of(row, shares.store, stores[image], known.born.get(image, -1)):
            continue
        has = f"oned has another image {image}" if image in stores else f"oned has no image {image}"
        # An id that has been given anew is for a person to judge.
        is_left = not row["source"] and "wrong" not in row and image not in stores
        kept = row.get("snapshots", ())
        with_them = f", and {len(kept)} of its snapshots are there" if kept else ""
        reason = f"a killed action left it, and {has}" if is_left else f"{has}{with_them}"
        of_others = ("it stands for a directory of others, which stays", "its record")
        what, it = of_others if row.get("directory") else ("it may hold somebody's data", "it")
        held = "" if is_left else f"{what}: `semishared share drop {shares.store} {image}` removes {it}"
        keep = unknown or held
        step = None if keep else RemoveShare(shares.tree, image, "", int(row["born"]))
        yield Left(
            shares.machine, "", "share", path, reason, max(0, int(row["used"])), 0, keep=keep, step=step
        )
    unread = {(key["image"], key["vm"]): key["wrong"]["detail"] for key in shares.keys if key.get("wrong")}
    for key in shares.keys:
        image, vm, readonly = int(key["image"]), int(key["vm"]), bool(key["readonly"])
        if vm >= 0 and vm not in known.vms:
            path = f"{shares.tree.root}/{layout_share.key(image, vm, readonly)}"
            reason = f"client.{key['user']} has a key for the share, and oned has no VM {vm}"
            keep = unknown or known.why_not(vm) or _unread(image, vm, unread.get((image, vm), ""))
            yield Left(
                shares.machine,
                "",
                "key",
                path,
                reason,
                0,
                0,
                keep=keep,
                step=TakeKeys(shares.tree, image, vm),
            )


def _unread(image: int, vm: int, wrong: str) -> str:
    return (
        wrong and f"{wrong}: `semishared share credentials {image} --vm {vm} --revoke` takes it all the same"
    )
