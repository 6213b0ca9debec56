# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that looks into mounted stores on the front-end: one that hangs holds
nobody up.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Iterator, Sequence

from ..errors import SemisharedError
from ..front.stores import is_stock
from ..install.preflight import limited
from ..model import layout
from ..opennebula.xml import Image
from ..plan.diagnosis import Cloud
from ..tools.files import unlink
from ..tools.hung_store import unless_it_hangs

AT_ONCE = 32
"""Stores asked at the same time."""


@contextlib.contextmanager
def tokens(directories: Sequence[str]) -> Iterator[str]:
    """Put a file of one new name into each store, to see which hosts have the same store; yield its name."""
    token = layout.staged("doctor", os.urandom(6).hex())
    paths = [f"{directory}/{token}" for directory in directories]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        are_made = list(pool.map(lambda path: unless_it_hangs(partial(_made, path), False), paths))
    try:
        yield token
    finally:
        for path in (path for path, is_made in zip(paths, are_made) if is_made):
            unless_it_hangs(partial(unlink, path), None)


def _made(path: str) -> bool:
    """Make a file; the front-end's own examination says what is wrong where that fails."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    return True


def stock_images(cloud: Cloud) -> list[Image]:
    """Return the images in mounted stores whose content is in layers of a stock driver; none if the store
    hangs.
    """
    found: list[Image] = []

    def look() -> None:
        for image in cloud.images:
            with contextlib.suppress(OSError, SemisharedError):  # of what is not readable others speak
                if is_stock(image):
                    found.append(image)

    limited(look)
    return list(found)
