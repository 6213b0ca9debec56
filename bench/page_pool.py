# SPDX-License-Identifier: Apache-2.0
"""Tables of pools, for page.py."""

from __future__ import annotations

import functools
from typing import Callable, Dict

from tables import Data, budget, by_name, met, number, plain, ratio, spread, table


def orders(report: Data) -> str:
    """Orders of a pool side by side."""
    found = by_name(report)
    rows = []
    for name in [name[: -len("/full")] for name in found if name.startswith("orders/") and name.endswith("/full")]:
        _, devices, way = name.split("/")
        fair, added, removed = (found.get(f"{name}/{part}") for part in ("fair", "added", "removed"))
        moved = [spread(fair), ratio(added), ratio(removed)] if fair and added and removed else ["-"] * 3
        held = [part for part in (added, removed) if part and part["budget"]]
        rows.append([devices, way, *moved, budget(held[0]) if held else "", *_both(held), spread(found[f"{name}/full"])])
    head = ["devices", "order", "fullest / its share", "moved when one comes / least", "moved when one goes / least", "budget, both", "met",
            "fill of the pool when the first file does not fit"]  # fmt: skip
    return table(head, rows)


def _both(figures: "list[Data]") -> "list[str]":
    return [met({"met": all(figure["met"] for figure in figures)}) if figures else ""]


def rebalance(report: Data) -> str:
    """How even a pool becomes, and what that takes."""
    found = by_name(report)
    rows = []
    for name in [name[: -len("/even")] for name in found if name.startswith("rebalance/") and name.endswith("/even")]:
        _, devices, files, start = name.split("/")
        before, even, moved = (found[f"{name}/{part}"] for part in ("before", "even", "moved"))
        worst = number(even["worst"]) if "worst" in even else "-"
        rows.append([
            devices, files, start, spread(before), spread(even), worst, number(even["expected"]), budget(even), met(even),
            ratio(moved), number(moved["worst"]), number(moved["expected"]), budget(moved), met(moved), str(even["n"]),
        ])  # fmt: skip
    head = ["devices", "files", "how they lay", "fullest / mean before", "after", "worst", "expected", "budget", "met",
            "moved / above the mean", "worst", "expected", "budget", "met", "n"]  # fmt: skip
    return table(head, rows)


BLOCKS: Dict[str, Callable[[Data], str]] = {
    "orders": orders, "rebalance": rebalance,
    **{name: functools.partial(plain, prefix=f"{name}/") for name in ("devices", "plain", "beside", "memory")},
}  # fmt: skip
