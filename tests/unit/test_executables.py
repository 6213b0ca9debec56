# SPDX-License-Identifier: Apache-2.0
"""The executables oned calls: the same seven lines each, one for each action and no other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from semishared import entry, table
from semishared.front import datastore, transfer

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
ACTIONS: dict[str, dict[str, Any]] = {
    "tm": {**transfer.ACTIONS, "monitor_ds": entry.monitor_ds},
    "datastore": datastore.ACTIONS,
}
FILES = sorted(path for kind in ACTIONS for path in (ROOT / kind).iterdir() if path.name != "__pycache__")
SKELETON = '''#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""DOCSTRING"""
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(here, up, "lib") for up in ("..", "../..")]
from semishared.entry import run
sys.exit(run("KIND", "ACTION"))
'''


def file_id(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=file_id)
def test_action_file_is_the_skeleton(path: Path) -> None:
    text = path.read_text()
    docstring = text.split('"""')[1]
    expected = (
        SKELETON.replace("DOCSTRING", docstring)
        .replace("KIND", path.parent.name)
        .replace("ACTION", path.name)
    )
    assert text == expected
    assert re.match(
        rf"{path.parent.name}/{path.name}( [^-]+)? - [^\n]+\.$|{path.parent.name}/{path.name} [^\n]+\.$",
        docstring,
    )
    assert os.access(path, os.X_OK), f"chmod +x {file_id(path)}"


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_action_has_a_file_and_every_file_an_action(kind: str) -> None:
    assert {path.name for path in FILES if path.parent.name == kind} == set(ACTIONS[kind])
    for name, function in ACTIONS[kind].items():
        row = table.ACTIONS.get(name) if kind == "tm" else None
        assert (table.loaded(row[2]) if row else function).__doc__, f"{kind} {name} has no docstring"
