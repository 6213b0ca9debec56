# SPDX-License-Identifier: Apache-2.0
"""Plots of a virtual cluster (cluster.py) and of commits (commits.py), laid out as figures 4 and 5 of what
was published in 2014.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

Data = Dict[str, Any]
PUBLISHED = {"boot: 16 nodes usable": 24.0, "end: 16 nodes shut down, committed": 6.0}
"""Seconds of 16 hosts of their own with 10 GbE and hard disks, an image of 2.06 GB: beside ours, not to be
compared in seconds.
"""
MOST = 16


def draw(figures: List[Data], folder: Path) -> None:
    """Draw what was measured."""
    found = {figure["name"]: figure for figure in figures}
    if "cluster/boot/1" in found:
        _phases(folder / "bench-cluster-phases.svg", found)
    if any(name.startswith("cluster/rate/") for name in found):
        _rates(folder / "bench-cluster-rates.svg", found)
    if any(name.startswith("commit/seconds/") for name in found):
        _commits(folder / "bench-commit.svg", found)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    return pyplot


def _phases(path: Path, found: Dict[str, Data]) -> None:
    """Seconds of each phase by number of VMs (figure 5a); dashed is the line that has foretold the last
    number.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 5))
    for name in ("boot", "detach", "commit", "end"):
        points = _points(found, f"cluster/{name}/")
        (drawn,) = axes.plot(*zip(*points), marker="o", label=name)
        ahead = found.get(f"cluster/{name}-drawn/{MOST}")
        if ahead:
            axes.plot(
                [points[-1][0], MOST], [points[-1][1], ahead["median"]], ls="--", color=drawn.get_color()
            )
    for (label, seconds), marker in zip(PUBLISHED.items(), "*P"):
        axes.plot([MOST], [seconds], marker=marker, ms=10, ls="", color="black", label=f"2014, {label}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    counts = [1, 2, 4, 8, MOST]
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("VMs, emulated on two cores")
    axes.set_ylabel("s")
    axes.set_title("A virtual cluster over one image on Ceph")
    axes.legend(fontsize=8)
    _save(pyplot, figure, path)


def _points(found: Dict[str, Data], prefix: str) -> List[Tuple[int, float]]:
    return sorted(
        (int(name[len(prefix) :]), figure["median"])
        for name, figure in found.items()
        if name.startswith(prefix)
    )


def _rates(path: Path, found: Dict[str, Data]) -> None:
    """MiB/s of a disk on each way (figures 4a and 4b)."""
    pyplot = _pyplot()
    workloads = list(dict.fromkeys(name.split("/")[2] for name in found if name.startswith("cluster/rate/")))
    figure, panes = pyplot.subplots(1, len(workloads), figsize=(3 * len(workloads), 4))
    for axes, workload in zip(panes, workloads):
        mine = {
            name.split("/")[3]: figure
            for name, figure in found.items()
            if name.startswith(f"cluster/rate/{workload}/")
        }
        bars = {"raw": mine["overlay"]["baseline"], **mine}
        values = [bar["median"] for bar in bars.values()]
        low, high = ([abs(bar["median"] - bar["spread"][end]) for bar in bars.values()] for end in (0, 1))
        axes.bar(
            list(bars),
            values,
            yerr=[low, high],
            color=[f"C{number}" for number in range(len(bars))],
            error_kw={"lw": 0.8},
        )
        axes.set_xticks(range(len(bars)), list(bars), rotation=45, ha="right", fontsize=8)
        axes.set_title(workload)
    panes[0].set_ylabel("MiB/s")
    _save(pyplot, figure, path)


def _commits(path: Path, found: Dict[str, Data]) -> None:
    """Seconds of a commit by size of the diff (figure 5c), beside plain qemu-img commit of the same."""
    pyplot = _pyplot()
    kinds = list(dict.fromkeys(name.split("/")[2] for name in found if name.startswith("commit/seconds/")))
    figure, panes = pyplot.subplots(1, len(kinds), figsize=(4 * len(kinds), 4))
    for axes, kind in zip(panes, kinds):
        mine = {name: figure for name, figure in found.items() if name.startswith(f"commit/seconds/{kind}/")}
        empty = mine.pop(next((name for name in mine if name.split("/")[3] == "0"), ""), None)
        for number, pattern in enumerate(dict.fromkeys(name.split("/")[4] for name in mine)):
            sizes = [(0, empty)] if empty else []
            sizes += [
                (int(name.split("/")[3]), figure)
                for name, figure in mine.items()
                if name.endswith(f"/{pattern}")
            ]
            color, across = f"C{number}", [size for size, _ in sizes]
            axes.plot(
                across,
                [it["baseline"]["median"] for _, it in sizes],
                marker="o",
                color=color,
                label=f"{pattern}: ours",
            )
            axes.plot(
                across,
                [it["median"] for _, it in sizes],
                marker="x",
                ls="--",
                color=color,
                label="by qemu-img commit",
            )
        axes.set_title(kind)
        axes.set_xlabel("MiB written by the guest")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    panes[0].set_ylabel("s")
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
