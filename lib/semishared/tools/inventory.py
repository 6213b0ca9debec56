# SPDX-License-Identifier: Apache-2.0
"""The content of directories that others can write to: names, newest times, sizes. It follows no link."""

from __future__ import annotations

import os
import time
from typing import Callable, TypeVar

from ..model.disk import names as disk_names
from . import beneath, files, owner, progress

T = TypeVar("T")


def names(directory: str, *, root: bool = False) -> list[str]:
    """Return the names in a directory; none if it is a link, unless it is a `root`."""
    if not root and beneath.is_link(directory):
        return []
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _never(path: str) -> bool:
    return False


def newest(path: str, belongs: Callable[[str], object] = _never) -> tuple[int, int]:
    """Return the newest modification time in ns of `path` and all below it, and their allocated bytes.

    `belongs` returns True for a link whose target counts as part of the directory.
    """
    progress.touch()
    try:
        stat = os.lstat(path)
    except FileNotFoundError:
        return 0, 0
    time_ns, size = files.changed_ns(stat), stat.st_blocks * 512
    if os.path.isdir(path) and (not os.path.islink(path) or belongs(path)):
        for name in names(path, root=True):
            below, bytes_below = newest(f"{path}/{name}", belongs)
            time_ns, size = max(time_ns, below), size + bytes_below
    return time_ns, size


def seen(
    kind: Callable[..., T], path: str, belongs: Callable[[str], object] = _never, /, **more: object
) -> T:
    """Return a tree as a `kind` of leftover_steps.Seen with `more` fields; `belongs` as in `newest`."""
    time_ns, size = newest(path, belongs)
    return kind(path=path, seen=str(time_ns), age=int(time.time() - time_ns / 1e9), bytes=size, **more)


def staged(kind: Callable[..., T], directory: str) -> list[T]:
    """Return the unpublished files in a directory, each as a `kind` of leftover_steps.Staged."""
    return [
        seen(kind, f"{directory}/{name}", lives=owner.lives(name))
        for name in names(directory)
        if disk_names.is_staged(name)
    ]
