# SPDX-License-Identifier: Apache-2.0
"""The note of what this process moves, on the machine that moves it: what `semishared jobs` lists.

    /run/one/semishared/<pid>.json

OpenNebula's packages make /run/one for the drivers' user, on front-ends and hosts. Where it is absent or
another user's, nothing is noted, and nothing fails. A note is for people: it is not durable, and no action
reads it. Its process removes it; the note of a killed process goes with the next listing (host/jobs.py).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import Deque, Iterator, Tuple

from . import owner, progress

RUN, FOLDER, ENDING = "/run/one", "semishared", ".json"
DIGITS = 10
"""Most digits of a process id."""
VERSION = 1
LEAST = 1 << 20
"""Bytes below which work whose size is unknown is not noted: it moves no data."""
WINDOW_S = 5.0
"""Seconds over which the rate is measured."""
LONGEST = 4096
"""Most bytes of a note."""
TEXT = 200
"""Most characters of a text in a note."""
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder(*, make: bool = False) -> Iterator[int]:
    """Yield the open directory of the notes, -1 if there is none that belongs to this process's user."""
    opened = []
    try:
        try:
            opened.append(_own(os.open(RUN, DIRECTORY)))
            if make:
                try:
                    os.mkdir(FOLDER, 0o750, dir_fd=opened[0])
                except FileExistsError:
                    pass
            opened.append(_own(os.open(FOLDER, DIRECTORY, dir_fd=opened[0])))
        except OSError:
            yield -1
        else:
            yield opened[1]
    finally:
        for fd in opened:
            os.close(fd)


def _own(fd: int) -> int:
    """Return an open directory; close it and raise PermissionError if it belongs to another user."""
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError("the directory of another user")
    return fd


def name_of(pid: int) -> str:
    return f"{pid}{ENDING}"


def pid_of(name: str) -> int:
    """Return the process whose note has that name, or whose half-written one; -1 for another file."""
    number = name.removesuffix(ENDING).removeprefix(".")
    is_ours = name.endswith(ENDING) and number.isascii() and number.isdigit() and number[0] != "0"
    return int(number) if is_ours and len(number) <= DIGITS else -1


def path(at: int, name: str) -> str:
    return f"/proc/self/fd/{at}/{name}"


def forget(at: int, name: str) -> None:
    """Remove a note, if it is there, and what its process has half written."""
    for one in (name, f".{name}"):
        try:
            os.unlink(one, dir_fd=at)
        except OSError:
            pass


class Note:
    """The note of one piece of work; `look` rewrites it, `end` removes it."""

    def __init__(
        self,
        action: str,
        step: str,
        *,
        vm: int = -1,
        disk: int = -1,
        image: str = "",
        asked_by: str = "",
        since_s: float = 0.0,
    ) -> None:
        """`since_s`: for how many seconds the work has been done already."""
        self._fixed = {
            "pid": os.getpid(),
            "started": owner.started(os.getpid()),
            "action": action[:TEXT],
            "step": step[:TEXT],
            "vm": vm,
            "disk": disk,
            "image": image[:TEXT],
            "asked_by": (asked_by or progress.asked_by or "oned")[:TEXT],
            "since": int(time.time() - since_s),
        }
        self._goal = progress.goal
        self._seen: Deque[Tuple[float, int]] = deque([(time.monotonic() - since_s, 0)])
        self._is_noted = False
        self.data: dict[str, object] = {}
        """What was seen last, {} of work that moves nothing."""

    def look(self) -> None:
        """Measure the work, and note it if it moves bytes."""
        goal, now = progress.goal, time.monotonic()
        if goal is not self._goal:
            # The step has gone on to another of its movements, which has a size of its own.
            self._goal = goal
            self._seen = deque([(self._seen[-1][0], 0)])
        done = goal.done()
        self._seen.append((now, done))
        while now - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        if not self.data and not goal.of and done < LEAST:
            return
        self.data = {
            **self._fixed,
            "source": goal.source[:TEXT],
            "target": goal.target[:TEXT],
            "done": min(done, goal.of) if goal.of else done,
            "of": goal.of,
            "rate": self._rate(),
        }
        self._write(self.data)

    def _rate(self) -> int:
        """Return the bytes per second of the last seconds."""
        (then, before), (now, done) = self._seen[0], self._seen[-1]
        return max(0, int((done - before) / max(now - then, 0.1)))

    def _write(self, data: dict[str, object]) -> None:
        note = {"version": VERSION, **data}
        text = json.dumps(note, sort_keys=True).encode("utf-8", "replace")
        if len(text) > LONGEST:
            return
        name = name_of(os.getpid())
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with folder(make=True) as at:
                if at < 0:
                    return
                fd = os.open(path(at, f".{name}"), flags, 0o640)
                try:
                    os.write(fd, text)
                finally:
                    os.close(fd)
                os.rename(f".{name}", name, src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            return  # full, or taken away: the work goes on unseen
        self._is_noted = True

    def end(self) -> None:
        """Remove the note."""
        if self._is_noted:
            with folder() as at:
                if at >= 0:
                    forget(at, name_of(os.getpid()))
        self._is_noted = False


@contextmanager
def noted(
    action: str, step: str, *, vm: int = -1, disk: int = -1, image: str = "", asked_by: str = ""
) -> Iterator[None]:
    """Note the work of the block while it lasts, from its third second on; the arguments as of Note.

    For a process that is no host side: that one notes its steps itself (host/service.py).
    """
    progress.expect()
    note, ended = Note(action, step, vm=vm, disk=disk, image=image, asked_by=asked_by), threading.Event()

    def looks() -> None:
        due_s = progress.NOTED_S
        while not ended.wait(due_s):
            note.look()
            due_s = progress.TICK_S

    thread = threading.Thread(target=looks, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        note.end()
