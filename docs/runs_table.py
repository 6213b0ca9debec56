# SPDX-License-Identifier: Apache-2.0
"""The rows of docs/reference/support.md that follow from docs/runs: what ran beside `make test`, when."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List

RUNS = Path(__file__).resolve().parent / "runs"
MARKS = re.compile(r"(<!-- runs (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
HEAD = "\n| with | last run | files | passed | failed | skipped |\n|---|---|---|---|---|---|\n"


def with_runs(text: str) -> str:
    """Return a page with a row for each note between its marks, which say how its name begins."""

    def table(match: re.Match[str]) -> str:
        notes = sorted(RUNS.glob(f"{match.group(2)}-*.json"), key=_version, reverse=True)
        rows = [row(json.loads(note.read_text())) for note in notes]
        return f"{match.group(1)}{HEAD}{''.join(rows)}\n{match.group(3)}"

    return MARKS.sub(table, text)


def _version(note: Path) -> List[object]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[-.]", note.stem)]


def row(note: Dict[str, Any]) -> str:
    """Return the row of one platform; a file that was run later than others is named with its own date."""
    files = note["files"]
    moments: Dict[str, List[str]] = {}
    for name, outcome in files.items():
        moments.setdefault(f"{outcome['date']}, on {outcome['commit']}", []).append(name)
    most = max(moments, key=lambda moment: len(moments[moment]))
    others = [f"; {', '.join(sorted(moments[one]))}: {one}" for one in sorted(moments) if one != most]
    failed = [name for outcome in files.values() for name in outcome["failed"]]
    skipped = sum(len(outcome["skipped"]) for outcome in files.values())
    cells = (
        note["title"],
        most + "".join(others),
        len(files),
        sum(outcome["passed"] for outcome in files.values()),
        ", ".join(f"`{name}`" for name in failed) or 0,
        skipped,
    )
    return f"| {' | '.join(map(str, cells))} |\n"
