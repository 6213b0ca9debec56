# SPDX-License-Identifier: Apache-2.0
"""Tables from bench.json: for the terminal, and for docs/ between `<!-- bench: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

Data = Dict[str, Any]
PAGES = ("reference/benchmarks.md", "explanation/overlay-options.md")
BLOCK = re.compile(r"(<!-- bench: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def number(value: Optional[float]) -> str:
    """Show a number with three digits that mean something."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = f"{value:.3g}"
    return f"{float(digits):,.0f}" if abs(value) >= 100 else digits


def _spread(found: Data) -> str:
    return f"{number(found['median'])} ({number(found['spread'][0])} to {number(found['spread'][1])})"


def _budget(figure: Data) -> str:
    budget = figure["budget"]
    return f"{budget['of']} {budget['sign'].replace('>=', '≥').replace('<=', '≤')} {number(budget['limit'])}" if budget else ""


def _ratio(figure: Data) -> str:
    if figure["ratio"] is None:
        return "-"
    spread = figure["ratio_spread"]
    return number(figure["ratio"]) + (f" ({number(spread[0])} to {number(spread[1])})" if spread else "")


def _met(figure: Data) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure["met"]]


def text_table(figures: Sequence[Data]) -> str:
    """Return a plain table of figures."""
    rows = [("figure", "median", "unit", "n", "ratio", "expected", "budget", "met")]
    for f in figures:
        cells = (f["name"], number(f["median"]), f["unit"], str(f["n"]), _ratio(f), number(f["expected"]), _budget(f), _met(f))
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _by_name(report: Data) -> Dict[str, Data]:
    return {figure["name"]: figure for figure in report["figures"]}


def machine(report: Data) -> str:
    """Say where, and how busy it was."""
    found = report["machine"]
    loads = [load for run in report["runs"].values() for load in (run["load_before"][0], run["load_after"][0])]
    return (
        f"Measured on a virtual machine with {found['cores']} cores and {found['memory_gib']} GiB that others share, Linux "
        f"{found['kernel']}, Python {found['python']}; load between {number(min(loads))} and {number(max(loads))} before and "
        "after each benchmark, itself included.\n"
    )


def budgets(report: Data) -> str:
    """Every figure with a budget; the actions in one line, they have a table of their own."""
    rows = []
    first = [f for f in report["figures"] if f["budget"] and f["name"].startswith("actions/")]
    for figure in report["figures"]:
        if figure["budget"] and figure not in first:
            base = figure["baseline"]
            against = f"{base['what']}: {number(base['median'])}" if base else ""
            rows.append([
                figure["what"], f"{_spread(figure)} {figure['unit']}", against,
                _ratio(figure), number(figure["expected"]), _budget(figure), _met(figure), str(figure["n"]),
            ])  # fmt: skip
    if first:
        worst = max(first, key=lambda f: float(f["ratio"]))
        base = worst["baseline"]
        rows.append([
            f"{worst['what']} (the dearest of {len(first)} actions)", f"{_spread(worst)} {worst['unit']}",
            f"{base['what']}: {number(base['median'])}", _ratio(worst), number(worst["expected"]), _budget(worst), _met(worst),
            str(worst["n"]),
        ])  # fmt: skip
    return _table(["what", "measured", "baseline", "ratio", "expected", "budget", "met", "n"], rows)


def clone(report: Data) -> str:
    """Clones by size."""
    found = _by_name(report)
    rows = []
    for name in found:
        if not name.startswith("clone/warm/"):
            continue
        size = name.rsplit("/", 1)[1]
        first, scp = found[f"clone/first/{size}"], found[f"clone/scp/{size}"]
        rows.append([
            size, number(found[name]["median"]), number(found[name]["baseline"]["median"]), _ratio(found[name]),
            number(first["median"]), number(first["baseline"]["median"]), _ratio(first), number(scp["median"]),
            _ratio(found[f"clone/warm-against-copy/{size}"]), number(found[f"clone/warm-store-bytes/{size}"]["median"]),
            number(found[f"clone/warm-network/{size}"]["median"]),
        ])  # fmt: skip
    head = [
        "data", "further clone, s", "bare `ssh qemu-img create`, s", "ratio", "first clone, s", "full copy (tar), s",
        "ratio", "scp, s", "further clone / full copy", "store bytes, further", "front-end network, KiB",
    ]  # fmt: skip
    return _table(head, rows)


def stage(report: Data) -> str:
    """Seconds to N hosts, by way; below, what faults cost."""
    found = _by_name(report)
    ways: Dict[str, Dict[int, Data]] = {}
    for name, figure in found.items():
        parts = name.split("/")
        if parts[0] == "stage" and len(parts) == 3 and parts[2].isdigit():
            ways.setdefault(parts[1], {})[int(parts[2])] = figure
    counts = sorted({count for way in ways.values() for count in way})
    rows = []
    for name, way in ways.items():
        last = way[max(way)]
        rows.append([name, *(number(way[n]["median"]) if n in way else "" for n in counts), _ratio(last), number(last["expected"])])
    text = _table(["way", *(f"N = {n}, s" for n in counts), "last / N = 1", "expected"], rows)
    others = [
        [f["what"], f"{number(f['median'])} {f['unit']}", f["baseline"]["what"] if f["baseline"] else "", _ratio(f),
         number(f["expected"]), _budget(f), _met(f)]
        for name, f in found.items() if name.startswith("stage/") and not name.rsplit("/", 1)[1].isdigit()
    ]  # fmt: skip
    return text + "\n" + _table(["what", "measured", "baseline", "ratio", "expected", "budget", "met"], others)


def ceph(report: Data) -> str:
    """Disks from RBD images by size."""
    found = _by_name(report)
    rows = []
    for name in found:
        if not name.startswith("ceph/warm/"):
            continue
        size = name.rsplit("/", 1)[1]
        first, warm = found[f"ceph/first/{size}"], found[name]
        reads = [number(found[f"ceph/{kind}-read/{size}"]["median"]) for kind in ("export", "first", "warm")]
        rows.append([
            size, _spread(warm["baseline"]), _spread(first), _ratio(first), number(first["expected"]), _spread(warm),
            _ratio(warm), number(warm["expected"]), *reads, number(found[f"ceph/warm-data/{size}"]["median"]),
        ])  # fmt: skip
    head = [
        "image", "stock: `rbd export`, s", "first disk, s", "of an export", "expected", "further disk, s", "of an export",
        "expected", "MiB read, export", "first", "further (headers)", "data bytes read, further",
    ]  # fmt: skip
    return _table(head, rows)


def actions(report: Data) -> str:
    """Every action of tm/ and datastore/."""
    found = _by_name(report)
    rows = []
    for name, figure in found.items():
        if name.startswith("actions/") and name.endswith("/first"):
            stem = name.rsplit("/", 1)[0]
            rows.append([
                stem.split("/", 1)[1], _spread(figure), number(10 * figure["expected"] if figure["expected"] else None),
                _ratio(figure), _met(figure), _spread(found[f"{stem}/cpu"]), number(found[f"{stem}/host-cpu"]["median"]),
                _spread(found[f"{stem}/wall"]), str(figure["n"]),
            ])  # fmt: skip
    python = found.get("actions/python")
    text = f"Baseline: `python3 -I -c pass` costs {_spread(python)} ms CPU.\n\n" if python else ""
    head = [
        "action", "CPU until first command, ms", "expected", "of the baseline", "met", "CPU on the front-end, ms",
        "CPU on the hosts, ms", "wall, s", "n",
    ]  # fmt: skip
    return text + _table(head, rows)


def migrate(report: Data) -> str:
    """Live migrations by way, a line for each load; below, what has a budget."""
    found = _by_name(report)
    rows = []
    for load in dict.fromkeys(name.rsplit("/", 1)[1] for name in found if name.startswith("migrate/all-bytes/")):
        for way, words in (("shared", "all disks in place"), ("own", "by our drivers"), ("stock", "`--copy-storage-all`")):
            size = found[f"migrate/all-bytes/{way}/{load}"]
            row = [load, words, number(size["median"] / (1 << 20))]
            for key in ("seconds", "downtime", "gap", "kept"):
                figure = found[f"migrate/{'stock-' * (way == 'stock')}{key}/{load}"]
                text = number(figure["baseline"]["median"] if way == "shared" else figure["median"])
                row.append(text if way == "shared" else f"{text} ({_ratio(figure)}, expected {number(figure['expected'])})")
            rows.append([*row, str(size["n"])])
    head = [
        "guest", "way", "MiB that cross", "time, s", "stands still, ms", "longest wait of a write, ms", "writes/s kept", "n",
    ]  # fmt: skip
    others = [
        [f["what"], f"{number(f['median'])} {f['unit']}", f["baseline"]["what"], _ratio(f), number(f["expected"]), _budget(f), _met(f)]
        for name, f in found.items() if name.startswith(("migrate/bytes/", "migrate/scattered", "migrate/stock")) and name.count("-") == 0
    ]  # fmt: skip
    run = report["runs"]["migrate"]
    load = f"Load {number(run['load_before'][0])} before, {number(run['load_after'][0])} after, itself included.\n\n"
    return load + _table(head, rows) + "\n" + _table(["what", "measured", "baseline", "ratio", "expected", "budget", "met"], others)


def _plain(report: Data, prefix: str) -> str:
    """Every figure whose name begins so, a line each."""
    rows = []
    for name, figure in _by_name(report).items():
        if name.startswith(prefix):
            base = figure["baseline"]
            against = f"{base['what']}: {number(base['median'])}" if base else ""
            measured = f"{_spread(figure)} {figure['unit']}"
            rows.append([
                figure["what"], measured, against, _ratio(figure), number(figure["expected"]), _budget(figure), _met(figure),
                str(figure["n"]),
            ])  # fmt: skip
    run = report["runs"][prefix.rstrip("/")]
    load = f"Load {number(run['load_before'][0])} before, {number(run['load_after'][0])} after, itself included.\n\n"
    return load + _table(["what", "measured", "baseline", "ratio", "expected", "budget", "met", "n"], rows)


def commit(report: Data) -> str:
    """Commits of diffs, by kind of store."""
    return _plain(report, "commit/")


def cluster(report: Data) -> str:
    """Phases of a virtual cluster, rates of its disks."""
    return _plain(report, "cluster/")


def pool(report: Data) -> str:
    """Orders of a pool side by side."""
    found = _by_name(report)
    rows = []
    for name in [name[: -len("/full")] for name in found if name.startswith("pool/") and name.endswith("/full")]:
        _, devices, way = name.split("/")
        fair, added, removed = (found.get(f"{name}/{part}") for part in ("fair", "added", "removed"))
        spread = [_spread(fair), _ratio(added), _ratio(removed)] if fair and added and removed else ["-"] * 3
        rows.append([devices, way, *spread, _spread(found[f"{name}/full"])])
    head = ["devices", "order", "fullest / its share", "moved when one comes / least", "moved when one goes / least",
            "fill of the pool when the first file does not fit"]  # fmt: skip
    return _table(head, rows)


def options(report: Data) -> str:
    """Overlay options, one table for each size of image."""
    found = _by_name(report)
    parts: List[str] = []
    for size in dict.fromkeys(name.split("/")[1] for name in found if name.startswith("overlay-options/")):
        rows = []
        for name in dict.fromkeys(name.split("/")[2] for name in found if name.startswith(f"overlay-options/{size}/")):
            row = [name]
            for key in ("4k first write", "64k first write", "4k rewrite", "4k read"):
                figure = found.get(f"overlay-options/{size}/{name}/{key}")
                text = _ratio(figure) if figure else "-"
                if figure and key in ("4k first write", "64k first write"):
                    text += f", expected {number(figure['expected'])}"
                row.append(text)
            rows.append([*row, str(found[f"overlay-options/{size}/{name}/4k rewrite"]["n"])])
        head = ["overlay", "4k first write", "64k first write", "4k rewrite", "4k read", "n"]
        parts.append(f"Image of {size}, ratios to raw (quartiles):\n\n{_table(head, rows)}")
    return "\n".join(parts)


def creation(report: Data) -> str:
    """Creation time and size of overlays by size of image."""
    found = _by_name(report)
    keys = [name.split("/")[1:3] for name in found if name.startswith("overlay-create/")]
    sizes, names = dict.fromkeys(key[0] for key in keys), dict.fromkeys(key[1] for key in keys)
    rows = []
    for name in names:
        row = [name]
        for size in sizes:
            create, allocated = (found[f"overlay-create/{size}/{name}/{key}"]["median"] for key in ("create", "allocated"))
            row.append(f"{number(1000 * create)} ms, {number(allocated)} KiB")
        rows.append(row)
    return _table(["overlay", *sizes], rows)


def overlay(report: Data) -> str:
    """The chosen overlay and one with its file's length set, against raw."""
    rows = [
        [f["what"], f"{_spread(f)} {f['unit']}", number(f["baseline"]["median"]), _ratio(f), number(f["expected"]), str(f["n"])]
        for f in report["figures"]
        if f["name"].startswith("overlay-io")
    ]
    return _table(["what", "measured", "raw", "ratio", "expected", "n"], rows)


BLOCKS: Dict[str, Callable[[Data], str]] = {
    "machine": machine, "budgets": budgets, "clone": clone, "ceph": ceph, "actions": actions, "overlay": overlay,
    "options": options, "creation": creation, "stage": stage, "migrate": migrate,
    "commit": commit, "cluster": cluster, "pool": pool,
}  # fmt: skip


PLOTS = {"stage": ["bench-stage.svg"], "cluster": ["bench-cluster-phases.svg", "bench-cluster-rates.svg"], "commit": ["bench-commit.svg"]}


def plots(names: Sequence[str]) -> List[str]:
    """Return the plots that are shown beside tables: those of `names`, all if that is empty."""
    return [plot for name, shown in PLOTS.items() if not names or name in names for plot in shown]


def write(report: Data, docs: Path, names: Sequence[str]) -> None:
    """Put the tables into the pages: those of `names`, all if that is empty."""
    for name in PAGES:
        path = docs / name
        text = path.read_text(encoding="utf-8")

        def block(match: "re.Match[str]") -> str:
            if names and match.group(2) not in names:
                return match.group(0)
            return match.group(1) + BLOCKS[match.group(2)](report) + match.group(3)

        path.write_text(BLOCK.sub(block, text), encoding="utf-8")
        print(f"docs/{name} written")
