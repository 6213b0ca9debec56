# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shares, where the file system has them: named by the operator, there as a whole or not at all, gone with their share."""

from __future__ import annotations

import os

from ..errors import BadArguments, DataInTheWay, MissingImage
from ..model import layout_share
from ..model.shares import Tree
from ..tools.crash_points import point
from . import life


def _check(name: str) -> None:
    if not layout_share.may_be_snapshot(name):
        raise BadArguments(f"a snapshot is called 1 to 64 letters, digits, dots, dashes and underscores, not {name[:100]!r}")


def make(tree: Tree, number: int, name: str) -> dict[str, object]:
    """Keep what is in a share; return what is then known of the snapshot. One that is there already is of another moment: DataInTheWay."""
    _check(name)
    fs = life.checked(tree)
    with life.alone(tree, number):
        life.ready(tree, number)
        if name in fs.snapshot_names(number):
            raise DataInTheWay(f"image {number} has a snapshot {name} already: remove it, or call this one otherwise")
        fs.snapshot(number, name)
        point("snapshot made")
        return next(found._asdict() for found in fs.snapshots(number) if found.name == name)


def listed(tree: Tree, number: int) -> dict[str, list[dict[str, object]]]:
    """Return the snapshots of a share."""
    fs = life.checked(tree)
    life.ready(tree, number)
    return {"snapshots": [found._asdict() for found in fs.snapshots(number)]}


def remove(tree: Tree, number: int, name: str) -> None:
    """Remove one; raise MissingImage if there is none of that name."""
    _check(name)
    fs = life.checked(tree)
    with life.alone(tree, number):
        life.ready(tree, number)
        if name not in fs.snapshot_names(number):
            raise MissingImage(f"image {number} has no snapshot {name} on {os.uname().nodename}")
        fs.forget(number, name)
