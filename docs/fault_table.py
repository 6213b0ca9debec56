# SPDX-License-Identifier: Apache-2.0
"""The page of faults: every claim that a test marked `fault` proves, and what older versions did in the same
test.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLDER = {"84b7bda": ("0.1.0", range(1, 22)), "2a155d3f": ("2a155d3f", range(22, 95))}
"""Commits that tests/against.py has run today's tests against: the version each is, and the numbers of what
was found in it.
"""
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
    22: "Words of a template are read as oned reads them",
    23: "What oned has an object for is not read from DISK",
    24: "A backup is restored by who may use it",
    25: "A host's answer names no image, user, configuration or path that is used",
    26: "Records that arrive are compared with oned's disks",
    27: "What a host's probe prints fences nobody and unfences nobody",
    28: "A share's record leads nowhere but to its share",
    29: "A host can neither hold the front-end for ever nor fill it",
    30: "What cannot be read is not absent",
    31: "A machine is told from others by where its name leads",
    32: "What runs as root gets no path that others can redirect",
    33: "The front-end follows no link below a datastore",
    34: "A decided journal belongs to one claim",
    35: "An image that was changed behind a claim is noticed",
    36: "Fencing uses no wall clock",
    37: "A holder that has stopped is passed by, and publishes nothing",
    38: "`gc` looks whether the process lives that a staged file names",
    39: "A rotten base is out of use at once, everywhere",
    40: "Writers and readers share limits",
    41: "No work grows faster than what changed",
    42: "An operator's slip shuts out, removes and stops nothing",
    43: "A refused commit can be resolved",
    44: "Read-only images are not grown",
    45: "What is printed controls no terminal and no shell",
    46: "A late action loses to what came after it",
    47: "An undo touches only what it made",
    48: "A fact is looked at again before something is done by it",
    49: "Small ones",
    50: "Hosts answer as they are",
    51: "An upload is the disk that its header says, and all of it",
    53: "VMs are sent to where they can be deployed",
    54: "A datastore that lost attributes is never another store",
    57: "No attribute of OpenNebula's own drivers is silently ignored",
    58: "The user reads id, noun and reason first, before all log lines and paths",
    59: "What oned gets is ASCII",
    60: "Who asks is told what is under way, and what does not answer",
    61: "What the operator's commands say and offer is so",
    62: "A bridge that is off holds nothing up",
    63: "Copies for a backup run as its datastore says",
    64: "An operator who has Sunstone alone sees where disks are and what may be lost",
    65: "What is to be clicked has the names that Sunstone has",
    66: "Doctor notices that nothing publishes",
    67: "Hosts too old for guests are known before a guest is started there",
    68: "A machine whose Python is too old can say so",
    69: "What mends a machine is in the words of its own platform",
    70: "A guest stays where its machine is",
    71: "What a leader has on its own disk is found, or its name is said",
    72: "What a front-end has kept of an earlier stay of a VM is not used",
    73: "A host that is arranged as EL is serves VMs, or says what it lacks",
    74: "A migration that has failed leaves nothing behind",
    75: "What machines move is seen while they move it",
    76: "Bars and tables fit the terminal",
    80: "An error blames what is wrong, and names what is there",
    85: "A snapshot of a disk that has grown since is removed by every QEMU",
    86: "Backups that carry only what changed",
    90: "Increments of disks on Ceph",
    91: "One moment of all disks",
    87: "A CPU that a host lacks is refused before anything of the VM comes",
    89: "QEMU of Debian 11 does what backups and commits ask of it",
    88: "Hosts whose processors differ are named before a guest crashes on one",
    93: "What a backup datastore has merged is restored, each increment by its number",
    94: "A VM with a TPM is backed up and restored",
    81: "Timers run under systemd, fail in sight, and leave no trace",
    82: "Commands that pages and lists name are ones that work",
    79: "An upgrade changes what is ours and nothing else, and says which commit it is",
    77: "What needs an operator is found by one command, with what to do",
    78: "What was done is known afterwards, and by whom",
    83: "What a verb would do is said before it does it",
    84: "A program that asks for JSON gets it",
    92: "What is shown and backed up is so under a real oned",
}
LONGEST = 120
"""Characters of what a failed test said."""
HEAD = """<!-- Generated from the tests marked `fault` by `make docs`. -->
# Faults

See which faults tests provoke, and what older versions did in the same tests. A reading of these versions expected each case to lose a disk,
or worse: 1 to 21 are of 0.1.0, the others of commit 2a155d3f. The last column is the result of that version in the very same test
(`tests/against.py 84b7bda` and `tests/against.py 2a155d3f`); *passed* is a case that it already got right.
A test of parts that the older version does not have cannot run there; beside it is one that can.
"""  # noqa: E501


class Claim(NamedTuple):
    """A test marked `fault`: the point it belongs to, what must be true, and its file and name."""

    number: int
    text: str
    file: str
    test: str


@cache
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
    lines, known = [HEAD], claims()
    for commit, (version, numbers) in OLDER.items():
        outcomes = json.loads((ROOT / f"docs/faults/{commit}.json").read_text())
        for number in numbers:
            found = [claim for claim in known if claim.number == number]
            if not found:
                continue
            lines.append(f"\n## {number}. {TITLES[number]}\n\n| claim | test | {version} |\n|---|---|---|")
            lines += [
                f"| {_cell(claim.text)} | `{claim.file}::{claim.test}` | {_outcome(claim, outcomes)} |"
                for claim in found
            ]
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
