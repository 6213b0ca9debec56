#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Run benchmarks; write build/bench.json and plots beside it (`make bench`).

    bench/run.py [--quick] [NAME ...]     names: io clone ceph actions creation choice stage migrate prolog
    commit cluster many peer shares
                                          guests pool (that is: orders rebalance devices plain beside moved
                                          memory extents) and, by name alone: options large interference
                                          hot releases backup
    bench/run.py --docs [TABLE ...]       write the tables in docs/ (all, or those) from build/bench.json

All of it ends within 80 minutes (schedule.py). A benchmark that fails has no figures, and the run goes on.

Times mean nothing on a shared machine: every figure is compared with a baseline of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent))

import access  # noqa: E402
import actions  # noqa: E402
import backups  # noqa: E402
import choice  # noqa: E402
import clone  # noqa: E402
import cluster  # noqa: E402
import commits  # noqa: E402
import devices  # noqa: E402
import extents  # noqa: E402
import guests  # noqa: E402
import hot  # noqa: E402
import many  # noqa: E402
import memory  # noqa: E402
import migrate  # noqa: E402
import moved  # noqa: E402
import orders  # noqa: E402
import overlay  # noqa: E402
import page  # noqa: E402
import peer  # noqa: E402
import plots  # noqa: E402
import rebalance  # noqa: E402
import releases  # noqa: E402
import schedule  # noqa: E402
import stage  # noqa: E402
import tables  # noqa: E402
from figures import Figure, Pace  # noqa: E402

import ceph  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
BENCHMARKS: Dict[str, Callable[[bool], List[Figure]]] = {
    "io": overlay.io,
    "clone": clone.clone,
    "ceph": ceph.ceph,
    "actions": actions.actions,
    "options": overlay.options,
    "large": overlay.large,
    "creation": overlay.creation,
    "choice": choice.choice,
    "stage": stage.stage,
    "interference": stage.interference,
    "hot": hot.hot,
    "migrate": migrate.migrate,
    "releases": releases.releases,
    "prolog": releases.prolog,
    "commit": commits.commits,
    "cluster": cluster.cluster,
    "orders": orders.orders,
    "rebalance": rebalance.rebalance,
    "devices": devices.devices,
    "plain": devices.plain,
    "beside": devices.beside,
    "moved": moved.moved,
    "memory": memory.memory,
    "extents": extents.extents,
    "many": many.many,
    "peer": peer.peer,
    "shares": access.shares,
    "guests": guests.guests,
    "backup": backups.backup,
}
GROUPS = {"pool": ("orders", "rebalance", "devices", "plain", "beside", "moved", "memory", "extents")}
"""What one name stands for."""


def machine() -> Dict[str, Any]:
    """Say what kind of machine this is."""
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }


def this_run() -> Dict[str, Any]:
    """Say when this run began, and of which commit it is: what tables on a page have in common if they are of
    one run.
    """
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    told = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    ]
    return {
        "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        "commit": told[0] + " and changes" * bool(told[1]),
    }


def main() -> int:
    """Run what was asked for; the exit code says whether all of it could be measured, not whether budgets
    were met.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few samples: to see that it works, not to believe"
    )
    parser.add_argument("--docs", action="store_true", help="only write tables in docs/")
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(BENCHMARKS))
    arguments = parser.parse_args()
    arguments.names = [name for given in arguments.names for name in GROUPS.get(given, (given,))]
    unknown = set(arguments.names) - set(page.BLOCKS if arguments.docs else BENCHMARKS)
    if unknown:
        parser.error(f"no such {'table' if arguments.docs else 'benchmark'}: {', '.join(sorted(unknown))}")
    out = BUILD / "bench.json"
    if arguments.docs:
        page.write(json.loads(out.read_text()), ROOT / "docs", arguments.names)
        for plot in page.plots(arguments.names):
            if (BUILD / plot).exists():
                shutil.copy(BUILD / plot, ROOT / "docs/reference")
        return 0
    if os.geteuid():
        parser.error("benchmarks need root: they put up a lab")
    # A way out through every `finally`: the lab and the images must go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    BUILD.mkdir(exist_ok=True)
    for plot in page.plots(arguments.names):
        (BUILD / plot).unlink(missing_ok=True)  # those of a run before are not of this one
    report: Dict[str, Any] = {"machine": machine(), "runs": {}, "figures": []}
    if arguments.names and out.exists():
        report = json.loads(out.read_text())
        report["machine"] = machine()
    failed = run(arguments.names, arguments.quick, report, out)
    try:
        plots.draw(report, BUILD)
    except Exception:  # noqa: BLE001 - what was measured is written
        traceback.print_exc()
        failed.append("plots")
    missed = [figure["name"] for figure in report["figures"] if figure["met"] is False]
    print(f"budgets missed: {', '.join(missed) or 'none'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def run(names: Sequence[str], quick: bool, report: Dict[str, Any], out: Path) -> List[str]:
    """Run these, or all that `schedule` has if there are none, and write the report after each; return which
    have failed.
    """
    of, began = this_run(), time.monotonic()
    failed = []
    for name in names or list(schedule.SECONDS):
        print(f"== {name}, {schedule.seconds_of(name)} expected", flush=True)
        before, started = os.getloadavg(), time.monotonic()
        figures: List[Dict[str, Any]] = []
        error = ""
        Pace.factor = 1.0 if names else schedule.pace(name, started - began)
        try:
            with schedule.ends("" if names else name, started - began):
                figures = [{**figure.data(), "benchmark": name} for figure in BENCHMARKS[name](quick)]
        except BaseException as e:  # noqa: BLE001 - whatever it is, also one of pytest's, the others can be measured
            if isinstance(e, (KeyboardInterrupt, SystemExit)):
                raise
            traceback.print_exc()
            error = f"{type(e).__name__}: {e}"
            failed.append(name)
        report["runs"][name] = {
            "seconds": round(time.monotonic() - started, 1),
            "load_before": [round(value, 2) for value in before],
            "load_after": [round(value, 2) for value in os.getloadavg()],
            "pace": round(Pace.factor, 2),
            "quick": quick,
            "error": error,
            "of": of,
        }
        # Also of one that failed: what it found before is of another run.
        report["figures"] = [figure for figure in report["figures"] if figure["benchmark"] != name] + figures
        out.write_text(json.dumps(report, indent=1) + "\n")
        print(tables.text_table(figures), flush=True)
        print(
            f"== {name}: {'FAILED, ' + error if error else 'done'} after {report['runs'][name]['seconds']} s",
            flush=True,
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
