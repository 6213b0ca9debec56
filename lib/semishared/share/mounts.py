# SPDX-License-Identifier: Apache-2.0
"""What is mounted where a root of shares is."""

from __future__ import annotations

import os
import re

from ..errors import StoreUnavailable
from ..named import NamedTuple

MOUNTS = "/proc/self/mountinfo"


class Mount(NamedTuple):
    """A mounted file system (proc(5), mountinfo)."""

    point: str
    type: str
    options: tuple[str, ...]
    """Those of the file system itself."""


def parse(text: str, path: str) -> Mount:
    """Return what `path` lies on, by the text of mountinfo: of several mounts at one point the last."""
    best = Mount("", "", ())
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), left.split(" ")[4])
        if (path == point or path.startswith(f"{point.rstrip('/')}/")) and len(point) >= len(best.point):
            type, _, options = right.split(" ", 2)
            best = Mount(point, type, tuple(options.split(",")))
    return best


def of(path: str) -> Mount:
    """Return what `path` lies on."""
    with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read(), os.path.realpath(path))


def check(root: str, types: tuple[str, ...]) -> Mount:
    """Return what a root lies on; raise StoreUnavailable unless that is one of `types`."""
    found = of(root)
    if found.type not in types:
        raise StoreUnavailable(f"{root} on {os.uname().nodename} is on {found.type} ({found.point}), not on {types[0]}: is it mounted?")
    return found
