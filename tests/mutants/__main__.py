# SPDX-License-Identifier: Apache-2.0
"""Put small faults into the package, one at a time, and say which of them no test notices.

    python3 -m mutants [--count 200] [--seed 1] [--suites unit,tools,...] [--again]

Of all places in lib/ where one could be (mutate.py), `count` are drawn by the seed. First, once per content
of lib/ and tests/, those suites (REACH) are run in copies of the checkout to see which lines each test
reaches. A mutant is then tried by those tests only that reach its line: unit tests first, of each suite the
quickest first, as many as MOST_S allows, until one fails. Two copies work at a time.

All is kept in build/mutants: who starts it again goes on where it stopped; --again begins anew. It ends with
the table of survivors and the part that was killed; exit code 0 whatever it finds, since a survivor has to be
judged by a person.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Dict, List, Sequence, Tuple

from mutants import reach
from mutants.mutate import Mutant, apply, mutants
from suites import AT_ONCE, ROOT, SUITES

FOLDER = ROOT / "build/mutants"
PYTHON = "/usr/bin/python3"
REACH = (
    "unit",
    "tools",
    "tools-more",
    "store",
    "kill",
    "faults",
    "replay",
    "retry",
    "cephstore",
    "operate",
    "live",
    "staging",
    "upgrade",
    "pool",
    "shares",
    "cephfaults",
    "system",
    "ceph",
    "cephfs",
    "trust",
    "neighbours",
    "images",
)
"""Suites of which it is seen what they reach: all but those of bats and of emulated machines. In this order
their tests are tried.
"""
COPIES = 2
PATIENCE = 4.0
"""By how much more than usual, and LEAST_S, tests may take before a mutant counts as one that hangs."""
LEAST_S = 60.0
MOST_S = 120.0
"""Tests of one suite that together take longer are not all tried: the hundred mutants are to take an hour."""
LEFT_OUT = "not long and not reads_checkout"


def _content() -> str:
    """Return a name of what the last commit has in lib/ and tests/."""
    said = subprocess.run(
        ["git", "rev-parse", "HEAD:lib", "HEAD:tests"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return "-".join(tree[:8] for tree in said.split())


def copied(name: str) -> Path:
    """Return a fresh copy of the checkout's last commit."""
    copy = FOLDER / name
    shutil.rmtree(copy, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(copy)], check=True)
    subprocess.run(
        [PYTHON, "-m", "compileall", "-q", "lib", "tests"], cwd=copy, check=True
    )  # else each start does, in seconds
    return copy


def run(
    copy: Path, plugin: str, paths: List[str], timeout: float, *options: str, **env: str
) -> Tuple[int, str]:
    """Run pytest in a copy; return its exit code (-1: it took too long) and what it said."""
    words = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        plugin,
        "-p",
        "no:cacheprovider",
        "-m",
        LEFT_OUT,
        *options,
        *paths,
    ]
    cache = str(ROOT / "build/lab")
    variables = {
        **os.environ,
        "PYTHONPATH": "tests:lib",
        "PYTHONDONTWRITEBYTECODE": "1",
        "SEMISHARED_LAB_CACHE": cache,
        **env,
    }
    process = subprocess.Popen(
        words,
        cwd=copy,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
        return process.returncode, said.decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -1, ""


def reached(content: str, suites: Sequence[str]) -> Dict[str, Dict[str, Any]]:
    """Return per test, in the order to try them, how many seconds it takes and which lines it reaches."""
    parts = {suite: FOLDER / f"reach-{content}-{suite}.json" for suite in suites}
    longest_first = sorted(suites, key=list(SUITES).index)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda suite: parts[suite].exists() or _look(suite, parts[suite]), longest_first))
    found: Dict[str, Dict[str, Any]] = {}
    for suite, part in parts.items():
        tests = json.loads(part.read_text())
        found.update(
            {
                name: {**test, "suite": REACH.index(suite)}
                for name, test in tests.items()
                if not test.get("failed")
            }
        )
    return found


def _look(suite: str, part: Path) -> None:
    """Run a suite in a copy, to see what its tests reach."""
    began = time.monotonic()
    copy, made = copied(f"reach-{suite}"), FOLDER / f"reach-{suite}.json"
    folder = Path(tempfile.mkdtemp(prefix="semishared-reach-", dir="/tmp"))
    folder.chmod(0o777)
    reach.hook(copy, folder)
    try:
        run(
            copy,
            "mutants.reach",
            SUITES[suite]["paths"],
            3600,
            MUTANTS_REACH=str(made),
            **{reach.FOLDER: str(folder)},
        )
        made.rename(part)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(copy)
    print(f"reach: {suite}: {time.monotonic() - began:.0f} s", flush=True)


def drawn(count: int, seed: int) -> List[Mutant]:
    """Return the mutants to try, by the seed."""
    every: List[Mutant] = []
    for path in sorted((ROOT / "lib").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        every += mutants(name, path.read_text())
    return random.Random(seed).sample(every, min(count, len(every)))


def tried(copy: Path, mutant: Mutant, tests: Dict[str, Dict[str, Any]]) -> Dict[str, Any]:
    """Try one mutant in a copy; return what became of it."""
    began, file = time.monotonic(), copy / mutant.path
    before = file.read_text()
    names = sorted(tests, key=lambda name: (tests[name]["suite"], tests[name]["seconds"]))
    verdict = {"tests": len(names), "killed": "" if names else None}
    wanted = FOLDER / f"{copy.name}.tests"
    file.write_text(apply(mutant, before))
    Path(cache_from_source(file)).unlink(
        missing_ok=True
    )  # of as many bytes in the same second it would do for the mutant, too
    try:
        for suite in range(len(REACH)):
            part = _within(MOST_S, tests, [name for name in names if tests[name]["suite"] == suite])
            if not part:
                continue
            wanted.write_text("\n".join(part))
            seconds = sum(tests[name]["seconds"] for name in part)
            paths = list(dict.fromkeys(name.partition("::")[0] for name in part))
            limit = LEAST_S + PATIENCE * seconds
            code, said = run(copy, "mutants.only", paths, limit, "-x", MUTANTS_TESTS=str(wanted))
            if code:
                failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
                verdict["killed"] = (
                    failed[0].split(" - ")[0]
                    if failed
                    else "hangs"
                    if code == -1
                    else f"{REACH[suite]} does not run"
                )
                break
    finally:
        file.write_text(before)
    return {**mutant._asdict(), **verdict, "seconds": round(time.monotonic() - began, 1)}


def _within(most_s: float, tests: Dict[str, Dict[str, Any]], names: List[str]) -> List[str]:
    """Return as many of these tests, from the first, as take that long together; the first in any case."""
    total = list(itertools.accumulate(tests[name]["seconds"] for name in names))
    return [name for name, seconds in zip(names, total) if seconds <= most_s] or names[:1]


def report(rows: List[Dict[str, Any]]) -> None:
    """Print what became of the mutants."""
    survivors = [row for row in rows if not row["killed"]]
    for row in sorted(survivors, key=lambda row: (row["path"], row["line"])):
        how = f"{row['tests']} tests pass" if row["tests"] else "no test of these suites reaches it"
        print(f"{row['path']}:{row['line']}: {row['what']}: {how}")
    killers = Counter("unit" if "tests/unit/" in row["killed"] else "others" for row in rows if row["killed"])
    print(
        f"{len(rows)} mutants, {len(rows) - len(survivors)} killed "
        f"({(len(rows) - len(survivors)) / max(len(rows), 1):.1%}:"
        f" {killers['unit']} by unit tests), {len(survivors)} left; "
        f"{sum(row['seconds'] for row in rows) / COPIES / 60:.0f} minutes"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--suites", default=",".join(REACH), help=f"those whose tests try them, of {','.join(REACH)}"
    )
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    content = _content()
    suites = arguments.suites.split(",")
    if set(suites) - set(REACH):
        parser.error(f"no such suite here: {', '.join(sorted(set(suites) - set(REACH)))}")
    tests = reached(content, suites)
    ledger = (
        FOLDER
        / f"ledger-{content}-{arguments.seed}-{'all' if tuple(suites) == REACH else '+'.join(suites)}.jsonl"
    )
    if arguments.again:
        ledger.unlink(missing_ok=True)
    rows = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    known = {(row["path"], row["begin"], row["what"]) for row in rows}
    by_line: Dict[str, List[str]] = {}
    for name, test in tests.items():
        for line in test["lines"]:
            by_line.setdefault(line, []).append(name)
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(COPIES):
        copies.put(copied(f"copy-{number}"))

    def one(mutant: Mutant) -> None:
        copy = copies.get()
        try:
            name = mutant.path.removeprefix("lib/semishared/")
            names = by_line.get(f"{name}:{mutant.line}") or by_line.get(f"{name}:{mutant.statement}") or []
            row = tried(copy, mutant, {name: tests[name] for name in names})
        finally:
            copies.put(copy)
        rows.append(row)
        with ledger.open("a") as out:
            out.write(json.dumps(row) + "\n")
        print(
            f"{len(rows)}: {mutant.path}:{mutant.line}: {mutant.what}: "
            f"{row['killed'] or 'SURVIVED'} ({row['seconds']} s)",
            flush=True,
        )

    left = [
        mutant
        for mutant in drawn(arguments.count, arguments.seed)
        if (mutant.path, mutant.begin, mutant.what) not in known
    ]
    with ThreadPoolExecutor(COPIES) as pool:
        list(pool.map(one, left))
    report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
