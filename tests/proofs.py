# SPDX-License-Identifier: Apache-2.0
"""Read tests/proofs.md: which tests are left to `make test-full`, and which one of `make test` proves the
same.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import List, NamedTuple

TABLE = Path(__file__).with_name("proofs.md")
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \| (.+) \|$", re.MULTILINE)


class Row(NamedTuple):
    """A test that is left out by its id (with parameters: for these alone), the one that stays, and what both
    prove.
    """

    left: str
    stays: str
    what: str


@cache
def rows() -> List[Row]:
    """Return the rows of the table."""
    return [
        Row(f"tests/{left}", f"tests/{stays}", what) for left, stays, what in ROW.findall(TABLE.read_text())
    ]
