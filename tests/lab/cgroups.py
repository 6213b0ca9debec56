# SPDX-License-Identifier: Apache-2.0
"""Give every node a control group subtree of its own, whichever cgroup version the machine has."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Optional

WANTED = ("cpu", "cpuacct", "memory", "pids")
SUITE = "semishared-suite-"
VARIABLE = "SEMISHARED_SUITE_GROUP"


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


class Account:
    """A group in which a command and all labs it puts up run, to know what they took of the processors.

    What `wait` says is less: a process that dies with its namespace is waited for by nobody.
    """

    def __init__(self, name: str) -> None:
        """Make the group; where this cannot be, nothing is known."""
        self._name = f"{SUITE}{os.getpid()}-{name}"
        self._group: Optional[Path] = None
        for hierarchy in hierarchies():
            if not hierarchy.controllers or "cpuacct" in hierarchy.controllers.split(","):
                try:
                    (hierarchy.mount / self._name / "tests").mkdir(parents=True)
                except OSError:
                    continue
                self._group = hierarchy.mount / self._name

    def enter(self) -> list[str]:
        """Return the words to run a command by."""
        if not self._group:
            return []
        return ["bash", "-c", 'echo 0 >"$0" && exec "$@"', str(self._group / "tests/cgroup.procs")]

    @property
    def environment(self) -> dict[str, str]:
        """Return what tells `create` where to make the groups of labs."""
        return {VARIABLE: self._name}

    def end(self) -> Optional[float]:
        """Return the seconds of processor of all that ran in it; remove it."""
        if not self._group:
            return None
        seconds = _used(self._group)
        _remove([self._group], 1.0)
        return seconds


def _used(group: Path) -> float:
    if (group / "cpuacct.usage").exists():
        return int((group / "cpuacct.usage").read_text()) / 1e9
    return int((group / "cpu.stat").read_text().split()[1]) / 1e6


def used() -> Optional[float]:
    """Return the seconds of processor of the suite that this process belongs to so far, None if it belongs to
    none.
    """
    group = _mine()
    return _used(group) if group else None


@cache
def _mine() -> Optional[Path]:
    name = os.environ.get(VARIABLE)
    groups = [hierarchy.mount / name for hierarchy in hierarchies()] if name else []
    return next((group for group in groups if group.exists()), None)


def _top(hierarchy: Hierarchy, lab_id: str) -> Path:
    """Return where a lab's groups are made: below the group of the suite that makes it, where there is
    one.
    """
    suite = hierarchy.mount / os.environ.get(VARIABLE, "")
    return (suite if suite.exists() else hierarchy.mount) / f"semishared-{lab_id}"


def create(lab_id: str, node: str) -> list[Path]:
    """Make the node's groups and return the files its first process writes itself into."""
    files: list[Path] = []
    for hierarchy in hierarchies():
        top = _top(hierarchy, lab_id)
        group = top / node
        # What an earlier start of the node left: in version 2 a group that hands controllers down takes no
        # process.
        _remove([group], 5.0)
        try:
            group.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue  # a read-only cgroup mount (some containers): the lab works, without <cputune>
        if not hierarchy.controllers:
            (top / "spawn").mkdir(exist_ok=True)
            for parent in dict.fromkeys((hierarchy.mount, top.parent, top)):
                _enable_controllers(parent)
        files.append(group / "cgroup.procs")
    return files


def release_parent(lab_id: str, parent: int) -> None:
    """Move the process that waits for a node's init out of the node's group.

    Version 2 lets a group hand controllers down only while it holds no process itself.
    """
    for hierarchy in hierarchies():
        if not hierarchy.controllers:
            try:
                (_top(hierarchy, lab_id) / "spawn" / "cgroup.procs").write_text(str(parent))
            except OSError:
                continue


def leftovers(lab_id: str) -> list[Path]:
    """List the groups of this lab that still exist."""
    name = f"semishared-{lab_id}"
    return [
        top
        for known in hierarchies()
        for top in (known.mount / name, *known.mount.glob(f"{SUITE}*/{name}"))
        if top.exists()
    ]


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
