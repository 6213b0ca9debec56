# SPDX-License-Identifier: Apache-2.0
"""NOW in a VM's vector in oned: what a machine moves for the action that waits for it.

    SEMISHARED = [ DISK0 = "overlay on h2, base image 7", NOW = "copying disk 0: 41 %, 80.0 MiB/s from h3" ]

A machine says it with its signs of life (host/service.py); it is written every 30 s at most, beside what the
vector has, and goes when the action ends. oned may be slow, or down: a thread writes, and the action does not
wait for it. The note of the VM that is left before each line has the next publisher remove what is there
after an action that was killed.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator, Optional

from ..errors import SemisharedError
from ..model.job_steps import Job, doing, far
from ..model.shapes import Misfit, declared, read
from ..opennebula.oned import Oned
from ..plan.care import vm_vector
from ..units import human
from . import vm_notes

if TYPE_CHECKING:
    from ..wire.session import Session

EVERY_S = 30.0
END_S = 2.0
"""Seconds that the end of an action waits for a line that is being written, and for its removal."""


class Now:
    """The line of one VM."""

    def __init__(self, vm: int) -> None:
        self._vm, self._last = vm, float("-inf")
        self._thread: Optional[threading.Thread] = None

    def heard(self, said: object) -> None:
        """Write what a machine has said, unless that is no job, or the last line is younger than EVERY_S."""
        try:
            job: Job = read(said, declared(Job, Job.__module__))
        except Misfit:
            return
        if time.monotonic() - self._last < EVERY_S or (self._thread and self._thread.is_alive()):
            return
        self._last = time.monotonic()
        self._begin(line(job))

    def end(self) -> None:
        """Remove the line, if there is one and oned answers soon; else the next publisher does."""
        if self._thread is None:
            return
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._begin("")
            self._thread.join(END_S)
        self._thread = None

    def _begin(self, text: str) -> None:
        self._thread = threading.Thread(target=self._write, args=(text,), daemon=True)
        self._thread.start()

    def _write(self, text: str) -> None:
        vm_notes.leave(self._vm)
        try:
            oned = Oned()
            fields = vm_vector.with_now(oned.vm(self._vm), text)
            oned.update_vm(self._vm, vm_vector.vm_template(fields))
        except SemisharedError:
            pass  # the action does not depend on it


def line(job: Job) -> str:
    """Return what is moved, in words."""
    disk = f" disk {job.disk}" if job.disk >= 0 else ""
    way = f" from {job.source}" * bool(job.source) + f" to {job.target}" * bool(job.target)
    return f"{doing(job)}{disk}: {far(job)}, {human(job.rate)}/s{way}"


@contextmanager
def telling(vm: int, session: Session) -> Iterator[None]:
    """Write, within the block, what the machine of a conversation moves for a VM."""
    now = Now(vm)
    session.on_job = now.heard
    try:
        yield
    finally:
        session.on_job = None
        now.end()
