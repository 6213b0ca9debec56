# SPDX-License-Identifier: Apache-2.0
"""Every kind of store, asked all cases that its capabilities allow: one list for all (cases.py,
diff_cases.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Iterator

import pytest

from store import diff_cases
from store.benches import DirBench, RbdBench, reflinking
from store.cases import CASES, Bench


@pytest.fixture(params=["dir", "rbd"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    if request.param == "dir":
        return DirBench(tmp_path)
    return RbdBench(request.getfixturevalue("site"))


@pytest.fixture(scope="module")
def cloning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system that clones files, in which each case has a directory of its own."""
    with reflinking(tmp_path_factory.mktemp("cloning")) as top:
        yield top


@pytest.mark.parametrize("name", CASES)
def test_every_kind(bench: Bench, name: str, tmp_path: Path) -> None:
    asked = CASES[name]
    assert asked.is_asked(bench), "these two are asked everything"
    asked.ask(bench, tmp_path)


@pytest.mark.parametrize(
    "name", [name for name in CASES if CASES[name].ask.__module__ == diff_cases.__name__]
)
def test_diffs_where_files_are_cloned(cloning: Path, name: str, tmp_path: Path) -> None:
    top = cloning / name.replace(" ", "-")
    top.mkdir()
    CASES[name].ask(DirBench(top), tmp_path)
    shutil.rmtree(top)
