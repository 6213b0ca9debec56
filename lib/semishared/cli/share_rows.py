# SPDX-License-Identifier: Apache-2.0
"""What is said of a share, in rows of several commands."""

from __future__ import annotations

from typing import Any

from ..errors import from_id
from ..units import human

Row = dict[str, Any]


def state(row: Row, has_image: bool) -> str:
    """Return what is wrong with a share, '' for nothing."""
    if not has_image:
        return "OpenNebula has no such image"
    if "wrong" in row:
        return from_id(row["wrong"]["id"], row["wrong"]["detail"]).line()
    return "" if row["source"] else "not ready"


def said(row: Row) -> str:
    """Return the same as a column: of a directory that was there before also which one it is."""
    return row["state"] or (f"ok, is {row['directory']}" if "directory" in row else "ok")


def numbers(row: Row) -> list[str]:
    """Return owner, size, bytes used and how many snapshots there are, as columns."""
    used = human(row["used"]) if row["used"] >= 0 else "-"
    owner = str(row["owner"]) if row["owner"] >= 0 else "-"
    size = human(row["size"]) if row["size"] >= 0 and "directory" not in row else "-"
    return [owner, size, used, str(len(row.get("snapshots", ())))]
