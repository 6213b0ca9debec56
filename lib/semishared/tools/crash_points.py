# SPDX-License-Identifier: Apache-2.0
"""Named points between effects, where tests kill the process: the proof that any action may be killed needs
every one of them.

Without the environment variables a point costs one comparison. They are not passed through ssh.
SEMISHARED_KILL_AT=N    SIGKILL to this process at its N-th point
SEMISHARED_STOP_AT=N    SIGSTOP to this process at its N-th point: at work for ever, until somebody ends it
SEMISHARED_TRACE=FILE   append the points' names to FILE
"""

from __future__ import annotations

import os
import signal

_kill_at = int(os.environ.get("SEMISHARED_KILL_AT", "0") or 0)
_stop_at = int(os.environ.get("SEMISHARED_STOP_AT", "0") or 0)
_file = os.environ.get("SEMISHARED_TRACE", "")
_count = 0


def is_on() -> bool:
    """Tell whether a test looks at the points of this process."""
    return bool(_kill_at or _stop_at or _file)


def point(name: str) -> None:
    """Mark that the effect called `name` has just happened."""
    global _count
    if not is_on():
        return
    _count += 1
    if _file:
        with open(_file, "a", encoding="utf-8") as file:
            file.write(f"{_count} {name}\n")
    if _count == _kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if _count == _stop_at:
        os.kill(os.getpid(), signal.SIGSTOP)
