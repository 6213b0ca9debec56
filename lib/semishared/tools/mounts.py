# SPDX-License-Identifier: Apache-2.0
"""What is mounted here, by /proc/self/mountinfo (proc(5)): no mount is touched, so none can hang us."""

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
    """Those of the file system itself."""
    id: str = ""
    """No other mount has it while somebody is in this one."""
    device: str = ""
    """Of the file system: all its mounts have the same, subvolumes of btrfs too, of which stat(2) tells each
    by one of its own.
    """
    source: str = ""
    """What was mounted, as its file system has it: of one on a block device, in most, the path to that."""


def parse(text: str) -> list[Mount]:
    """Return what is mounted, by the text of mountinfo: of several at one point the last is what one sees
    there.
    """
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        words, (type, source, options) = left.split(" "), right.split(" ", 2)
        found.append(
            Mount(_plain(words[4]), type, tuple(options.split(",")), words[0], words[2], _plain(source))
        )
    return found


def _plain(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code.group(1), 8)), word)


def listed() -> list[Mount]:
    """Return what is mounted."""
    with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read())


def under(path: str, mounts: list[Mount]) -> Mount:
    """Return what `path`, without links, lies on."""
    best = Mount("")
    for mount in mounts:
        if (path == mount.point or path.startswith(f"{mount.point.rstrip('/')}/")) and len(
            mount.point
        ) >= len(best.point):
            best = mount
    return best


def is_point(opened: str) -> bool:
    """Tell whether an open directory, by the path of it that beneath.py makes, is where something is mounted,
    still (proc(5), fdinfo).
    """
    with open(opened.replace("/fd/", "/fdinfo/"), encoding="ascii") as file:
        ids = [line.split()[1] for line in file if line.startswith("mnt_id:")]
    return any(mount.id in ids and mount.point == os.readlink(opened) for mount in listed())


def of(path: str) -> Mount:
    """Return what `path` lies on."""
    return under(os.path.realpath(path), listed())
