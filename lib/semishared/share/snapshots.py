# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shares, where the file system has them, by the operator's names.

A snapshot is there as a whole or not at all, and goes with its share.
"""

from __future__ import annotations

import os

from ..errors import BadArguments, DataInTheWay, MissingImage, ToolFailed
from ..model.share import names as share_names
from ..model.share.share import Snapshot, Tree
from ..tools.effects import point
from . import FileSystem, life


def _check(name: str) -> None:
    if not share_names.may_be_snapshot(name):
        raise BadArguments(
            f"a snapshot is called 1 to 64 letters, digits, dots, dashes and underscores, not {name[:100]!r}"
        )


def make(tree: Tree, number: int, name: str) -> dict[str, object]:
    """Keep what is in a share; return what is then known of the snapshot. One that is there already is of
    another moment: DataInTheWay.
    """
    _check(name)
    fs = life.checked(tree)
    with life.alone(tree, number):
        life.made(tree, number)
        if name in fs.snapshot_names(number):
            raise DataInTheWay(
                f"image {number} has a snapshot {name} already: remove it, or call this one otherwise"
            )
        fs.snapshot(number, name)
        point("snapshot made")
        return fs.known(number, name)._asdict()


def listed(tree: Tree, number: int) -> dict[str, list[dict[str, object]]]:
    """Return the snapshots of a share, and what is wrong with one, which hides no other."""
    fs = life.checked(tree)
    life.made(tree, number)
    rows = [_row(fs, number, name) for name in fs.snapshot_names(number)]
    return {"snapshots": [row for row in rows if row]}


def _row(fs: FileSystem, number: int, name: str) -> dict[str, object] | None:
    """Return what is to be said of one, None if it is gone."""
    try:
        return fs.known(number, name)._asdict()
    except (ToolFailed, MissingImage) as e:
        wrong = {"id": e.id, "detail": e.detail}
    return (
        {**Snapshot(name, -1, -1, "")._asdict(), "wrong": wrong}
        if name in fs.snapshot_names(number)
        else None
    )


def remove(tree: Tree, number: int, name: str) -> None:
    """Remove one; raise MissingImage if there is none of that name."""
    _check(name)
    fs = life.checked(tree)
    with life.alone(tree, number):
        life.made(tree, number)
        if name not in fs.snapshot_names(number):
            raise MissingImage(f"image {number} has no snapshot {name} on {os.uname().nodename}")
        fs.forget(number, name)
