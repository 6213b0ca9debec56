# SPDX-License-Identifier: Apache-2.0
"""Note which lines of the package a process runs: what mutants/reach.py puts into a copy of the package, to
be loaded with it.

Each line is written to `hits` in a folder the first time: a process that is killed, or that becomes another
program, has told all. A fork, and a test that begins (`forget`), tell anew.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any, Dict, Optional, Set


class Collector:
    """Traces this process and all threads of it."""

    def __init__(self, top: str, folder: str) -> None:
        self._top, self._file = top.rstrip("/") + "/", f"{folder}/hits"
        self._hits: Dict[CodeType, Set[int]] = {}
        self._pid, self._fd = 0, -1

    def start(self) -> None:
        """Trace from now on."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def forget(self) -> None:
        """Write what comes again from here on, into the file that is there then."""
        self._hits.clear()
        # A fork may have closed what was open before it, and have something else under that number.
        if self._fd >= 0 and os.getpid() == self._pid:
            os.close(self._fd)
        self._pid, self._fd = os.getpid(), -1

    def _hit(self, code: CodeType, line: int) -> None:
        if os.getpid() != self._pid:
            self.forget()
        lines = self._hits.setdefault(code, set())
        if line in lines:
            return
        lines.add(line)
        try:
            if self._fd < 0:
                self._fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.write(self._fd, f"{code.co_filename[len(self._top) :]}:{line}\n".encode())
        except OSError:
            self._fd = -1  # the process has closed what it does not know, or may not write there

    def _called(self, frame: FrameType, event: str, argument: Any) -> Optional[Any]:
        if not frame.f_code.co_filename.startswith(self._top):
            return None
        self._hit(frame.f_code, frame.f_lineno)
        return self._within

    def _within(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._hit(frame.f_code, frame.f_lineno)
        return self._within


def begin(top: str, folder: str) -> Optional[Collector]:
    """Start collecting below `top`, if there is that folder for it."""
    if not os.path.isdir(folder):
        return None
    collector = Collector(top, folder)
    collector.start()
    return collector
