# SPDX-License-Identifier: Apache-2.0
"""Whose a staged name is: told by the name itself, so that no clock need be asked whether its writer lives.

    .staged-NAME.<host><boot>-<pid>-<start>-<random>      host and boot in 8 hex digits each

Of the names of another machine, or of another boot, nothing is known here: they are left to that machine, and
to `semishared gc`, which asks all of them. A name without an owner (of 0.1.0) is left to gc too.
"""

from __future__ import annotations

import os

from ..model.disk import names as disk_names

_mine: dict[int, disk_names.Maker] = {}


def started(pid: int) -> str:
    """Return when a process began, '' if there is none: no other process of this boot ever has both the id
    and the time.
    """
    return _said(pid)[19]


def waiting(pid: int) -> str:
    """Return the same of one that is more than an exit code which nobody has asked for yet."""
    said = _said(pid)
    return "" if said[0] in ("Z", "X") else said[19]


def state(pid: int) -> str:
    """Return what a process does, in proc(5)'s letter, '' if there is none."""
    return _said(pid)[0]


def _said(pid: int) -> list[str]:
    """Return what proc(5) says of a process from its state on, nothing of each if there is none."""
    try:
        with open(
            f"/proc/{pid if pid != os.getpid() else 'self'}/stat", encoding="utf-8", errors="replace"
        ) as file:
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
    """Return 8 hex digits for this machine (name, machine id, process ids' namespace) and 8 for its boot."""
    import hashlib

    try:
        pids = os.readlink("/proc/self/ns/pid")
    except OSError:
        pids = ""
    words = (f"{os.uname().nodename} {pids}", boot())
    return "".join(hashlib.sha256(word.encode()).hexdigest()[:8] for word in words)


def suffix() -> str:
    """Return the end of a name that this process alone uses, on any machine."""
    pid = os.getpid()
    if pid not in _mine:
        _mine.clear()
        _mine[pid] = disk_names.Maker(_machine(), pid, started(pid))
    return disk_names.made_by(_mine[pid], os.urandom(6).hex())


def lives(name: str) -> bool:
    """Tell whether `name` was made by a process of this machine that is there; False where that is not
    known.
    """
    maker = disk_names.maker_of(name)
    return maker is not None and maker.machine == _machine() and started(maker.pid) == maker.started


def is_gone(name: str, *, other_boots: bool = False) -> bool:
    """Tell whether `name` was made by a process of this machine that has ended; False where that is not
    known.

    With `other_boots`, of a directory that this machine alone writes to, what processes of its earlier boots
    made is known, too.
    """
    maker, machine = disk_names.maker_of(name), _machine()
    if maker is None or maker.machine[:8] != machine[:8]:
        return False
    return started(maker.pid) != maker.started if maker.machine == machine else other_boots
