# SPDX-License-Identifier: Apache-2.0
"""Tables of pools, for page.py."""

from __future__ import annotations

import functools
from typing import Callable, Dict

from tables import Data, budget, by_name, lines, load, met, number, plain, ratio, spread, table


def orders(report: Data) -> str:
    """Orders of a pool side by side."""
    found = by_name(report)
    rows = []
    for name in [
        name[: -len("/full")] for name in found if name.startswith("orders/") and name.endswith("/full")
    ]:
        _, devices, way = name.split("/")
        fair, added, removed = (found.get(f"{name}/{part}") for part in ("fair", "added", "removed"))
        moved = [spread(fair), ratio(added), ratio(removed)] if fair and added and removed else ["-"] * 3
        held = [part for part in (added, removed) if part and part["budget"]]
        rows.append(
            [
                devices,
                way,
                *moved,
                budget(held[0]) if held else "",
                *_both(held),
                spread(found[f"{name}/full"]),
            ]
        )
    head = [
        "devices",
        "order",
        "fullest / its share",
        "moved when one comes / least",
        "moved when one goes / least",
        "budget, both",
        "met",
        "fill of the pool when the first file does not fit",
    ]
    return table(head, rows)


def _both(figures: "list[Data]") -> "list[str]":
    return [met({"met": all(figure["met"] for figure in figures)}) if figures else ""]


def rebalance(report: Data) -> str:
    """How even a pool becomes, and what that takes."""
    found = by_name(report)
    rows = []
    for name in [
        name[: -len("/even")] for name in found if name.startswith("rebalance/") and name.endswith("/even")
    ]:
        _, devices, files, start = name.split("/")
        before, even, moved = (found[f"{name}/{part}"] for part in ("before", "even", "moved"))
        worst = number(even["worst"]) if "worst" in even else "-"
        rows.append(
            [
                devices,
                files,
                start,
                spread(before),
                spread(even),
                worst,
                number(even["expected"]),
                budget(even),
                met(even),
                ratio(moved),
                number(moved["worst"]),
                number(moved["expected"]),
                budget(moved),
                met(moved),
                str(even["n"]),
            ]
        )
    head = [
        "devices",
        "files",
        "how they lay",
        "fullest / mean before",
        "after",
        "worst",
        "expected",
        "budget",
        "met",
        "moved / above the mean",
        "worst",
        "expected",
        "budget",
        "met",
        "n",
    ]
    return table(head, rows)


PAPER = {
    ("character", 1): "about 1, also T and C",
    ("write", 1): "0.6",
    ("write", 2): "about 2",
    ("write", 4): "about 2",
    ("write", 8): "about 2",
    ("read", 1): "0.91",
    ("read", 2): "little more",
    ("read", 4): "little more",
    ("read", 8): "little more",
    ("seek", 1): "1",
    ("seek", 2): "more",
    ("seek", 4): "flattening",
    ("seek", 8): "flattening",
}
"""Case D of the plain disk, as its text says it."""


def extents(report: Data) -> str:
    """Figures 2 to 5 of the paper, a line for each number of disks; below, how a volume grows."""
    found = by_name(report)
    rows = []
    for (what, count), paper in PAPER.items():
        driver = found[f"extents/D/{what}/{count}"]
        others = [
            ratio(found[name]) if name in found else "-"
            for name in (f"extents/{case}/{what}/{count}" for case in "TC")
        ]
        measured = f"{spread(driver)} {driver['unit']}"
        rows.append(
            [
                what,
                str(count),
                measured,
                ratio(driver),
                number(driver["expected"]),
                paper,
                *others,
                str(driver["n"]),
            ]
        )
    head = [
        "what",
        "disks",
        "case D",
        "of the plain disk",
        "expected",
        "the paper's",
        "case T of it",
        "case C of it",
        "n",
    ]
    rest = [figure for name, figure in found.items() if name.startswith("extents/") and name.count("/") == 1]
    return load(report, "extents") + table(head, rows) + "\n" + lines(rest)


BLOCKS: Dict[str, Callable[[Data], str]] = {
    "orders": orders,
    "rebalance": rebalance,
    "extents": extents,
    **{
        name: functools.partial(plain, prefix=f"{name}/")
        for name in ("devices", "plain", "beside", "moved", "memory")
    },
}
