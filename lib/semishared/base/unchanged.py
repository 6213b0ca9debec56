# SPDX-License-Identifier: Apache-2.0
"""Whether an image is still what it was before it was copied."""

from __future__ import annotations

from typing import Any

from .. import store
from ..errors import ImageChanged
from ..model.refs import ImageRef


def check_unchanged(image: ImageRef, content: store.Content, seen: Any) -> None:
    """Raise ImageChanged if an image is not any more what was seen before it was copied, saying how that
    came.
    """
    now = content.see()
    if now != seen:
        # One under its name that was another file: who put it there need not have written to any image.
        is_new = getattr(now, "inode", None) != getattr(seen, "inode", None)
        raise ImageChanged(
            f"{image.source} was {'replaced by another file' if is_new else 'written to'} while it was copied"
        )
