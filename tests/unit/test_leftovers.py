# SPDX-License-Identifier: Apache-2.0
"""What a failed test has left is not found by the next one; what a passed one has left is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SUITE = """
import pytest
from lab.cloud import Cloud

class Site(Cloud):
    there = []

    def _left(self):
        return list(self.there)

SITE = Site(None, None)

@pytest.fixture
def broken():
    yield
    SITE.there.append("by its fixture")
    raise OSError

def test_fails():
    SITE.there.append("by one that failed")
    assert False

def test_next_one_is_judged_for_itself():
    assert SITE.leftovers() == []

def test_passes_and_leaves_something():
    SITE.there.append("by one that passed")

def test_finds_it():
    assert SITE.leftovers() == []

def test_finds_it_no_more():
    assert SITE.leftovers() == []

def test_fails_at_its_end(broken):
    pass

def test_last():
    assert SITE.leftovers() == []
"""


@pytest.mark.runs_python("the hooks of tests/conftest.py are pytest's to call")
def test_each_test_answers_for_what_itself_has_left(tmp_path: Path) -> None:
    (tmp_path / "test_site.py").write_text(SUITE)
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-p",
        "conftest",
        "--rootdir",
        str(tmp_path),
    ]
    env = {
        "PYTHONPATH": ":".join([str(TESTS), f"{TESTS.parent}/lib", os.environ.get("PYTHONPATH", "")]),
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    said = subprocess.run(
        [*words, "test_site.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, check=False
    ).stdout.decode()
    assert set(re.findall(r"^(?:FAILED|ERROR) test_site.py::(\w+)", said, re.M)) == {
        "test_fails",
        "test_finds_it",
        "test_fails_at_its_end",
    }
    assert len(re.findall(r"^PASSED ", said, re.M)) == 5
