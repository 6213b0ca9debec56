# SPDX-License-Identifier: Apache-2.0
"""Notes of what processes of this machine move (tools/jobs.py): what the host side notes, and their list.

A note is written by any process of the drivers' user, so what is read back is checked by its shape. One whose
process is gone (id and start time) is no job: the listing removes it.
"""

from __future__ import annotations

import json
import os
from typing import Sequence

from ..model.job_steps import WORK, Job
from ..model.refs import DiskRef, ImageRef, Step
from ..model.shapes import Misfit, declared, read
from ..tools import jobs, owner

KINDS = {
    "AllocateDisk": "allocate",
    "BackUp": "backup",
    "CloneStored": "copy",
    "CommitDisk": "commit",
    "CopyAcross": "copy",
    "CopyFile": "copy",
    "CopyHeld": "copy",
    "CopyImage": "copy",
    "CopyOut": "copy",
    "CopyStored": "copy",
    "DetachVm": "detach",
    "DigestImage": "verify",
    "FetchBases": "fetch",
    "FillImage": "copy",
    "FinishDisk": "commit",
    "FlattenImage": "flatten",
    "MendBase": "fetch",
    "MergeDeltas": "merge",
    "MergeLayer": "merge",
    "MoveBase": "move",
    "MoveLayers": "move",
    "PullLayer": "merge",
    "ReadBase": "verify",
    "ReceiveFile": "receive",
    "ReceiveImage": "upload",
    "ReceiveVm": "receive",
    "RenewVm": "fetch",
    "ReplaceLostBases": "fetch",
    "RestoreDisk": "restore",
    "RestoreImage": "restore",
    "SaveDisk": "copy",
    "SendManifest": "send",
    "SendVm": "send",
    "ServeBase": "send",
    "ServeExtents": "send",
    "StageBase": "fetch",
    "StageImage": "upload",
    "StreamBases": "send",
    "VerifyBase": "verify",
}
"""Steps that move much -> the kind of work (model/job_steps.py)."""
MOST = 1000
"""Most notes that are read."""


def begun(action: str, step: Step, plan: Sequence[Step], since_s: float) -> jobs.Note:
    """Return the note of a step of a plan which has been at work for `since_s` seconds.

    What the step does not name, such as the VM of a base that is fetched, another step of the plan does: its
    disk too, if the plan is about one disk.
    """
    vm, disks = _about(step)
    others = [_about(one) for one in plan]
    if vm < 0:
        vm = next((number for number, _ in others if number >= 0), -1)
        disks = {disk for number, found in others if number == vm for disk in found}
    disk = disks.pop() if len(disks) == 1 else -1
    image = next(filter(None, map(_image, (step, *plan))), "")
    kind = KINDS.get(type(step).__name__, WORK)
    return jobs.Note(action, kind, vm=vm, disk=disk, image=image, since_s=since_s)


def _about(step: Step) -> tuple[int, set[int]]:
    """Return the VM that a step names, -1 for none, and its disk."""
    disk = getattr(step, "disk", None)
    if isinstance(disk, DiskRef):
        return disk.vm, {disk.disk}
    vm = getattr(step, "vm", -1)
    return (vm if isinstance(vm, int) else -1), set()


def _image(step: Step) -> str:
    """Return the image or base that a step is about, '' if it names none."""
    parts = getattr(step, "parts", ())
    image = getattr(step, "image", None) or (parts[0].image if parts else None)
    if isinstance(image, ImageRef):
        return f"image {image.id}"
    return str(getattr(step, "name", ""))


def listed() -> list[Job]:
    """Return the notes of processes that run; remove the others."""
    found = []
    with jobs.folder() as at:
        for name in sorted(os.listdir(at))[:MOST] if at >= 0 else ():
            pid = jobs.pid_of(name)
            if pid < 0:
                continue
            job = None if name.startswith(".") else _read(at, name)
            runs = owner.waiting(pid)
            if job and job.pid == pid and runs == job.started:
                found.append(job)
            elif not runs or job:
                # A note that cannot be read may be of a process that runs: it stays, and is not shown.
                jobs.forget(at, jobs.name_of(pid))
    return found


def _read(at: int, name: str) -> Job | None:
    """Return a note, None for what no mover of ours has written."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(jobs.path(at, name), flags)
        try:
            text = os.read(fd, jobs.LONGEST + 1)
        finally:
            os.close(fd)
        data = json.loads(text)
        job: Job = read(data, declared(Job, Job.__module__))
    except (OSError, ValueError, RecursionError, Misfit):
        return None
    return job if len(text) <= jobs.LONGEST and data.get("version") == jobs.VERSION else None
