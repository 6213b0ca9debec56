# SPDX-License-Identifier: Apache-2.0
"""The table of texts with what oned reads in them (unit/fixtures/oned_values.json) is what a program in
oned's language tells today.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab import caches

UNIT = Path(__file__).resolve().parents[1] / "unit"


@pytest.mark.fault(
    22, "the table by which numbers and YES are read was made by a program in C++, and not by hand"
)
def test_the_table_is_what_the_program_tells() -> None:
    program = caches.build(
        [UNIT / "oned_values.cc"], ["-std=c++17", "-Wl,--no-as-needed", "-lstdc++", "-x", "c++"]
    )
    told = subprocess.run([program], check=True, capture_output=True, env={"LC_ALL": "C"}).stdout
    assert told == (UNIT / "fixtures/oned_values.json").read_bytes()
