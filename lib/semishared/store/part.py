# SPDX-License-Identifier: Apache-2.0
"""What a commit writes of one extent of an image, and the hashes of it."""

from __future__ import annotations

import hashlib
from typing import List, Optional, Tuple

from ..tools import extents

Chunk = Tuple[int, int, Optional[memoryview]]
"""Offset in the image, length, at most an extent's, and content, None for zeros."""


class Part:
    """What is to be written of one extent: chunks of it, by offset."""

    def __init__(self, chunks: List[Chunk]) -> None:
        self.chunks = chunks
        self.contents = [content for _, _, content in chunks if content is not None]
        self.start, self.end = chunks[0][0], chunks[-1][0] + chunks[-1][1]
        self._digest: Optional[str] = None

    def is_all_of(self, content: memoryview) -> bool:
        """Tell whether it is an extent that has this content, and nothing else."""
        return len(self.contents) == len(self.chunks) == 1 and len(self.contents[0]) == len(content)

    @property
    def digest(self) -> str:
        """Return the hash of what is written: an extent's, if it is all of one."""
        if self._digest is None:
            self._digest = digest_of(*self.contents)
        return self._digest


def digest_of(*contents: memoryview) -> str:
    """Return the hash of some pieces in a row, as a manifest has it for an extent: '' for one that is all
    zero.
    """
    if len(contents) == 1 and extents.is_zero(contents[0]):
        return ""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest()
