# SPDX-License-Identifier: Apache-2.0
"""The writer of a staged file, encoded in its name, so that no clock decides whether the writer lives.

    .staged-NAME.<host><boot>-<pid>-<start>-<random>      host and boot in 8 hex digits each

This machine knows nothing of names of another machine, or of another boot: that machine removes them, or
`semishared gc`, which asks all of them. gc also removes names without an owner (of 0.1.0).
"""

from __future__ import annotations

import os

from ..model.disk import names as disk_names

_mine: dict[int, disk_names.Maker] = {}


def started(pid: int) -> str:
    """Return a process's start time, '' if there is none; no two processes of a boot share id and time."""
    return _said(pid)[19]


def waiting(pid: int) -> str:
    """Return the start time of a process, '' also for a zombie."""
    said = _said(pid)
    return "" if said[0] in ("Z", "X") else said[19]


def state(pid: int) -> str:
    """Return the state letter of a process (proc(5)), '' if there is none."""
    return _said(pid)[0]


def _said(pid: int) -> list[str]:
    """Return the fields of a process's stat file (proc(5)) from the state on, empty ones if it is gone."""
    which = pid if pid != os.getpid() else "self"
    try:
        with open(f"/proc/{which}/stat", encoding="utf-8", errors="replace") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        words = []
    return words if len(words) > 19 else [""] * 20


def boot() -> str:
    """Return the id of this boot, '' if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii", errors="replace") as file:
            return file.read(100).strip()
    except OSError:
        return ""


def _machine() -> str:
    """Return 8 hex digits for this machine (its name and process id namespace) and 8 for its boot."""
    import hashlib

    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = ""
    words = (f"{os.uname().nodename} {pids}", boot())
    return "".join(hashlib.sha256(word.encode()).hexdigest()[:8] for word in words)


def suffix() -> str:
    """Return a suffix for names that only this process uses, on any machine."""
    pid = os.getpid()
    if pid not in _mine:
        _mine.clear()
        _mine[pid] = disk_names.Maker(_machine(), pid, started(pid))
    return disk_names.made_by(_mine[pid], os.urandom(6).hex())


def lives(name: str) -> bool:
    """Return True if a running process of this machine made `name`; False if that is unknown."""
    maker = disk_names.maker_of(name)
    return maker is not None and maker.machine == _machine() and started(maker.pid) == maker.started


def is_gone(name: str, *, other_boots: bool = False) -> bool:
    """Return True if an ended process of this machine made `name`; False if that is unknown.

    `other_boots`: the directory is local, so processes of this machine's earlier boots count as ended.
    """
    maker, machine = disk_names.maker_of(name), _machine()
    if maker is None or maker.machine[:8] != machine[:8]:
        return False
    return started(maker.pid) != maker.started if maker.machine == machine else other_boots
