# SPDX-License-Identifier: Apache-2.0
"""One line on the front-end for each action that has ended; `semishared metrics` counts them
(front/action_counts.py).

    semishared_metrics/actions      tm/clone overlay store ok 1234 1073741824

Action, place, source of its bytes, outcome, milliseconds, bytes: words of fixed sets, and numbers. A line is
one write(2) to a file that is open for appending: the lines of actions that end at the same moment do not
mix. The directory is made by the first `semishared metrics`; where there is none no line is left. An action
never fails by its line.

Only actions that oned asks the front-end for have one: what a hypervisor action does on its host is counted
nowhere. One that is killed leaves none. One that fails moved bytes that its host does not report.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import SemisharedError, of_system

if TYPE_CHECKING:
    from typing import Dict, Iterable, Optional

    from ..model.refs import Step

MOST = 8 << 20
"""Bytes of the file, beyond which no line comes: no process counts them any more."""
LARGEST = 10**15
"""Of a number in a line."""
MADE = {
    "CreateOverlay": "overlay",
    "CreateDiff": "diff",
    "CopyImage": "copy",
    "CreateRemote": "remote-first",
    "CreateVolatile": "volatile",
    "LinkInPlace": "in-place",
    "CloneOnStore": "store-clone",
}
"""Step -> the place (model/disk/place.py) of the disk that it makes; RecordNetwork says it itself."""
SOURCES = {"store_read": "store", "received": "peer", "reused": "base"}
"""Bytes that have come (tools/progress.py) -> where they come from."""
WRITTEN = ("store_written", "layers_copied", "moved")
"""Other bytes that an action moves; `sent` is the other end of `received`."""


def directory() -> str:
    """Return the directory of lines and counts, beside one_auth."""
    auth = os.environ.get("ONE_AUTH") or os.path.expanduser("~/.one/one_auth")
    return os.path.join(os.path.dirname(os.path.abspath(auth)), "semishared_metrics")


def path() -> str:
    """Return the file of lines."""
    return f"{directory()}/actions"


def leave(
    action: str,
    began: float,
    sent: Iterable[Step],
    moved: Iterable[Dict[str, int]],
    error: Optional[BaseException] = None,
) -> None:
    """Leave the line of `action` (`tm/clone`), which `began` then by the monotonic clock and has ended now.

    `sent`: the steps that machines were given; `moved`: bytes by kind, of each conversation; `error`: with
    which it has failed.
    """
    kinds = _summed(moved)
    came = {source: kinds.get(name, 0) for name, source in SOURCES.items()}
    most = max(came, key=lambda source: came[source])
    source = most if came[most] else "none"
    size = sum(came.values()) + sum(kinds.get(name, 0) for name in WRITTEN)
    ms = int((time.monotonic() - began) * 1000)
    words = f"{action} {_place(sent)} {source} {_outcome(error)}"
    with suppress(OSError):
        _append(f"{words} {min(ms, LARGEST)} {min(size, LARGEST)}\n".encode())


def _summed(moved: Iterable[Dict[str, int]]) -> Dict[str, int]:
    found: Dict[str, int] = {}
    for kinds in moved:
        for name, size in kinds.items():
            found[name] = found.get(name, 0) + size
    return found


def _place(sent: Iterable[Step]) -> str:
    """Return the place of the disk that an action makes, `none` if it makes none."""
    for step in sent:
        name = type(step).__name__
        if name == "RecordNetwork":
            return str(step.how)  # type: ignore[attr-defined] # one of PLACES, by our own plan
        if name in MADE:
            return MADE[name]
    return "none"


def _outcome(error: Optional[BaseException]) -> str:
    """Return `ok`, or the id of the error that the user reads (opennebula/report.py)."""
    if error is None:
        return "ok"
    if isinstance(error, OSError):
        error = of_system(error, "", SemisharedError)
    return str(getattr(error, "id", SemisharedError.id))


def _append(line: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path(), flags, 0o640)
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size < MOST:
            os.write(fd, line)
    finally:
        os.close(fd)
