# SPDX-License-Identifier: Apache-2.0
"""The table of ways to a parallel file system, beside what the paper has, for page.py."""

from __future__ import annotations

from typing import Callable, Dict, List

from access_figures import BASE, KINDS, WAYS
from tables import Data, by_name, lines, load, number, ratio, spread, table

PAPER = {
    ("write", "client"): "1.9",
    ("write", "directory"): "2.2",
    ("write", "native"): "above 3",
    ("read", "client"): "1, about",
    ("read", "directory"): "1.15, about",
    ("read", "native"): "1.5, about",
}
"""Figure 4, as its text says it."""


def shares(report: Data) -> str:
    """Each way over the virtual server; below, the order that is held against the paper's, and what the
    daemons cost.
    """
    found = by_name(report)
    rows: List[List[str]] = []
    for what, (words, unit) in KINDS.items():
        for way, called in WAYS.items():
            figure = found[f"shares/{what}/{way}"]
            over = ["1", ""] if way == BASE else [ratio(figure), number(figure["expected"])]
            rows.append(
                [
                    words,
                    called,
                    f"{spread(figure)} {unit}",
                    *over,
                    PAPER.get((what, way), ""),
                    str(figure["n"]),
                ]
            )
    head = ["what", "way", "both clients", "of the virtual server", "expected", "the paper's", "n"]
    rest = [
        figure
        for name, figure in found.items()
        if name.startswith(("shares/order/", "shares/cpu/", "shares/processor"))
    ]
    return load(report, "shares") + table(head, rows) + "\n" + lines(rest)


BLOCKS: Dict[str, Callable[[Data], str]] = {"shares": shares}
