# SPDX-License-Identifier: Apache-2.0
"""Tables from bench.json: for the terminal, and for docs/ between `<!-- bench: NAME -->` and `<!-- end
-->`.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Callable, Dict, List, Sequence

import page_actions
import page_choice
import page_pool
import page_shares
import tables
from tables import Data, budget, by_name, met, number, plain, ratio, spread, table

PAGES = ("reference/benchmarks.md", "explanation/overlay-options.md")
BLOCK = re.compile(
    r"(?P<begin><!-- bench: (?P<name>[a-z]+) -->\n)(?P<was>.*?)(?P<end><!-- end -->)", re.DOTALL
)


def machine(report: Data) -> str:
    """Say where, and how busy it was."""
    found = report["machine"]
    loads = [
        load for run in report["runs"].values() for load in (run["load_before"][0], run["load_after"][0])
    ]
    return (
        f"Measured on a virtual machine with {found['cores']} cores and {found['memory_gib']} GiB "
        f"that others share, Linux "
        f"{found['kernel']}, Python {found['python']}; load between {number(min(loads))} and "
        f"{number(max(loads))} before and "
        f"after each benchmark, itself included. {_runs(report)}{_failed(report)}\n"
    )


def _failed(report: Data) -> str:
    failed = [name for name, run in report["runs"].items() if run.get("error")]
    return f" Failed, and so not in it: {', '.join(failed)}." if failed else ""


def _runs(report: Data) -> str:
    """Say whether all of it is one run, and of what."""
    runs = report["runs"].values()
    of = {(run["of"]["began"], run["of"]["commit"]) for run in runs if "of" in run}
    if len(of) != 1 or not all("of" in run for run in runs):
        return f"Put together from {len(of) if all('of' in run for run in runs) else 'several'} runs."
    ((began, commit),) = of
    return (
        f"All in one run of {sum(run['seconds'] for run in runs) / 60:.0f} minutes, of commit "
        f"{commit}, from {began} (UTC) on."
    )


def runs(report: Data) -> str:
    """Every benchmark of the report, in the order in which they ran: how long, and how busy the machine
    was.
    """
    rows = []
    for name, run in sorted(report["runs"].items(), key=lambda pair: pair[1].get("of", {}).get("began", "")):
        loads = [number(run[key][0]) for key in ("load_before", "load_after")]
        rows.append(
            [
                name,
                number(run["seconds"]),
                *loads,
                number(run.get("pace", 1)),
                run.get("error", "") and "failed",
            ]
        )
    return table(["benchmark", "s", "load before", "load after", "time for rounds, of the planned", ""], rows)


def budgets(report: Data) -> str:
    """Every figure with a budget; the actions in one line, they have a table of their own."""
    rows = []
    first = [f for f in report["figures"] if f["budget"] and f["name"].startswith("actions/")]
    for figure in report["figures"]:
        if figure["budget"] and figure not in first:
            base = figure["baseline"]
            against = f"{base['what']}: {number(base['median'])}" if base else ""
            rows.append(
                [
                    figure["what"],
                    f"{spread(figure)} {figure['unit']}",
                    against,
                    ratio(figure),
                    number(figure["expected"]),
                    budget(figure),
                    met(figure),
                    str(figure["n"]),
                ]
            )
    if first:
        worst = max(first, key=lambda f: float(f["ratio"]))
        base = worst["baseline"]
        rows.append(
            [
                f"{worst['what']} (the dearest of {len(first)} actions)",
                f"{spread(worst)} {worst['unit']}",
                f"{base['what']}: {number(base['median'])}",
                ratio(worst),
                number(worst["expected"]),
                budget(worst),
                met(worst),
                str(worst["n"]),
            ]
        )
    return table(
        ["what", "measured", "baseline", "ratio", "expected", "budget", "met", "n"], rows
    ) + tables.missed(report["figures"])


def clone(report: Data) -> str:
    """Clones by size."""
    found = by_name(report)
    rows = []
    for name in found:
        if not name.startswith("clone/warm/"):
            continue
        size = name.rsplit("/", 1)[1]
        first, scp = found[f"clone/first/{size}"], found[f"clone/scp/{size}"]
        rows.append(
            [
                size,
                number(found[name]["median"]),
                number(found[name]["baseline"]["median"]),
                ratio(found[name]),
                number(first["median"]),
                number(first["baseline"]["median"]),
                ratio(first),
                number(scp["median"]),
                ratio(found[f"clone/warm-against-copy/{size}"]),
                number(found[f"clone/warm-store-bytes/{size}"]["median"]),
                number(found[f"clone/warm-network/{size}"]["median"]),
            ]
        )
    head = [
        "data",
        "further clone, s",
        "bare `ssh qemu-img create`, s",
        "ratio",
        "first clone, s",
        "full copy (tar), s",
        "ratio",
        "scp, s",
        "further clone / full copy",
        "store bytes, further",
        "front-end network, KiB",
    ]
    return table(head, rows)


def stage(report: Data) -> str:
    """Seconds to N hosts, by way; below, what faults cost."""
    found = by_name(report)
    ways: Dict[str, Dict[int, Data]] = {}
    for name, figure in found.items():
        parts = name.split("/")
        if parts[0] == "stage" and len(parts) == 3 and parts[2].isdigit():
            ways.setdefault(parts[1], {})[int(parts[2])] = figure
    counts = sorted({count for way in ways.values() for count in way})
    rows = []
    for name, way in ways.items():
        last = way[max(way)]
        rows.append(
            [
                name,
                *(number(way[n]["median"]) if n in way else "" for n in counts),
                ratio(last),
                number(last["expected"]),
            ]
        )
    text = table(["way", *(f"N = {n}, s" for n in counts), "last / N = 1", "expected"], rows)
    others = [
        [
            f["what"],
            f"{number(f['median'])} {f['unit']}",
            f["baseline"]["what"] if f["baseline"] else "",
            ratio(f),
            number(f["expected"]),
            budget(f),
            met(f),
            str(f["n"]),
        ]
        for name, f in found.items()
        if name.startswith("stage/") and not name.rsplit("/", 1)[1].isdigit()
    ]
    return (
        text
        + "\n"
        + table(["what", "measured", "baseline", "ratio", "expected", "budget", "met", "n"], others)
    )


def ceph(report: Data) -> str:
    """Disks from RBD images by size."""
    found = by_name(report)
    rows = []
    for name in found:
        if not name.startswith("ceph/warm/"):
            continue
        size = name.rsplit("/", 1)[1]
        first, warm = found[f"ceph/first/{size}"], found[name]
        reads = [number(found[f"ceph/{kind}-read/{size}"]["median"]) for kind in ("export", "first", "warm")]
        rows.append(
            [
                size,
                spread(warm["baseline"]),
                spread(first),
                ratio(first),
                number(first["expected"]),
                spread(warm),
                ratio(warm),
                number(warm["expected"]),
                ratio(found[f"ceph/warm-dir/{size}"]) if f"ceph/warm-dir/{size}" in found else "-",
                *reads,
                number(found[f"ceph/warm-data/{size}"]["median"]),
            ]
        )
    head = [
        "image",
        "stock: `rbd export`, s",
        "first disk, s",
        "of an export",
        "expected",
        "further disk, s",
        "of an export",
        "expected",
        "of one on a mounted store",
        "MiB read, export",
        "first",
        "further (headers)",
        "data bytes read, further",
    ]
    return table(head, rows)


def migrate(report: Data) -> str:
    """Live migrations by way, a line for each load; below, what has a budget."""
    found = by_name(report)
    rows = []
    for load in dict.fromkeys(
        name.rsplit("/", 1)[1] for name in found if name.startswith("migrate/all-bytes/")
    ):
        for way, words in (
            ("shared", "all disks in place"),
            ("own", "by our drivers"),
            ("stock", "`--copy-storage-all`"),
        ):
            size = found[f"migrate/all-bytes/{way}/{load}"]
            row = [load, words, number(size["median"] / (1 << 20))]
            for key in ("seconds", "downtime", "gap", "kept"):
                figure = found[f"migrate/{'stock-' * (way == 'stock')}{key}/{load}"]
                text = number(figure["baseline"]["median"] if way == "shared" else figure["median"])
                row.append(
                    text
                    if way == "shared"
                    else f"{text} ({ratio(figure)}, expected {number(figure['expected'])})"
                )
            rows.append([*row, str(size["n"])])
    head = [
        "guest",
        "way",
        "MiB that cross",
        "time, s",
        "stands still, ms",
        "longest wait of a write, ms",
        "writes/s kept",
        "n",
    ]
    others = [
        [
            f["what"],
            f"{number(f['median'])} {f['unit']}",
            f["baseline"]["what"],
            ratio(f),
            number(f["expected"]),
            budget(f),
            met(f),
        ]
        for name, f in found.items()
        if name.startswith(("migrate/bytes/", "migrate/scattered", "migrate/stock")) and name.count("-") == 0
    ]
    text = tables.load(report, "migrate") + table(head, rows) + "\n"
    return text + table(["what", "measured", "baseline", "ratio", "expected", "budget", "met"], others)


def commit(report: Data) -> str:
    """Commits of diffs, by kind of store."""
    return plain(report, "commit/")


def cluster(report: Data) -> str:
    """Phases of a virtual cluster, rates of its disks."""
    return plain(report, "cluster/")


def creation(report: Data) -> str:
    """Creation time and size of overlays by size of image."""
    found = by_name(report)
    keys = [name.split("/")[1:3] for name in found if name.startswith("overlay-create/")]
    sizes, names = dict.fromkeys(key[0] for key in keys), dict.fromkeys(key[1] for key in keys)
    rows = []
    for name in names:
        row = [name]
        for size in sizes:
            create, allocated = (
                found[f"overlay-create/{size}/{name}/{key}"]["median"] for key in ("create", "allocated")
            )
            row.append(f"{number(1000 * create)} ms, {number(allocated)} KiB")
        rows.append(row)
    return table(["overlay", *sizes], rows)


def overlay(report: Data) -> str:
    """The chosen overlay against raw."""
    rows = [
        [
            f["what"],
            f"{spread(f)} {f['unit']}",
            number(f["baseline"]["median"]),
            ratio(f),
            number(f["expected"]),
            str(f["n"]),
        ]
        for f in report["figures"]
        if f["name"].startswith("overlay-io")
    ]
    return table(["what", "measured", "raw", "ratio", "expected", "n"], rows)


BLOCKS: Dict[str, Callable[[Data], str]] = {
    "machine": machine,
    "runs": runs,
    "budgets": budgets,
    "clone": clone,
    "ceph": ceph,
    "overlay": overlay,
    "creation": creation,
    "stage": stage,
    "migrate": migrate,
    "commit": commit,
    "cluster": cluster,
    "many": functools.partial(plain, prefix="many/"),
    **{name: functools.partial(plain, prefix=f"{name}/") for name in ("peer", "guests", "hot", "backup")},
    **page_actions.BLOCKS,
    **page_pool.BLOCKS,
    **page_shares.BLOCKS,
    **page_choice.BLOCKS,
}
APART = ("hot", "releases", "backup")
"""Tables of benchmarks that a run without names leaves out: each says of which run it is, and stays until
there is another.
"""
OF_ALL = ("machine", "runs", "budgets")
"""Tables that are of all benchmarks of a report; each other one is of that with its name, but:"""
OF = {"overlay": "io"}


PLOTS = {
    "stage": ["bench-stage.svg"],
    "cluster": ["bench-cluster-phases.svg", "bench-cluster-rates.svg"],
    "commit": ["bench-commit.svg"],
}


def plots(names: Sequence[str]) -> List[str]:
    """Return the plots that are shown beside tables: those of `names`, all if that is empty."""
    return [plot for name, shown in PLOTS.items() if not names or name in names for plot in shown]


def write(report: Data, docs: Path, names: Sequence[str]) -> None:
    """Put the tables into the pages: those of `names`, all if that is empty; then a table that the report
    lacks goes from its page.
    """
    for name in PAGES:
        path = docs / name
        text = path.read_text(encoding="utf-8")

        def block(match: "re.Match[str]") -> str:
            return match["begin"] + _table(match["name"], match["was"], report, names) + match["end"]

        path.write_text(BLOCK.sub(block, text), encoding="utf-8")
        print(f"docs/{name} written")


def _table(name: str, was: str, report: Data, names: Sequence[str]) -> str:
    """Return what is to stand between the two marks of a table."""
    run = report["runs"].get(OF.get(name, name))
    if names and name == "machine" and not set(names) <= set(APART):
        return (
            machine(report)
            + f"\nOf that, on this page: {', '.join(names)}. All other tables are of a run before.\n"
        )
    if (names and name not in names) or (run is None and name in APART):
        return was
    if name not in OF_ALL:
        if run is None:
            return "Not taken in this run.\n"
        if run.get("error"):
            return "It failed in this run.\n"
    if any(run["quick"] for run in ([run] if run else report["runs"].values())):
        raise ValueError(f"{name} was run with --quick: that is to see that it works, not to be published")
    text = BLOCKS[name](report)
    if name in APART and run:
        return f"Of commit {run['of']['commit']}, from {run['of']['began']} (UTC) on. {text}"
    return text
