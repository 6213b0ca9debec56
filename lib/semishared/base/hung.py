# SPDX-License-Identifier: Apache-2.0
"""Devices that hang: whoever touches one waits for ever, and nobody else on the host may wait with him.

    <root>/devices/<uuid>  -> <mount>/.semishared         as long as it answers
                           -> hung:<mount>/.semishared    when it has not: what leads through this link leads nowhere then, so
                                                          that for everybody the device is as one that is not mounted

Who is about to follow links to devices looks first: each plan, what monitoring asks, and whoever starts a guest. The label is read past
the page cache, by a program: one in a hung system call cannot be killed, and a thread in one would keep us from ending. When a device
was looked at last is the time of its link; one that hangs is asked again every so often, and is back when it answers.

What each crash leaves: one link or the other, either of which the next look puts right.
"""

from __future__ import annotations

import os
import time
from typing import Iterable, Sequence

from ..model import layout, layout_devices
from ..tools import files
from ..tools.crash_points import point
from . import devices

ANSWER_S = 8.0
"""A device that takes longer to read one block hangs."""
FRESH_S, AGAIN_S = 5.0, 60.0
"""Seconds for which it is believed that a device answers, and that it hangs."""


def look_before(steps: Iterable[object]) -> None:
    """Look at the devices of the base stores with which steps have to do."""
    for root in sorted(set(filter(None, map(_root, steps)))):
        look(root)


def _root(step: object) -> str:
    root, location = getattr(step, "root", ""), getattr(step, "location", "")
    vm_dir = getattr(step, "vm_dir", "") or getattr(getattr(step, "disk", None), "vm_dir", "")
    if location or vm_dir:
        root = layout.base_store(location) if location else layout.base_store_of(vm_dir)
    return str(root)


def look(root: str) -> None:
    """See which devices of this host's pool answer; let those that do not be as if they were not there, and the others be back."""
    now, asked = time.time(), {}
    for uuid in devices.registered(root):
        link = layout_devices.device(root, uuid)
        try:
            target, since = os.readlink(link), now - os.lstat(link).st_mtime
        except OSError:
            continue  # it has just been let go of
        if not 0 <= since < (AGAIN_S if layout_devices.is_aside(target) else FRESH_S):
            asked[link] = target
    silent = unanswered([layout_devices.side_of(target) for target in asked.values()])
    for link, target in asked.items():
        side = layout_devices.side_of(target)
        _note(link, target, layout_devices.aside(side) if side in silent else side)


def _note(link: str, was: str, target: str) -> None:
    try:
        if os.readlink(link) != was:
            return  # somebody else has looked meanwhile, or declared it anew
        if was == target:
            os.utime(link, follow_symlinks=False)
            return
        files.symlink(target, link)
        point("device put aside, or back")
    except OSError:
        pass  # the next look does it


def unanswered(sides: Sequence[str]) -> "list[str]":
    """Return which directories of ours on devices do not answer in their time; what answers with an error has answered."""
    from ..tools import run

    if not sides:
        return []
    words = ["dd", "iflag=direct", "bs=4096", "count=1", "of=/dev/null", "status=none"]
    silent = run.silent([[*words, f"if={layout_devices.label(side)}"] for side in sides], ANSWER_S)
    return [sides[number] for number in silent]
