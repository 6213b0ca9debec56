# SPDX-License-Identifier: Apache-2.0
"""What the pages on shares tell administrators to do: docs/how-to/shares*.md, one text."""

from __future__ import annotations

import re
from pathlib import Path

HOW_TO = Path(__file__).resolve().parents[2] / "docs/how-to"
PAGES = "".join((HOW_TO / f"shares{part}.md").read_text() for part in ("", "-use", "-in-vms", "-clients"))
ROOT = "/srv/shares"
"""The root of shares that they name."""


def rule(user: str) -> str:
    """Return the lines for sudoers, as they would be for a user."""
    found = re.findall(r"^ +(oneadmin ALL=.*\n)", PAGES, re.M)
    assert len(found) == 9
    return "".join(found).replace("oneadmin", user)
