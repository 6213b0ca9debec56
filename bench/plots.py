# SPDX-License-Identifier: Apache-2.0
"""Plots of bench.json as SVG beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import cluster_plots

Data = Dict[str, Any]


def _bars(
    path: Path, title: str, axis: str, groups: Dict[str, List[Data]], limit: float, key: str = "ratio"
) -> None:
    """Draw horizontal bars with their spread, one colour per group, and a line at the budget."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    count = sum(len(figures) for figures in groups.values())
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * count))
    at, ticks, labels = 0, [], []
    for group, figures in groups.items():
        values = [found[key] for found in figures]
        spreads = [
            found["ratio_spread" if key == "ratio" else "spread"] or [found[key]] * 2 for found in figures
        ]
        errors = [
            [max(0.0, value - spread[0]) for value, spread in zip(values, spreads)],
            [max(0.0, spread[1] - value) for value, spread in zip(values, spreads)],
        ]
        places = list(range(at, at + len(figures)))
        axes.barh(places, values, xerr=errors, label=group, height=0.8, error_kw={"lw": 0.8})
        ticks += places
        labels += [str(found["label"]) for found in figures]
        at += len(figures) + 1
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(limit, color="black", lw=0.8, ls="--")
    axes.set_xlabel(axis)
    axes.set_title(title)
    if len(groups) > 1:
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw(report: Data, folder: Path) -> None:
    """Draw what was measured."""
    figures = report["figures"]
    for size in dict.fromkeys(
        f["name"].split("/")[1] for f in figures if f["name"].startswith("overlay-options/")
    ):
        groups: Dict[str, List[Data]] = {}
        for found in figures:
            parts = found["name"].split("/")
            if parts[0] == "overlay-options" and parts[1] == size and found["ratio"] is not None:
                groups.setdefault(parts[3], []).append({**found, "label": parts[2]})
        name = f"bench-overlay-{size.replace(' ', '').replace(',', '-')}.svg"
        _bars(
            folder / name,
            f"Overlays against raw, image of {size}",
            "ratio to raw (dashed: 0.95)",
            groups,
            0.95,
        )
    chosen = [{**f, "label": f["name"].split("/")[1]} for f in figures if f["name"].startswith("overlay-io/")]
    if chosen:
        _bars(
            folder / "bench-overlay-io.svg",
            "Chosen overlay against raw",
            "ratio to raw (dashed: 0.95)",
            {"": chosen},
            0.95,
        )
    clones: Dict[str, List[Data]] = {}
    for found in figures:
        parts = found["name"].split("/")
        if parts[0] == "clone" and parts[1] in ("warm", "first", "scp"):
            clones.setdefault(
                {"warm": "further clone", "first": "first clone"}.get(parts[1], parts[1]), []
            ).append({**found, "label": f"{parts[1]} {parts[2]}"})
    if clones:
        _bars(folder / "bench-clone.svg", "Seconds per disk", "s", clones, 0.0, "median")
    named = [f for f in figures if f["name"].startswith("actions/") and f["name"].endswith("/first")]
    first = [{**f, "label": f["name"][8:-6]} for f in named]
    if first:
        _bars(
            folder / "bench-actions.svg",
            "CPU until the first command",
            "of the bare interpreter (dashed: 3.5)",
            {"": first},
            3.5,
        )
    stages: Dict[str, List[Any]] = {}
    for found in figures:
        parts = found["name"].split("/")
        if parts[0] == "stage" and len(parts) == 3 and parts[2].isdigit():
            stages.setdefault(parts[1], []).append((int(parts[2]), found["median"]))
    if stages:
        _lines(folder / "bench-stage.svg", "One image onto N hosts, 100 Mbit/s each", "hosts", "s", stages)
    cluster_plots.draw(figures, folder)


def _lines(path: Path, title: str, across: str, up: str, lines: Dict[str, List[Any]]) -> None:
    """Draw a line per group, both axes logarithmic: what grows with N is a slope, what does not is level."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    counts = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
