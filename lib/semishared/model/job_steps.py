# SPDX-License-Identifier: Apache-2.0
"""The step that asks a machine what is moved there now, and its answer.

model/steps.py, which every action loads, does not import it: `steps.from_data` finds it here by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..named import Named
from ..units import human
from .refs import Step, looks

if TYPE_CHECKING:
    from .shapes import Count

DOING = {
    "copy": "copying",
    "fetch": "copying",
    "receive": "receiving",
    "send": "sending",
    "commit": "committing",
    "detach": "detaching",
    "move": "moving",
    "merge": "merging",
    "migrate": "migrating",
    "backup": "backing up",
    "restore": "restoring",
    "verify": "verifying",
    "upload": "uploading",
    "flatten": "flattening",
    "allocate": "allocating",
}
"""Kinds of work -> what a machine is doing with a disk, in words."""
WORK = "work"
"""The kind of work of a step without a word of its own."""


class Job(Named):
    """The note of a process that moves bytes on a machine (tools/jobs.py)."""

    pid: Count
    started: str
    """Its start time in ticks: with the process id it is one process of that machine's boot."""
    action: str
    step: str
    """The kind of work: of DOING, or `work`."""
    vm: int
    """-1 for work on an image."""
    disk: int
    """-1 if the work is on a whole VM, or an image."""
    image: str
    """A base or an image, '' where the VM and its disk say it all."""
    source: str
    """Where the bytes come from, '' for that machine itself, or if it is not known."""
    target: str
    """Where they go, '' for that machine itself."""
    done: Count
    of: Count
    """Bytes in all, 0 if that is not known."""
    rate: Count
    """Bytes per second of the last seconds."""
    since: Count
    """By that machine's clock, in seconds since 1970."""
    asked_by: str
    """`oned`, or a user and a verb of `semishared`."""


@looks
class ListJobs(Step["list[Job]"]):
    """Report what processes of this machine move now, by their notes."""


def far(job: Job) -> str:
    """Return how far it is: the share, or the bytes of what no machine knows beforehand."""
    return f"{min(100, 100 * job.done // job.of)} %" if job.of else f"{human(job.done)} of ?"


def doing(job: Job) -> str:
    """Return what a machine is doing, in words."""
    return DOING.get(job.step, "working")
