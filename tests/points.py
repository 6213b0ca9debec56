# SPDX-License-Identifier: Apache-2.0
"""At which of its points (semishared/tools/effects.py) an action is killed: at all of them in `make
test-full`, else at each kind.

A kind of point is an action and a name, without what differs from run to run. Variants of an action pass
mostly the same ones; the first that passes a kind kills there, others at every EVERY-th point, another one
for each variant.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import List, Sequence

ALL = bool(os.environ.get("SEMISHARED_FULL"))
EVERY = 4
VARIES = re.compile(r"[0-9a-f]{8,}|\d+")


def kind(action: str, name: str) -> str:
    """Return what is the same for all points of this kind."""
    return f"{action}: {VARIES.sub('#', name)}"


class Known:
    """Which kinds somebody has been killed at: a file for each in a directory, since several processes work
    at a suite.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def is_first(self, kind: str) -> bool:
        """Tell whether nobody has asked this of that kind."""
        name = hashlib.sha256(kind.encode()).hexdigest()
        try:
            os.close(os.open(self._folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True

    def chosen(self, action: str, variant: str, names: Sequence[str]) -> List[int]:
        """Return the numbers, from 1, of the points at which this variant of an action is killed; at least
        one.
        """
        if ALL:
            return list(range(1, len(names) + 1))
        rest = len(variant) % EVERY
        found = [
            n for n, name in enumerate(names, 1) if self.is_first(kind(action, name)) or n % EVERY == rest
        ]
        return found or [len(names)]
