# SPDX-License-Identifier: Apache-2.0
"""The system datastores below DATASTORE_LOCATION: image datastores are mounted beside them, and one of those may hang.

So what is mounted there, or a link, is not touched before it has said within a limit whose it is (`.monitor`), and by a program: who is in
a hung system call cannot be stopped. A plain directory of the file system of DATASTORE_LOCATION is as well as that.
"""

from __future__ import annotations

import os
import time
from typing import Iterator

from ..errors import SemisharedError, ToolTimeout
from ..model import layout
from ..tools import mounts
from ..tools.run import run

ANSWER_S = 3
"""What takes longer to answer hangs."""
AGAIN_S = 60.0
"""Seconds for which it is believed that something hangs."""
_silent: "dict[str, float]" = {}


def systems(location: str, *, whole: bool = False) -> "list[str]":
    """Return the numbers of directories in which VMs can be, in order; of what is mounted only the system datastores of ours.

    With `whole` raise ToolTimeout where something does not answer: there may be VMs in it, which nobody is to take for gone.
    """
    place, mounted = os.path.realpath(location), {mount.point for mount in mounts.listed()}
    found = []
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
        if not layout.is_number(entry.name):
            continue
        path = f"{place}/{entry.name}"
        try:
            if not (path in mounted or entry.is_symlink()) or is_ours(path):
                found.append(entry.name)
        except ToolTimeout:
            if whole:
                raise
    return found


def directories(location: str) -> Iterator[str]:
    """Yield the directories of VMs, and those beside them (disk/beside.py); raise ToolTimeout where something does not answer."""
    for parent in [f"{location}/{system}" for system in systems(location, whole=True)]:
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            if (layout.is_number(name) or layout.beside_named(name)) and not os.path.islink(f"{parent}/{name}"):
                yield f"{parent}/{name}"


def is_ours(system: str) -> bool:
    """Tell whether something is a system datastore of ours; raise ToolTimeout if it does not answer."""
    if time.monotonic() - _silent.get(system, -AGAIN_S) < AGAIN_S:
        raise ToolTimeout(f"{system} on {os.uname().nodename} does not answer")
    try:
        run(["grep", "-qsx", "semishared", layout.monitor(system)], timeout_s=ANSWER_S)
    except ToolTimeout:
        _silent[system] = time.monotonic()
        raise ToolTimeout(f"{system} on {os.uname().nodename} does not answer") from None
    except SemisharedError:
        return False
    return True
