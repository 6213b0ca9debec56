# SPDX-License-Identifier: Apache-2.0
"""Give every node a control group subtree of its own, whichever cgroup version the machine has."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

WANTED = ("cpu", "cpuacct", "memory", "pids")


@dataclass(frozen=True)
class Hierarchy:
    """Describe one mounted cgroup hierarchy the lab uses; `controllers` is empty for version 2."""

    mount: Path
    controllers: str


def hierarchies() -> list[Hierarchy]:
    """List the hierarchies a node gets a subtree in: the v1 ones libvirt wants, else the unified one."""
    old: list[Hierarchy] = []
    unified: Optional[Hierarchy] = None
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4])
        kind, _, options = after.split(" ", 2)
        names = [name for name in options.split(",") if name in WANTED]
        if kind == "cgroup" and names and not any(known.controllers == ",".join(names) for known in old):
            old.append(Hierarchy(mount, ",".join(names)))
        elif kind == "cgroup2" and unified is None:
            unified = Hierarchy(mount, "")
    if any("cpu" in known.controllers.split(",") for known in old):
        return old
    return [unified] if unified else []


def _enable_controllers(group: Path) -> None:
    for name in ("cpu", "memory", "io", "pids"):
        try:
            (group / "cgroup.subtree_control").write_text("+" + name)
        except OSError:
            continue  # not offered here, or the group still holds processes: libvirt then does without


def create(lab_id: str, node: str) -> list[Path]:
    """Make the node's groups and return the files its first process writes itself into."""
    files: list[Path] = []
    for hierarchy in hierarchies():
        top = hierarchy.mount / f"semishared-{lab_id}"
        group = top / node
        # What an earlier start of the node left: in version 2 a group that hands controllers down takes no process.
        _remove([group], 5.0)
        try:
            group.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue  # a read-only cgroup mount (some containers): the lab works, without <cputune>
        if not hierarchy.controllers:
            (top / "spawn").mkdir(exist_ok=True)
            _enable_controllers(hierarchy.mount)
            _enable_controllers(top)
        files.append(group / "cgroup.procs")
    return files


def release_parent(lab_id: str, parent: int) -> None:
    """Move the process that waits for a node's init out of the node's group.

    Version 2 lets a group hand controllers down only while it holds no process itself.
    """
    for hierarchy in hierarchies():
        if not hierarchy.controllers:
            try:
                (hierarchy.mount / f"semishared-{lab_id}" / "spawn" / "cgroup.procs").write_text(str(parent))
            except OSError:
                continue


def leftovers(lab_id: str) -> list[Path]:
    """List the groups of this lab that still exist."""
    tops = (hierarchy.mount / f"semishared-{lab_id}" for hierarchy in hierarchies())
    return [top for top in tops if top.exists()]


def _remove(groups: list[Path], patience: float) -> None:
    # rmdir races with processes that are still dying, so try again for a while.
    deadline = time.monotonic() + patience
    while True:
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    continue
        groups = [group for group in groups if group.exists()]
        if not groups or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def remove(lab_id: str, patience: float = 5.0) -> None:
    """Remove the lab's groups."""
    _remove(leftovers(lab_id), patience)
