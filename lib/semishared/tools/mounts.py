# SPDX-License-Identifier: Apache-2.0
"""The mounts of this machine, from /proc/self/mountinfo (proc(5)): reading that never hangs."""

from __future__ import annotations

import os
import re

from ..named import NamedTuple

MOUNTS = "/proc/self/mountinfo"


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    type: str = ""
    options: tuple[str, ...] = ()
    """Mount options of the file system itself."""
    id: str = ""
    """Unique as long as a process is in this mount."""
    device: str = ""
    """Device number of the file system, equal for all its mounts, unlike that of stat(2) on btrfs."""
    source: str = ""
    """The mounted source; for most file systems on a block device, its path."""


def parse(text: str) -> list[Mount]:
    """Return the mounts in the text of mountinfo; of several at one point the last one is visible."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        words, (type, source, options) = left.split(" "), right.split(" ", 2)
        more = (type, tuple(options.split(",")), words[0], words[2], _plain(source))
        found.append(Mount(_plain(words[4]), *more))
    return found


def _plain(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), word)


def listed() -> list[Mount]:
    with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read())


def under(path: str, mounts: list[Mount]) -> Mount:
    """Return the mount that holds `path`, which is without links."""
    best = Mount("")
    for mount in mounts:
        is_above = path == mount.point or path.startswith(f"{mount.point.rstrip('/')}/")
        if is_above and len(mount.point) >= len(best.point):
            best = mount
    return best


def is_point(opened: str) -> bool:
    """Return True if an open directory (a path of beneath.py) is still a mount point (proc(5), fdinfo)."""
    with open(opened.replace("/fd/", "/fdinfo/"), encoding="ascii") as file:
        ids = [line.split()[1] for line in file if line.startswith("mnt_id:")]
    return any(mount.id in ids and mount.point == os.readlink(opened) for mount in listed())


def of(path: str) -> Mount:
    return under(os.path.realpath(path), listed())
