# SPDX-License-Identifier: Apache-2.0
"""Tables of what actions cost, for page.py."""

from __future__ import annotations

from typing import Callable, Dict

from tables import Data, by_name, load, met, number, ratio, spread, table


def actions(report: Data) -> str:
    """Every action of tm/ and datastore/."""
    found = by_name(report)
    rows = []
    for name, figure in found.items():
        if name.startswith("actions/") and name.endswith("/first"):
            stem = name.rsplit("/", 1)[0]
            rows.append(
                [
                    stem.split("/", 1)[1],
                    spread(figure),
                    number(10 * figure["expected"] if figure["expected"] else None),
                    ratio(figure),
                    met(figure),
                    number(found[f"{stem}/own"]["median"]),
                    spread(found[f"{stem}/cpu"]),
                    number(found[f"{stem}/host-cpu"]["median"]),
                    spread(found[f"{stem}/wall"]),
                    str(figure["n"]),
                ]
            )
    python = found.get("actions/python")
    text = f"Baseline: `python3 -I -c pass` costs {spread(python)} ms CPU.\n\n" if python else ""
    head = [
        "action",
        "CPU until first command, ms",
        "expected",
        "of the baseline",
        "met",
        "CPU of its own process, ms",
        "CPU on the front-end, ms",
        "CPU on the hosts, ms",
        "wall, s",
        "n",
    ]
    return text + table(head, rows)


def releases(report: Data) -> str:
    """Every action of now and of the version before, measured in turns."""
    found = by_name(report)
    stems = dict.fromkeys(name.rsplit("/", 1)[0] for name in found if name.startswith("releases/tm/"))
    stems.update(
        dict.fromkeys(name.rsplit("/", 1)[0] for name in found if name.startswith("releases/datastore/"))
    )
    rows = []
    for stem in sorted(stems):
        row = [stem.split("/", 1)[1]]
        for part in ("first", "cpu"):
            figure = found.get(f"{stem}/{part}")
            row += (
                [spread(figure), spread(figure["baseline"]), number(figure["ratio"])] if figure else ["-"] * 3
            )
        rows.append(row)
    head = ["action"]
    for what in ("CPU until first command, ms", "CPU on the front-end, ms"):
        head += [f"{what}: now", "before", "ratio"]
    return load(report, "releases") + table(head, rows)


BLOCKS: Dict[str, Callable[[Data], str]] = {"actions": actions, "releases": releases}
