# SPDX-License-Identifier: Apache-2.0
"""The stderr protocol of OpenNebula's drivers (docs/explanation/contract.md).

This is the only place that catches everything.

Lines `SEV: text` become log lines, every other line is glued into the message the user sees. A text that
begins with a number is taken for a VM id and can crash oned, so every text begins with the action's name.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Callable

from ..errors import SemisharedError, of_system

LONGEST = 2000
"""Characters of one line: oned cuts long texts itself, and the end of a tool's output matters least."""


def printable(text: str) -> str:
    """Return `text` as one line without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(line.split())[:LONGEST]


class Report:
    """Speak to oned about one action."""

    def __init__(self, action: str) -> None:
        self.action = action

    def _write(self, line: str) -> None:
        data = (line + "\n").encode("utf-8", "replace")
        try:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        except OSError:
            # A cancelled action runs on with its stderr closed: that no process reads it is no failure.
            pass

    def info(self, text: str) -> None:
        self._write(f"INFO: {self.action}: {printable(text)}")

    def warn(self, text: str) -> None:
        """Log `text` as a warning. The prefix is WARN: OpenNebula's parser does not know WARNING."""
        self._write(f"WARN: {self.action}: {printable(text)}")

    def error(self, text: str) -> None:
        """Log `text` as an error detail; the user's one line is `fail`."""
        self._write(f"ERROR: {self.action}: {printable(text)}")

    def fail(self, error: SemisharedError) -> None:
        """Write the one unprefixed line that becomes the VM's or image's ERROR attribute."""
        self._write(f"{self.action}: {printable(error.line())}")


class Progress:
    """Log a long operation after 10, 20, 40 s and so on: oned logs all lines only when the action ends."""

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._now, self._due_s = say, now, 10.0
        self._began = now()

    @property
    def seconds(self) -> float:
        return self._now() - self._began

    def tell(self, how_far: str) -> None:
        """Log `how_far` it is, if a line is due."""
        seconds = self.seconds
        if seconds >= self._due_s:
            while self._due_s <= seconds:
                self._due_s *= 2
            self._say(f"after {seconds:.0f} s: {how_far}")


def caught(action: str, work: Callable[[Report], int]) -> int:
    """Do `work` and return its exit code; after any failure, write the one line that oned must get."""
    report = Report(action)
    try:
        return work(report)
    except SemisharedError as e:
        report.fail(e)
        return 1
    except KeyboardInterrupt:
        report.fail(SemisharedError("interrupted"))
        return 1
    except OSError as e:
        report.fail(of_system(e, f"{type(e).__name__}: {e}", SemisharedError))
        return 1
    except Exception as e:  # noqa: BLE001 - oned must get its one line whatever happens
        import traceback

        for line in traceback.format_exc().splitlines():
            report.error(line)
        report.fail(SemisharedError(f"{type(e).__name__}: {e}"))
        return 2


def drop_output() -> None:
    """Discard unprinted output: at exit Python would try again and choose the exit code itself."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
