# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared share` that keeps what shares were: share/snapshots.py."""

from __future__ import annotations

import time
from typing import Any, Callable, Sequence

from ..errors import BadArguments, from_id
from ..model import steps_share as s
from ..model.shares import Tree
from ..units import human
from .output import table
from .share_rows import Row

WORDS = {"create": ("IMAGE", "NAME"), "list": ("IMAGE",), "remove": ("IMAGE", "NAME")}


def check(words: Sequence[str]) -> None:
    """Raise BadArguments unless these are words after `snapshot`."""
    if not words or words[0] not in WORDS:
        raise BadArguments(f"snapshot takes one of {', '.join(WORDS)}")
    if len(words) != len(WORDS[words[0]]) + 1:
        raise BadArguments(f"snapshot {words[0]} takes {' and '.join(WORDS[words[0]])}")


def run(
    tree: Tree,
    image: int,
    words: Sequence[str],
    ask: Callable[[Any], Any],
    may: Callable[[list[str]], bool],
    is_dry: bool,
) -> Row:
    """Do what `words`, which are checked, say with the snapshots of a share; return what is to be said."""
    if words[0] == "create":
        made = ask(s.MakeSnapshot(tree, image, words[2]))
        return {
            "image": image,
            "snapshot": made,
            "said": f"snapshot {made['name']} of the share of image {image}: {_where(made)}",
        }
    if words[0] == "remove":
        what = f"snapshot {words[2]} of the share of image {image}"
        if is_dry or not may([f"{what} would be removed"]):
            return {"image": image, "said": f"{what} {'would be' if is_dry else 'is not'} removed"}
        ask(s.RemoveSnapshot(tree, image, words[2]))
        return {"image": image, "said": f"snapshot {words[2]} of the share of image {image} is gone"}
    return {"image": image, "snapshots": ask(s.ListSnapshots(tree, image))["snapshots"]}


def _where(row: Row) -> str:
    if "wrong" in row:
        return from_id(row["wrong"]["id"], row["wrong"]["detail"]).line()
    return str(row["path"]) + (f", in guests {row['in_guest']}" if row["in_guest"] else "")


def show(rows: Sequence[Row]) -> None:
    """Print snapshots as a table."""
    lines = [["NAME", "MADE", "KEEPS ALONE", "WHERE"]]
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["made"])) if row["made"] >= 0 else "-"
        lines.append([row["name"], made, human(row["alone"]) if row["alone"] >= 0 else "-", _where(row)])
    table(lines)
