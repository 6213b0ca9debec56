# SPDX-License-Identifier: Apache-2.0
"""The page of faults: every claim that a test marked `fault` proves, and what older versions did in the same test."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLDER = {"84b7bda": "0.1.0"}
"""Commits that tests/against.py has run today's tests against, and the version each is."""
TITLES = {
    1: "A retried `mv` never replaces a whole target by a remainder",
    2: "Source and target that are one directory are noticed",
    3: "`mv` asks before it removes",
    4: "Two moves of one VM at once do not disturb each other",
    5: "Time limits fit large disks",
    6: "What is checked is what is used",
    7: "No symbolic link is followed below our roots",
    8: "An upload cannot evade quota or fill the store",
    9: "An unmounted store is not a store",
    10: "Images of a stock datastore are refused by name",
    11: "LUKS images are never written as plaintext",
    12: "Two writers are refused wherever they can be seen",
    13: "Clocks decide nothing",
    14: "Locks of other VMs are not unlinked while held",
    15: "`gc` finds what lies on the wrong host, and leaves what is another cloud's",
    16: "Running guests are frozen for live snapshots and live save-as",
    17: "Backups end when they are cancelled",
    18: "NFSv3 is refused",
    19: "NFS for real",
    20: "AppArmor",
    21: "`--dry-run` changes nothing",
}
LONGEST = 120
"""Characters of what a failed test said."""
HEAD = """<!-- Generated from the tests marked `fault` by `make docs`. -->
# Faults

Cases in which a reading of 0.1.0 expected a disk to be lost, or worse, and what is proved about each now. The last column is
what 0.1.0 did in the very same test (`tests/against.py 84b7bda`); *passed* is a case that it already got right.
A test that calls parts that 0.1.0 does not have cannot be run there; beside it is one that could.
"""


class Claim(NamedTuple):
    """A test marked `fault`: the point it belongs to, what must be true, and its file and name."""

    number: int
    text: str
    file: str
    test: str


def claims(root: Path = ROOT) -> List[Claim]:
    """Return all claims, by number; read from the source, since collecting the tests would need the lab."""
    found: List[Claim] = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.fault" in text:
            found += _claims_in(str(path.relative_to(root)), ast.parse(text))
    return sorted(found)


def _claims_in(file: str, tree: ast.Module) -> Iterator[Claim]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                number, text = (ast.literal_eval(argument) for argument in mark.args)
                yield Claim(number, text, file, node.name)


def page() -> str:
    """Return docs/reference/faults.md."""
    older = {version: json.loads((ROOT / f"docs/faults/{commit}.json").read_text()) for commit, version in OLDER.items()}
    lines, known = [HEAD], claims()
    for number, title in TITLES.items():
        lines.append(f"\n## {number}. {title}\n\n| claim | test | {' | '.join(older)} |\n|---|---|{'---|' * len(older)}")
        for claim in known:
            if claim.number == number:
                was = " | ".join(_outcome(claim, outcomes) for outcomes in older.values())
                lines.append(f"| {_cell(claim.text)} | `{claim.file}::{claim.test}` | {was} |")
    return "\n".join(lines) + "\n"


def _outcome(claim: Claim, outcomes: Dict[str, str]) -> str:
    """Return what an older version did in the cases of one test."""
    name = f"{claim.file}::{claim.test}"
    cases = [text for key, text in outcomes.items() if key == name or key.startswith(f"{name}[")]
    if not cases:
        whole = f"{claim.file}::{claim.file[:-3].replace('/', '.')}"
        return outcomes.get(whole, "not run")
    failed = [text for text in cases if text.startswith("failed")]
    if not failed:
        return next((text for text in cases if text != "passed"), "passed")
    share = f"{len(failed)} of {len(cases)} cases failed" if len(cases) > 1 else "failed"
    said = failed[0].partition(": ")[2]
    return f"{share}: {_cell(said if len(said) <= LONGEST else said[:LONGEST].rpartition(' ')[0] + ' ...')}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
