# SPDX-License-Identifier: Apache-2.0
"""Each action on a host under each kind of name: what leads to the front-end is done there, all else is asked
of that host by ssh.

The front-end is a machine called x9 in a network of its own (test_this_machine.py), which oned may call by
any name (HOSTNAME of oned.conf). There `ssh` only notes whom it was to reach. The usual run has each action
with one name of the front-end's and one of another machine's, such that each name comes up; the long one has
all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from lab.oned import ActionFailed
from tools.oned_site import HERE, ActionSite
from tools.test_rehearsals import SITUATIONS, on_stdin
from tools.test_this_machine import OURS, namespace

OTHERS = (
    "x9.siteb.example",
    "x9b",
    "h1",
    "10.9.0.2",
    "H1.Storage.Example",
    "x9.sitec.example",
    "x",
    "other-six.example",
)
MINE = tuple(name for name in OURS if ":" not in name)  # oned puts a colon after it
ENDS = ("delete", "delete of a VM", "mvds")
"""After these there is nothing that another action could be asked of."""
Cells = Dict[str, Tuple[List[str], List[str]]]
SSH = (
    '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; echo "$2" >> "$NAMES_ASKED"; echo "No route to '
    'host" >&2; exit 255\n'
)


def cells(full: bool) -> Cells:
    """Return by situation the names of the front-end and of others under which its action is to be done."""
    if full:
        return {name: (list(MINE), list(OTHERS)) for name in SITUATIONS}
    return {name: ([MINE[at % len(MINE)]], [OTHERS[at % len(OTHERS)]]) for at, name in enumerate(SITUATIONS)}


class _Site:
    """The front-end, and who was to be reached by ssh."""

    def __init__(self, site: ActionSite, asked: Path) -> None:
        self.site, self.asked = site, asked

    def told(self, situation: str, words: List[str], name: str) -> Dict[str, Any]:
        """Do an action on a host that is called so; return whom ssh was to reach, and how the action
        failed.
        """
        self.asked.write_text("")
        stdin = on_stdin(self.site, words)
        words = [f"{name}:{word[len(HERE) + 1 :]}" if word.startswith(f"{HERE}:") else word for word in words]
        try:
            self.site.tm(situation.split()[0].upper(), *words, stdin=stdin)
            failed = ""
        except ActionFailed as e:
            failed = str(e)
        return {"name": name, "asked": sorted(set(self.asked.read_text().split())), "failed": failed}


def inside(wanted: Cells) -> Dict[str, List[Dict[str, Any]]]:
    """Return what all cells have told, on the machine that is called x9."""
    rows: Dict[str, List[Dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="names-") as folder, ActionSite.up(Path(folder) / "one") as up:
        stub, asked = Path(folder) / "bin/ssh", Path(folder) / "asked"
        stub.parent.mkdir()
        stub.write_text(SSH.replace("$NAMES_ASKED", str(asked)))
        stub.chmod(0o755)
        up.oned.runner.extra["PATH"] = f"{stub.parent}:{os.environ['PATH']}"  # type: ignore[attr-defined]
        site = _Site(up, asked)
        for situation, (ours, others) in wanted.items():
            make, _ = SITUATIONS[situation]
            # Nothing that another host was asked in vain stands in the way; of the front-end's each has a VM
            # of its own.
            words = make(up)
            first = [] if situation in ENDS else [site.told(situation, words, name) for name in others]
            mine = [site.told(situation, words if not at else make(up), name) for at, name in enumerate(ours)]
            last = [site.told(situation, make(up), name) for name in others] if situation in ENDS else []
            rows[situation] = [*first, *mine, *last]
    return rows


def _run(wanted: Cells, folder: Path) -> Dict[str, List[Dict[str, Any]]]:
    program = (
        "import json, sys; from tools.test_names import inside; "
        "print(json.dumps(inside(json.load(sys.stdin))))"
    )
    words, env = namespace(folder)
    done = subprocess.run(
        [*words, sys.executable, "-c", program],
        input=json.dumps(wanted).encode(),
        env={**env, "TMPDIR": str(folder)},
        capture_output=True,
        check=False,
        timeout=600,
    )
    assert not done.returncode, done.stderr.decode()[-3000:]
    found: Dict[str, List[Dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _judge(situation: str, rows: List[Dict[str, Any]]) -> None:
    for row in rows:
        if row["name"] in MINE:
            assert (row["asked"], row["failed"]) == ([], ""), row
        else:
            # Of what is removed the front-end has all there was, and OpenNebula goes on without a host that
            # does not answer.
            assert row["asked"] == [row["name"]] and (row["failed"] or situation in ENDS), row


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, List[Dict[str, Any]]]:
    return _run(cells(full=False), tmp_path_factory.mktemp("names"))


@pytest.mark.fault(
    31,
    "each action is done by the machine to which the name leads that oned gives, whatever that begins with",
)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_an_action_is_done_where_its_host_s_name_leads(
    told: Dict[str, List[Dict[str, Any]]], situation: str
) -> None:
    assert len(told[situation]) == 2
    _judge(situation, told[situation])


@pytest.mark.long
@pytest.mark.fault(31, "each action under each name of the front-end's and of other machines")
def test_all_actions_under_all_names(tmp_path: Path) -> None:
    for situation, rows in _run(cells(full=True), tmp_path).items():
        assert len(rows) == len(MINE) + len(OTHERS)
        _judge(situation, rows)
