#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Run test suites and write build/report.json: per suite passed, failed, skipped, total, and its figures.

    tests/suites.py [--full] [SUITE ...]

A required suite that did not run, ran no test, or took longer than its minutes counts as failed. So does a cell of the
matrix (tests/matrix.py) that no test reported, when all suites run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Dict, List

import matrix

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
SUITES: Dict[str, Dict[str, Any]] = {
    "lint": {"command": ["tests/lint.sh"], "minutes": 2},
    "types": {"command": ["tests/types.sh"], "minutes": 3},
    "unit": {"paths": ["tests/unit"], "minutes": 3},
    "tools": {"paths": ["tests/tools"], "minutes": 8},
    "replay": {"paths": ["tests/replay"], "minutes": 10},
    "system": {"paths": ["tests/system"], "minutes": 20},
    "kill": {"paths": ["tests/faults/test_kill.py"], "minutes": 10},
    "faults": {"paths": ["tests/faults/test_faults.py", "tests/faults/test_bad_input.py"], "minutes": 12},
    "retry": {"paths": ["tests/faults/test_retry.py", "tests/faults/test_hang.py"], "minutes": 15, "full": True},
}


def run_command(name: str, suite: Dict[str, Any]) -> Dict[str, Any]:
    """Run a suite that is one command: one check, passed or failed."""
    done = subprocess.run(suite["command"], cwd=ROOT, check=False, timeout=suite["minutes"] * 60)
    passed = int(done.returncode == 0)
    return {"passed": passed, "failed": 1 - passed, "skipped": 0, "total": 1}


def run_pytest(name: str, suite: Dict[str, Any], full: bool) -> Dict[str, Any]:
    """Run a suite of tests and read its result from pytest's own report."""
    xml = BUILD / f"junit-{name}.xml"
    figures = BUILD / "figures" / f"{name}.json"
    for old in (xml, figures):
        old.unlink(missing_ok=True)
    figures.parent.mkdir(exist_ok=True)
    env = {**os.environ, "SEMISHARED_FIGURES": str(figures), "PYTHONDONTWRITEBYTECODE": "1"}
    if full:
        env["SEMISHARED_FULL"] = "1"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", f"--junitxml={xml}"]
    limit = suite["minutes"] * 60 * (6 if full else 1)
    process = subprocess.Popen([*words, *suite["paths"]], cwd=ROOT, env=env)
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()
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
    if late or (process.returncode and not counts["failed"]) or not counts["total"]:
        counts["failed"] += 1
        counts["total"] += 1
        print(f"{name}: {'took longer than its minutes' if late else 'did not run'}", flush=True)
    result: Dict[str, Any] = dict(counts)
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
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
    parser.add_argument("--full", action="store_true", help="the long rest as well")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=" ".join(SUITES))
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown:
        parser.error(f"no such suite: {', '.join(sorted(unknown))}")
    BUILD.mkdir(exist_ok=True)
    if not arguments.suites or {"lint", "types"} & set(arguments.suites):
        subprocess.run(["make", "-s", "build/venv/ready"], cwd=ROOT, check=False)
    report: Dict[str, Any] = {}
    rows: List[str] = []
    # The long rest: only with --full, or when asked for by name.
    usual = [name for name, suite in SUITES.items() if arguments.full or not suite.get("full")]
    for name in arguments.suites or usual:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        try:
            if "command" in SUITES[name]:
                result = run_command(name, SUITES[name])
            else:
                result = run_pytest(name, SUITES[name], arguments.full)
        except subprocess.TimeoutExpired:
            result = {"passed": 0, "failed": 1, "skipped": 0, "total": 1}
        result["seconds"] = round(time.monotonic() - started, 1)
        report[name] = result
        rows.append(
            f"{name:8} {result['passed']:5} passed {result['failed']:4} failed {result['skipped']:4} skipped"
            f" {result['total']:5} total {result['seconds']:7.1f} s"
        )
        (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    if set(SUITES) <= set(report):
        report["matrix"] = judge_matrix(report)
        (BUILD / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(rows))
    total = {key: sum(result[key] for result in report.values()) for key in ("passed", "failed", "skipped")}
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
