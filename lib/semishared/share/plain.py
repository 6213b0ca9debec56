# SPDX-License-Identifier: Apache-2.0
"""Shares on any file system: nothing holds them to their size, which the operator has said is meant."""

from __future__ import annotations

from ..model.shares import Use
from .trees import Directories


class Plain(Directories):
    """Directories and nothing more."""

    def check(self) -> None:
        """Ask nothing of the file system: that it is the root, its marker says."""

    def resize(self, image: int, size: int) -> None:
        """Do nothing: only the record says how large a share is."""

    def use(self, image: int) -> Use:
        """Return that nobody knows."""
        return Use(-1, -1)
