# SPDX-License-Identifier: Apache-2.0
"""Wait for QEMU's jobs in a running guest: libvirt's events wake us, a look now and then sees progress.

A look also finds what nobody heard: a libvirtd that was started anew says nothing of what ended meanwhile. So
what was heard is never believed by itself.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from ..errors import ToolFailed, ToolTimeout
from ..tools import progress
from . import domain, libvirtd

LOOK_S = 2.0
"""Seconds between two looks, if nothing is heard."""
SOON_S = 0.02
"""The same when a job is said to be over, and libvirt still has it."""


class Patience:
    """Since when something has done nothing; `what` is for the error."""

    def __init__(self, what: str) -> None:
        self._what, self._sign, self._since = what, object(), time.monotonic()

    def see(self, sign: object) -> None:
        """Take note of how far it has come; raise ToolTimeout if it stands still (tools/progress.py)."""
        progress.touch()
        if sign != self._sign:
            self._sign, self._since = sign, time.monotonic()
        idle_s = time.monotonic() - self._since
        if idle_s > progress.limit_s and idle_s > progress.patience_s():
            raise ToolTimeout(
                f"{self._what} on {os.uname().nodename} has done nothing for {idle_s:.0f} s: is "
                f"its storage hung?"
            )


def next_said(heard: libvirtd.Heard, within_s: float = LOOK_S) -> Optional[Tuple[Any, ...]]:
    """Return what libvirt says next, None if it says nothing until a look is due."""
    from queue import Empty

    try:
        return heard.get(timeout=min(within_s, progress.limit_s / 4))
    except Empty:
        return None


def block_job(name: str, target: str) -> Dict[str, int]:
    """Return what libvirt says of QEMU's job on a disk: how far it has come (`cur`, `end`); empty if there is
    none.
    """
    return domain.ask(
        name, f"blockjob {target} --info", lambda guest: dict(guest.blockJobInfo(target, 0) or {})
    )


class BlockJob:
    """A job on a disk of a running guest, listened to since before it began."""

    def __init__(self, name: str, target: str, heard: libvirtd.Heard) -> None:
        self._name, self._target, self._heard = name, target, heard
        self._ready = libvirtd.binding().VIR_DOMAIN_BLOCK_JOB_READY

    def wait_until_ready(self, see: Callable[[], None] = lambda: None) -> None:
        """Wait until a copy is equal to its disk; raise ToolFailed if it ends before, ToolTimeout if it
        stands still, what `see` raises.
        """
        for status, job in self._news():
            see()
            if not job:
                raise ToolFailed(
                    f"the copy of disk {self._target} of {self._name} on {os.uname().nodename} "
                    f"has ended before it was done"
                )
            # libvirt says that they are equal only if QEMU says that the copy is ready.
            if status == self._ready or job["cur"] == job["end"]:
                return

    def wait_until_over(self) -> None:
        """Wait until there is no job any more; raise ToolTimeout if it stands still."""
        for _, job in self._news():
            if not job:
                return

    def _news(self) -> Iterator[Tuple[Optional[int], Dict[str, int]]]:
        """Yield what was heard of the job, None if nothing was, and how far it is."""
        patience = Patience(f"the job on disk {self._target} of {self._name}")
        within_s, job = LOOK_S, {"cur": -1, "end": 0}
        while True:
            said = next_said(self._heard, within_s)
            status = said[2] if said and said[0] == self._target else None
            try:
                job = block_job(self._name, self._target)
            except ToolTimeout:
                pass  # a busy libvirtd
            patience.see(job)
            yield status, job
            within_s = LOOK_S if status in (None, self._ready) else SOON_S


@contextmanager
def listening(name: str, target: str) -> Iterator[BlockJob]:
    """Listen, within the block, to the job that it begins on a disk."""
    with domain.hearing(name, "BLOCK_JOB_2") as heard:
        yield BlockJob(name, target, heard)
