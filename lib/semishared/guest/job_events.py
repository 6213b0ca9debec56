# SPDX-License-Identifier: Apache-2.0
"""Wait for QEMU's jobs in a running guest: libvirt's events wake this process, regular looks see progress.

A look also finds an event that was lost: a restarted libvirtd does not report what ended meanwhile. So each
event only causes a look.
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
"""Seconds between two looks without an event."""
SOON_S = 0.02
"""Seconds between two looks after an end is reported, while libvirt still lists the job."""


class Patience:
    """Raises ToolTimeout for work that stands still; `what` names it in the error."""

    def __init__(self, what: str) -> None:
        self._what, self._sign, self._since = what, object(), time.monotonic()

    def see(self, sign: object) -> None:
        """Note progress; raise ToolTimeout if `sign` has not changed for too long (tools/progress.py)."""
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
    """Return libvirt's next event, None if a look is due before."""
    from queue import Empty

    try:
        return heard.get(timeout=min(within_s, progress.limit_s / 4))
    except Empty:
        return None


def block_job(name: str, target: str) -> Dict[str, int]:
    """Return libvirt's report of the blockjob on a disk, with `cur` and `end`; {} if there is none."""
    return domain.ask(
        name, f"blockjob {target} --info", lambda guest: dict(guest.blockJobInfo(target, 0) or {})
    )


class BlockJob:
    """A blockjob of a running guest; its events are collected from before it begins."""

    def __init__(self, name: str, target: str, heard: libvirtd.Heard) -> None:
        self._name, self._target, self._heard = name, target, heard
        self._ready = libvirtd.binding().VIR_DOMAIN_BLOCK_JOB_READY

    def wait_until_ready(self, see: Callable[[], None] = lambda: None) -> None:
        """Wait until a copy is equal to its disk.

        Raise ToolFailed if the job ends before, ToolTimeout if it stands still, and what `see` raises at each
        look.
        """
        for status, job in self._news():
            see()
            if not job:
                raise ToolFailed(
                    f"the copy of disk {self._target} of {self._name} on {os.uname().nodename} "
                    f"has ended before it was done"
                )
            # libvirt reports `cur` equal to `end` only after QEMU has reported the job as ready.
            if status == self._ready or job["cur"] == job["end"]:
                return

    def wait_until_over(self) -> None:
        """Wait until the job has ended; raise ToolTimeout if it stands still."""
        for _, job in self._news():
            if not job:
                return

    def _news(self) -> Iterator[Tuple[Optional[int], Dict[str, int]]]:
        """Yield the status of the last event (None without one) and libvirt's report of the job."""
        patience = Patience(f"the job on disk {self._target} of {self._name}")
        within_s, job = LOOK_S, {"cur": -1, "end": 0}
        while True:
            said = next_said(self._heard, within_s)
            status = said[2] if said and said[0] == self._target else None
            try:
                job = block_job(self._name, self._target)
            except ToolTimeout:
                pass  # libvirtd is busy
            patience.see(job)
            if job:
                progress.reached(max(job["cur"], 0), job["end"])
            yield status, job
            within_s = LOOK_S if status in (None, self._ready) else SOON_S


@contextmanager
def listening(name: str, target: str) -> Iterator[BlockJob]:
    """Listen, within the block, to the job that it begins on a disk."""
    with domain.hearing(name, "BLOCK_JOB_2") as heard:
        yield BlockJob(name, target, heard)
