# SPDX-License-Identifier: Apache-2.0
"""A checkout that install.sh has little to do with: all parts, and of the package what install.sh itself
needs, a quarter of it.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import List, Set

from lab.caches import CHECKOUT, PARTS

PACKAGE = CHECKOUT / "lib/semishared"
FOLDERS = {"install", "model", "opennebula", "tools", "wire", "__pycache__"}
"""Those of the package that are there, and the modules that are in none. Byte code too, which install.sh
itself leaves nowhere.
"""


def lay_out(target: Path) -> None:
    """Make one."""
    target.mkdir()
    for part in PARTS:
        source = CHECKOUT / part
        shutil.copytree(source, target / part, ignore=_left_out) if source.is_dir() else shutil.copy2(
            source, target
        )


def _left_out(folder: str, names: List[str]) -> Set[str]:
    # The host side needs all the rest.
    return (
        {"hostside.py", *(name for name in names if (PACKAGE / name).is_dir())} - FOLDERS
        if Path(folder) == PACKAGE
        else set()
    )


@cache
def script() -> Path:
    """Return install.sh of one that is there for the rest of this process."""
    folder = Path(tempfile.mkdtemp(prefix="semishared-checkout-"))
    atexit.register(shutil.rmtree, folder)
    lay_out(folder / "checkout")
    return folder / "checkout/install.sh"
