# SPDX-License-Identifier: Apache-2.0
"""What is said of a share, in rows of several commands."""

from __future__ import annotations

from typing import Any, Optional

from ..errors import from_id
from ..opennebula.xml import Image
from ..plan import gc_shares
from ..units import human

Row = dict[str, Any]


def state(row: Row, image: Optional[Image], store: int) -> str:
    """Return what is wrong with a share in datastore `store`, '' for nothing; `image`: of its id, as oned has
    it.
    """
    if image is None:
        return "OpenNebula has no such image"
    if not gc_shares.is_of(row, store, image.store_id, image.number("REGTIME")):
        return f"it is of another image {image.id} than OpenNebula has"
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
