# SPDX-License-Identifier: Apache-2.0
"""docs/reference/actions.md against the executables: a row for each, and each row one that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semishared.install import edits

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "actions.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z]+/[a-z_]+)` .*$", re.MULTILINE)
ROWS = {match[1]: match[0].strip().strip("|").split("|") for match in ROW.finditer(PAGE)}
NO_ACTIONS = {f"vmm/{name}" for name in edits.NO_ACTIONS}
"""Called by actions or by libvirt only; says so itself."""


def test_every_action_has_a_row_and_every_row_an_action() -> None:
    files = {
        f"{path.parent.name}/{path.name}"
        for kind in ("tm", "datastore", "vmm")
        for path in (ROOT / kind).iterdir()
    }
    files = {name for name in files if not name.endswith("__pycache__")}
    assert all("No action." in (ROOT / name).read_text(encoding="utf-8") for name in NO_ACTIONS)
    assert set(ROWS) == files - NO_ACTIONS


@pytest.mark.parametrize("name", sorted(ROWS))
def test_row_is_complete(name: str) -> None:
    cells = [cell.strip() for cell in ROWS[name]]
    assert len(cells) == 5, f"{name}: {len(cells)} cells; a | in a cell splits it"
    assert len(cells[3]) > 10 and cells[1] and cells[4]
    assert PAGE.count(f"\n| `{name}` ") == 1


@pytest.mark.parametrize("name", sorted(name for name in ROWS if name.startswith("tm/")))
def test_arguments_are_as_many_as_the_executable_names(name: str) -> None:
    """The executable's docstring is what its tests hold it to; the page must not name other ones."""
    said = (ROOT / name).read_text(encoding="utf-8").split('"""')[1].split(" - ")[0]
    wanted = set(re.findall(r"\b(SOURCE_HOST|TARGET_HOST|SNAPSHOT|SIZE_MIB|FORMAT|DIRECTORY)\b", said))
    row = ROWS[name][2]
    if row.strip() not in ("the same", "as premigrate"):
        assert wanted <= set(re.findall(r"[A-Z_]+", row)), (
            f"{name}: {wanted} in the executable, {row} on the page"
        )
