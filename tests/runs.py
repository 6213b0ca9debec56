#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Note what ran outside `make test`, from pytest's reports: docs/runs/NAME.json, a row of support.md.

    tests/runs.py NAME TITLE REPORT.xml... -- COMMAND...

NAME is one platform, TITLE what the page calls it; COMMAND makes the reports. Of each file of tests the last
run counts, so a file that is run again replaces itself alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Dict, Sequence

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs/runs"
Outcome = Dict[str, Any]


def of_report(report: Path, date: str, commit: str) -> Dict[str, Outcome]:
    """Return what a report says by file of tests: passed is a number, failed and skipped are names."""
    found: Dict[str, Outcome] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        module = case.get("classname", "").replace(".", "/").partition("tests/")
        row = found.setdefault(
            module[2] or module[0],
            {"date": date, "commit": commit, "passed": 0, "failed": [], "skipped": []},
        )
        name = case.get("name", "")
        if case.find("failure") is not None or case.find("error") is not None:
            row["failed"].append(name)
        elif case.find("skipped") is not None:
            row["skipped"].append(name)
        else:
            row["passed"] += 1
    return found


def noted(known: Dict[str, Any], title: str, files: Dict[str, Outcome]) -> Dict[str, Any]:
    """Return a platform's note with the files of a run in the place of what it had of them."""
    return {"title": title, "files": {**known.get("files", {}), **files}}


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def main(words: Sequence[str]) -> int:
    """Run a command and add its reports to the note of one platform; return the command's exit code."""
    (name, title, *reports), command = words[: words.index("--")], words[words.index("--") + 1 :]
    # What this program and `make docs` write is no change of what runs.
    changed = ["status", "--porcelain", "-uno", "--", ".", ":!docs/runs", ":!docs/reference/support.md"]
    commit = _git("rev-parse", "--short=8", "HEAD") + ("-dirty" if _git(*changed) else "")
    for report in reports:
        Path(report).unlink(missing_ok=True)
    code = subprocess.run(command, check=False).returncode
    files: Dict[str, Outcome] = {}
    for path in filter(Path.exists, map(Path, reports)):
        files.update(of_report(path, time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime)), commit))
    note = RUNS / f"{name}.json"
    known = json.loads(note.read_text()) if note.exists() else {}
    RUNS.mkdir(exist_ok=True)
    note.write_text(json.dumps(noted(known, title, files), indent=1, sort_keys=True) + "\n")
    print(f"{note.relative_to(ROOT)} written; `make docs` writes its row")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
