#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Run test suites and write build/report.json: per suite passed, failed, skipped and why, total, and its
figures.

    tests/suites.py [--full] [SUITE ...]

Without --full, tests marked `long` are left out: what they prove for one kind of store or one step, others
prove too. A required suite that did not run, ran no test, or took longer than its minutes counts as failed.
So does a cell of the matrix (tests/matrix.py) that no test reported, when all suites run. Suites that have
labs of their own run seven at a time, also on two cores (they wait for ssh, for timeouts and for limited
links); what each says is printed when it has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import costs
import matrix
from lab import roots
from lab.cgroups import Account

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
AT_ONCE = 7
"""On two processors, since two thirds of what a suite takes is waiting: for ssh, for time limits, for limited
links.
"""
TOOLS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/tools/test_*.py"))
SUITES: Dict[str, Dict[str, Any]] = {
    "lint": {"command": ["tests/lint.sh"], "minutes": 5, "first": True},
    "types": {"command": ["tests/types.sh"], "minutes": 10, "first": True},
    "unit": {"paths": ["tests/unit"], "minutes": 15, "first": True},
    "system": {"paths": ["tests/system"], "minutes": 60},
    "tools-more": {"paths": [path for path in TOOLS if path > "tests/tools/test_l"], "minutes": 60},
    "trust": {"paths": ["tests/trust"], "minutes": 30},
    "staging": {
        "paths": [
            f"tests/staging/test_{name}.py"
            for name in (
                "base",
                "peers",
                "stage",
                "second_boot",
                "several_bases",
                "networks",
                "firewall",
                "faults",
            )
        ],
        "minutes": 45,
    },
    "tools": {"paths": [path for path in TOOLS if path < "tests/tools/test_l"], "minutes": 60},
    "ceph": {"paths": ["tests/ceph"], "minutes": 45},
    "live": {
        "paths": [
            f"tests/faults/test_{name}.py"
            for name in (
                "live_kill",
                "libvirtd",
                "go_over_kill",
                "commit_live",
            )
        ],
        "minutes": 45,
    },
    "shares": {"paths": ["tests/shares"], "minutes": 40},
    "cephfaults": {"paths": ["tests/cephfaults"], "minutes": 45},
    "pool": {"paths": ["tests/pool"], "minutes": 40},
    "cephstore": {"paths": ["tests/cephstore"], "minutes": 45},
    "retry": {"paths": ["tests/faults/test_retry.py", "tests/faults/test_hang.py"], "minutes": 45},
    "nfs": {"paths": ["tests/nfs"], "minutes": 45},
    "increments": {"paths": ["tests/increments"], "minutes": 40},
    "neighbours": {"paths": ["tests/neighbours"], "minutes": 10},
    "replay": {"paths": ["tests/replay"], "minutes": 40},
    "faults": {
        "paths": [f"tests/faults/test_{name}.py" for name in ("faults", "bad_input", "links", "moves")],
        "minutes": 40,
    },
    "platforms": {"paths": ["tests/platforms"], "minutes": 40},
    "cephfs": {"paths": ["tests/cephfs"], "minutes": 45},
    "store": {"paths": ["tests/store"], "minutes": 30},
    "images": {"paths": ["tests/images"], "minutes": 20},
    "operate": {"paths": ["tests/operate"], "minutes": 40},
    "upgrade": {
        "paths": [
            f"tests/upgrade/test_{name}.py" for name in ("dir", "configuration", "killed", "downgrade")
        ],
        "minutes": 45,
    },
    "upgrade-ceph": {"paths": ["tests/upgrade/test_rbd.py"], "minutes": 45, "full": True},
    "kill": {"paths": ["tests/faults/test_kill.py"], "minutes": 40},
    "leaders": {"paths": ["tests/leaders"], "minutes": 40},
    "docs": {"paths": ["tests/docs"], "minutes": 30},
    "packages": {"paths": ["tests/packages"], "minutes": 30},
    "python": {"paths": ["tests/unit"], "minutes": 20, "runner": "other python", "full": True},
    "shell": {"paths": ["tests/shell"], "minutes": 30, "runner": "bats"},
    "staging-more": {"paths": ["tests/staging/test_more_faults.py"], "minutes": 30, "full": True},
}
"""The longest first (faults is with --full), so that none runs alone at the end: one that would is in two.
Minutes are where a suite hangs, also on a busy machine.

`first`: before the others, which need not run to know that a checkout is no good.
`runner`: what runs its files (RUNNERS), pytest if nothing is said.
"""


def run_command(suite: Dict[str, Any], log: Path, account: Account) -> Dict[str, Any]:
    """Run a suite that is one command: one check, passed or failed."""
    with open(log, "wb") as out:
        words = [*account.enter(), *suite["command"]]
        done = subprocess.run(
            words, cwd=ROOT, check=False, timeout=suite["minutes"] * 60, stdout=out, stderr=out
        )
    passed = int(done.returncode == 0)
    return {"passed": passed, "failed": 1 - passed, "skipped": 0, "total": 1}


def pytest(name: str, full: bool) -> Tuple[List[str], Path]:
    """Return the words that make pytest run files, and where its report will be."""
    xml = BUILD / f"junit-{name}.xml"
    which = [] if full else ["-m", "not long"]
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=5",
        f"--junitxml={xml}",
        *which,
    ], xml


def bats(name: str, _full: bool) -> Tuple[List[str], Path]:
    """Return the same for bats, which chooses the name of its report itself."""
    directory = BUILD / f"junit-{name}"
    directory.mkdir(exist_ok=True)
    # By env: one that is not installed is a suite that did not run.
    return [
        "/usr/bin/env",
        "bats",
        "--timing",
        "--report-formatter",
        "junit",
        "--output",
        str(directory),
    ], directory / "report.xml"


def other_python(name: str, full: bool) -> Tuple[List[str], Path]:
    """Return the same as for pytest, by the Python of the Debian release that labs have, else of 13."""
    release = os.environ.get(roots.PLATFORM, "")
    (_, *words), xml = pytest(name, full)
    return ["tests/lab/in_root.sh", release if release.isdigit() else "13", "/usr/bin/python3", *words], xml


RUNNERS: Dict[str, Callable[[str, bool], Tuple[List[str], Path]]] = {
    "pytest": pytest,
    "bats": bats,
    "other python": other_python,
}


def skips(report: ElementTree.ElementTree[ElementTree.Element]) -> Dict[str, int]:
    """Return why tests were skipped, by a runner's report, and how many for each reason."""
    reasons = Counter((node.get("message") or node.text or "").strip() for node in report.iter("skipped"))
    return dict(reasons.most_common())


def run_tests(name: str, suite: Dict[str, Any], full: bool, log: Path, account: Account) -> Dict[str, Any]:
    """Run a suite of tests and read its result from the runner's own report."""
    words, xml = RUNNERS[suite.get("runner", "pytest")](name, full)
    figures = BUILD / "figures" / f"{name}.json"
    for old in (xml, figures):
        old.unlink(missing_ok=True)
    figures.parent.mkdir(exist_ok=True)
    env = {
        **os.environ,
        **account.environment,
        "SEMISHARED_FIGURES": str(figures),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if full:
        env["SEMISHARED_FULL"] = "1"
    limit = suite["minutes"] * 60 * (4 if full else 1)
    late = ""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*account.enter(), *words, *suite["paths"]], cwd=ROOT, env=env, stdout=out, stderr=out
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = "took longer than its minutes"
            process.send_signal(signal.SIGINT)  # the runner then says what has failed so far
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    counts = {"passed": 0, "failed": 0, "skipped": 0, "total": 0}
    if xml.exists():
        for node in ElementTree.parse(xml).iter("testsuite"):
            values = {key: int(node.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
            counts["failed"] += values["failures"] + values["errors"]
            counts["skipped"] += values["skipped"]
            counts["total"] += values["tests"]
    counts["passed"] = counts["total"] - counts["failed"] - counts["skipped"]
    result: Dict[str, Any] = dict(counts)
    if counts["skipped"]:
        result["skips"] = skips(ElementTree.parse(xml))
    if late or (process.returncode and not counts["failed"]) or not counts["total"]:
        result["failed"] += 1
        result["total"] += 1
        result["why"] = late or "did not run"
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
    return result


def run_suite(name: str, full: bool) -> Dict[str, Any]:
    """Run one suite and print what it says, all at once; return its result."""
    started, log, account = time.monotonic(), BUILD / f"{name}.log", Account(name)
    try:
        if "command" in SUITES[name]:
            result = run_command(SUITES[name], log, account)
        else:
            result = run_tests(name, SUITES[name], full, log, account)
    except subprocess.TimeoutExpired:
        result = {"passed": 0, "failed": 1, "skipped": 0, "total": 1, "why": "took longer than its minutes"}
    result["seconds"] = round(time.monotonic() - started, 1)
    used = account.end()
    if used is not None:
        result["cpu seconds"] = round(used, 1)
    said = log.read_text(encoding="utf-8", errors="replace")
    print(f"== {name}\n{said}{result.get('why', '')}", flush=True)
    return result


def judge_matrix(report: Dict[str, Any]) -> Dict[str, Any]:
    """Print the matrix that all suites together have proved; a cell that nobody reported has failed."""
    cells = {tuple(cell) for result in report.values() for cell in result.get("figures", {}).get("cells", [])}
    missing = matrix.missing(cells)
    print(matrix.table(cells))
    for cell in missing:
        print(f"matrix: nothing proved {' '.join(cell)}")
    total = sum(map(matrix.must_report, matrix.CELLS))
    return {"passed": total - len(missing), "failed": len(missing), "skipped": 0, "total": total}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="hostile input at length")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=" ".join(SUITES))
    arguments = parser.parse_args()
    # Of what runs in the background interrupts are ignored, also of what that starts: a suite that is late
    # could not be told.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    BUILD.mkdir(exist_ok=True)
    meter = costs.Meter(BUILD)
    if not arguments.suites or {"lint", "types"} & set(arguments.suites):
        subprocess.run(["make", "-s", "build/venv/ready"], cwd=ROOT, check=False)
    names = arguments.suites or [
        name for name, suite in SUITES.items() if arguments.full or not suite.get("full")
    ]
    # What runs without leave to write byte code would compile it each time, also where each second is twenty
    # (nfs).
    subprocess.run([sys.executable, "-m", "compileall", "-q", "lib", "tests"], cwd=ROOT, check=False)
    report: Dict[str, Any] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = [name for name in names if SUITES[name].get("first")]
        others = [name for name in names if name not in first]
        # Seven labs would each find out, build and install the same.
        env = {**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}/lib"}
        words = [sys.executable, "-m", "lab", "prepare"]
        prepared = (
            pool.submit(subprocess.run, words, cwd=ROOT, env=env, check=False) if len(others) > 1 else None
        )
        for group in (first, others):
            if group is others and prepared:
                prepared.result()
            under_way = {pool.submit(run_suite, name, arguments.full): name for name in group}
            for done in as_completed(under_way):
                report[under_way[done]] = done.result()
                (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    rows = [
        f"{name:8} {report[name]['passed']:5} passed {report[name]['failed']:4} failed "
        f"{report[name]['skipped']:4} skipped"
        f" {report[name]['total']:5} total {report[name]['seconds']:7.1f} s "
        f"{report[name].get('cpu seconds', 0.0):7.1f} cpu s"
        for name in names
    ]
    if not arguments.suites:
        report["matrix"] = judge_matrix(report)
        (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(rows))
    print("\n".join(f"{seconds:7.1f} cpu s  {name}" for seconds, name in costs.dearest(report)))
    spent = meter.end()
    print(
        f"{spent['minutes']} minutes, {spent['cpu seconds']} processor seconds ({os.cpu_count()} "
        f"processors, busy {spent['busy']:.0%}),"
        f" {spent['memory GiB']} GiB of memory and {spent['disk GiB']} GiB of disk at most, with "
        f"whatever else ran on this machine"
    )
    if not arguments.suites:
        print(
            "\n".join(costs.passed(spent, costs.TEST_FULL if arguments.full else costs.TEST, report, SUITES))
            or "no budget passed"
        )
    total = {key: sum(result[key] for result in report.values()) for key in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
