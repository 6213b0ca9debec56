# SPDX-License-Identifier: Apache-2.0
"""The stderr protocol of OpenNebula's drivers (docs/explanation/contract.md).

This is the only place that catches everything.

Lines `SEV: text` become log lines, every other line is glued into the message the user sees. A text that
begins with a number is taken for a VM id and can crash oned, so every text begins with the action's name.

OpenNebula 6.10 glues in the log lines too, in the order written, and oned keeps the first 100 characters.
So the log lines of an action are held until it ends, and the user's line is written before them. oned reads
stderr at the end of the action at any rate. A process that is killed takes its held lines along: so what
an operator needs later is never in a line alone (`semishared status` and `gc` list it).

An oned without LANG in its environment takes a letter that is not ASCII for an internal error: such letters
are escaped here.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Callable

from ..errors import SemisharedError, of_system

if TYPE_CHECKING:
    from .args import Subject

LONGEST = 2000
"""Characters of one line: oned cuts long texts itself, and the end of a tool's output matters least."""


def printable(text: str) -> str:
    """Return `text` as one line without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return " ".join(line.split())[:LONGEST]


def escaped(line: str) -> bytes:
    """Return a line in ASCII, at most LONGEST bytes of it: `B\\xfcro` for Büro, `\\u732b` for a cat."""
    return line.encode("ascii", "backslashreplace")[:LONGEST]


class Report:
    """Speak to oned about one action."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.subject: Callable[[], Subject | None] = _nothing
        """What the action is about; asked only when a line is written."""
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        """Keep the log lines until `end`."""
        self._held = []

    def held(self) -> bytes:
        """Return the log lines that were kept, and keep them no more."""
        lines, self._held = self._held or [], None
        return b"".join(lines)

    def end(self) -> None:
        """Write the log lines that were kept."""
        write(self.held())

    def _about(self) -> Subject | None:
        """Return what the action is about, None if its words or oned's do not say."""
        try:
            return self.subject()
        except Exception:  # noqa: BLE001 - oned must get its line whatever oned has said itself
            return None

    def _log(self, severity: str, text: str) -> None:
        subject = self._about()
        vm = f"VM {subject.vm}" if subject and subject.vm >= 0 else ""
        about = f"{vm}: " if vm and not f"{text} ".startswith((f"{vm} ", f"{vm}: ", f"{vm}'s ")) else ""
        line = escaped(f"{severity}: {self.action}: {about}{printable(text)}") + b"\n"
        if self._held is None:
            write(line)
        else:
            self._held.append(line)

    def info(self, text: str) -> None:
        self._log("INFO", text)

    def warn(self, text: str) -> None:
        """Log `text` as a warning. The prefix is WARN: OpenNebula's parser does not know WARNING."""
        self._log("WARN", text)

    def error(self, text: str) -> None:
        """Log `text` as an error detail; the user's one line is `fail`."""
        self._log("ERROR", text)

    def fail(self, error: SemisharedError) -> None:
        """Write the one unprefixed line that becomes the VM's or image's ERROR attribute."""
        from .error_line import rendered

        write(escaped(printable(rendered(error, self.action, self._about()))) + b"\n")


def _nothing() -> None:
    """What an action is about whose words were not understood yet."""


def write(lines: bytes) -> None:
    """Write whole lines to stderr."""
    try:
        sys.stderr.buffer.write(lines)
        sys.stderr.buffer.flush()
    except OSError:
        # A cancelled action runs on with its stderr closed: that no process reads it is no failure.
        pass


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
    report.hold()
    try:
        return _caught(report, work)
    finally:
        report.end()


def _caught(report: Report, work: Callable[[Report], int]) -> int:
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

        report.fail(SemisharedError(f"{type(e).__name__}: {e}"))
        for line in traceback.format_exc().splitlines():
            report.error(line)
        return 2


def drop_output() -> None:
    """Discard unprinted output: at exit Python would try again and choose the exit code itself."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
