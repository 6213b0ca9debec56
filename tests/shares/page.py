# SPDX-License-Identifier: Apache-2.0
"""The lines for sudoers that docs/how-to/shares.md has."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/shares.md"
ROOT = "/srv/shares"
"""The root of shares that they name."""


def rule(user: str) -> str:
    """Return the lines, as they would be for a user."""
    found = re.findall(r"^ +(oneadmin ALL=.*\n)", PAGE.read_text(), re.M)
    assert len(found) == 9
    return "".join(found).replace("oneadmin", user)
