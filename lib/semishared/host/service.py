# SPDX-License-Identifier: Apache-2.0
"""The host side: read plans from stdin, carry them out, answer on stdout (messages: wire/messages.py).

    -> {"plan": {"version", "action", "seq", "steps": [...]}}         then data for steps that receive
    <- {"event": "alive"}  {"event": "sent", ...}  data
    <- {"event": "ask", ...}   -> {"answer": {...}}                   only if the plan says "answers"
    <- {"event": "done", "results": [...], "moved": {...}}  or  {"event": "error", "id", "detail"}

When stdin ends during a plan, this process kills itself and all that it started: a dead front-end leaves no
process at work. Locks end with the process; half-made files are staged under names that the next run removes.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING

from ..device import offline
from ..disk import epochs, guard, records
from ..errors import (
    BadArguments,
    HostFailed,
    HostOutdated,
    SemisharedError,
    TooLarge,
    ToolTimeout,
    of_system,
)
from ..guest import job_lock
from ..model import steps as s
from ..named import to_data
from ..table import STEPS, carry_out, loaded
from ..tools import locks, progress
from ..tools.beneath import readable
from ..tools.ending import ended
from ..wire.messages import RELEASE, Message, Reader, Writer
from .work import Work

if TYPE_CHECKING:
    from ..model.disk.acquired import Given
    from ..tools.jobs import Note

loaded(STEPS["CreateOverlay"])
"""Loaded while the front-end still asks oned: most plans need these modules."""
ALIVE_S = 5
DYING_S = 5


class Noting:
    """The step under way, noted while it moves bytes (tools/jobs.py): short actions load nothing for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: list[s.Step] = []
        self._action = ""
        self._step: s.Step | None = None
        self._since = 0.0
        self._note: Note | None = None
        self._noted: s.Step | None = None
        """The step of which the note is."""

    def plan(self, action: str, steps: list[s.Step]) -> None:
        self._action, self._steps = action, steps

    def begin(self, step: s.Step | None) -> None:
        """Say which step is under way; None: none is, and nothing stays noted."""
        progress.expect()
        with self._lock:
            self._step, self._since = step, time.monotonic()
            if step is None and self._note:
                self._note.end()
                self._note = None

    def look(self) -> None:
        """Note how far the step is, if it takes long."""
        with self._lock:
            step, since_s = self._step, time.monotonic() - self._since
            if self._note and step is not self._noted:
                self._note.end()
                self._note = None
            if step is None or since_s < progress.NOTED_S:
                return
            if self._note is None:
                from . import jobs

                self._note, self._noted = jobs.begun(self._action, step, self._steps, since_s), step
            self._note.look()

    def said(self) -> dict[str, object]:
        """Return what goes with a sign of life: the step, if it is noted."""
        note = self._note
        return {"job": note.data} if note and note.data else {}


class Host:
    """One front-end action's session on this host."""

    def __init__(self, stdin: int, stdout: int) -> None:
        self._reader = Reader(stdin)
        self._writer = Writer(stdout)
        self._inbox: queue.Queue[Message] = queue.Queue(maxsize=16)
        self._busy = False
        self._noting = Noting()
        self._known: dict[str, epochs.Noted] = {}
        """Counters of this machine when the session's plans arrived: they are one action."""

    def serve(self) -> int:
        """Carry out plans until stdin ends; return the exit code."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._breathe, daemon=True).start()
        while True:
            message = self._inbox.get()
            if message is None:
                return 0
            if isinstance(message, bytes) or "plan" not in message:
                continue  # data for a plan that has failed
            try:
                answer = {"event": "done", **self._carry_out(message["plan"])}
            except SemisharedError as e:
                answer = {"event": "error", "id": e.id, "detail": e.detail}
            except OSError as e:
                wrong = of_system(e, f"on {os.uname().nodename}: {readable(str(e))}")
                answer = {"event": "error", "id": wrong.id, "detail": wrong.detail}
            self._busy = False
            if progress.evicted:
                answer["evicted"] = list(progress.evicted)
                progress.evicted.clear()
            try:
                self._writer.send(**answer)
            except TooLarge as e:
                self._writer.send(event="error", id=e.id, detail=f"on {os.uname().nodename}: {e.detail}")
            if isinstance(message["plan"], dict) and message["plan"].get("last") is True:
                return 0

    def _carry_out(self, plan: object) -> dict[str, object]:
        version = plan.get("version") if isinstance(plan, dict) else None
        if version != RELEASE:
            raise HostOutdated(
                f"host {os.uname().nodename} has semishared {RELEASE}, the front-end {version}"
            )
        seq, steps = read_plan(plan)
        records.given = read_given(plan)
        offline.look_before(steps)
        planned = epochs.arrived(seq, steps, self._known)
        limit_s = plan.get("standstill_s") if isinstance(plan, dict) else None
        if isinstance(limit_s, (int, float)) and limit_s > 0:
            progress.limit_s = limit_s
        job_lock.action = str(plan.get("action", "")) if isinstance(plan, dict) else ""
        progress.asked_by = str(plan.get("by", "")) if isinstance(plan, dict) else ""
        answers = isinstance(plan, dict) and plan.get("answers") is True
        work = Work(planned, self._writer, self._inbox.get, self._heard, answers)
        locks.say = work.warn
        progress.moved.clear()
        progress.came.clear()
        results = []
        self._noting.plan(job_lock.action, steps)
        try:
            for step in steps:
                progress.touch()
                guard.guard(step, work.warn, seq)
                self._noting.begin(step)
                results.append(to_data(carry_out(step, work)))
        finally:
            self._noting.begin(None)
        return {"results": results, "moved": dict(progress.moved), "came": dict(progress.came)}

    def _heard(self) -> Message:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while True:
            try:
                message = self._reader.read()
            except (HostFailed, OSError):
                message = None
            if isinstance(message, dict) and "plan" in message:
                # Already here: a queued plan whose front-end dies must not run. And what the plan waited
                # for is no standstill.
                progress.touch()
                self._busy = True
            if message is None and self._busy:
                self._die()
            self._inbox.put(message)
            if message is None:
                return

    @staticmethod
    def _die() -> None:
        """Run the plan's last words (such as a thaw) for at most DYING_S seconds, then kill the group."""
        threading.Timer(DYING_S, lambda: os.killpg(0, signal.SIGKILL)).start()
        for do in progress.last_words:
            try:
                do()
            except (SemisharedError, OSError):
                pass  # the next action does it
        os.killpg(0, signal.SIGKILL)

    def _breathe(self) -> None:
        tick_s, left_s = min(progress.TICK_S, ALIVE_S), float(ALIVE_S)
        while True:
            time.sleep(tick_s)
            if not self._busy:
                continue
            try:
                self._noting.look()
            except (OSError, ValueError, ImportError, AttributeError, LookupError, RuntimeError, TypeError):
                pass  # as while the package is replaced: the work goes on unseen
            left_s -= tick_s
            if left_s > 0:
                continue
            left_s = float(ALIVE_S)
            idle_s = progress.of_plan_s()
            if idle_s > progress.limit_s and idle_s > progress.patience_s():
                error = ToolTimeout(
                    f"no progress on {os.uname().nodename} for {idle_s:.0f} s: is its storage hung?"
                )
                self._writer.send(event="error", id=error.id, detail=error.detail)
                os.killpg(0, signal.SIGKILL)
            try:
                self._writer.send(event="alive", **self._noting.said())
            except OSError:
                os.killpg(0, signal.SIGKILL)


def read_plan(data: object) -> tuple[int, list[s.Step]]:
    """Return SEQ (-1: not known) and steps of a plan in JSON data; raise BadArguments."""
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("steps"), list)
        or not isinstance(data.get("seq"), int)
    ):
        raise BadArguments("not a plan")
    return data["seq"], [s.from_data(step) for step in data["steps"]]


def read_given(plan: object) -> dict[int, dict[int, Given]]:
    """Return the disks that oned has given VMs, by VM, as far as the plan has them; raise BadArguments."""
    said = plan.get("given", []) if isinstance(plan, dict) else []
    if not said:
        return {}
    from ..model.disk.acquired import Given  # only plans of moves have it

    return {vm: {disk: Given.from_data(data) for disk, data in disks} for vm, disks in said}


def main() -> int:
    """Serve the front-end on stdin and stdout."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # Guests' data is for the drivers' user and group only, whatever umask ssh has set.
    os.umask(0o027)
    return ended(Host(0, 1).serve())
