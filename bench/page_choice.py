# SPDX-License-Identifier: Apache-2.0
"""The tables of options for overlays, by the size of the disk, and what they choose: for page.py."""

from __future__ import annotations

from typing import Callable, Dict, List

from choice import KINDS, WANTED, in_force
from tables import Data, by_name, load, number, ratio, table

NEAR = 0.98
"""What is no worse than this, of the best, is as good: then what is in force stays."""


def least(found: Dict[str, Data], kind: str, way: str) -> float:
    """Return the least of all ratios of a way, of what is wanted of each."""
    mine = [
        figure
        for name, figure in found.items()
        if name.startswith(f"choice/{kind}/") and name.split("/")[3] == way
    ]
    return min(float(figure["ratio"]) / WANTED[figure["name"].split("/")[4]] for figure in mine)


def chosen(found: Dict[str, Data], kind: str) -> str:
    """Return the way whose worst is best."""
    values = {way: least(found, kind, way) for way in KINDS[kind].ways}
    now, best = in_force(KINDS[kind].size), max(values, key=lambda way: values[way])
    return now if values[now] >= NEAR * values[best] else best


def choice(report: Data) -> str:
    """One table for each kind of disk: ratios to raw, the least of them by what is wanted, what is in force
    and what this run chooses.
    """
    found = by_name(report)
    text = load(report, "choice")
    for kind, of in KINDS.items():
        systems = list(
            dict.fromkeys(name.split("/")[2] for name in found if name.startswith(f"choice/{kind}/"))
        )
        rows: List[List[str]] = []
        for way in of.ways:
            mine = [
                found[f"choice/{kind}/{system}/{way}/{workload}"] for system in systems for workload in WANTED
            ]
            marks = ["in force"] * (way == in_force(of.size)) + ["**chosen**"] * (way == chosen(found, kind))
            rows.append(
                [way, *map(ratio, mine), number(least(found, kind, way)), ", ".join(marks), str(mine[0]["n"])]
            )
        head = [
            "clusters",
            *(f"{workload}, {system}" for system in systems for workload in WANTED),
            "least / wanted",
            "",
            "n",
        ]
        text += f"Disk of {kind}, ratios to raw:\n\n{table(head, rows)}\n"
    return text


BLOCKS: Dict[str, Callable[[Data], str]] = {"choice": choice}
