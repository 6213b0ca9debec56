# SPDX-License-Identifier: Apache-2.0
"""A moment of rest for a running guest, while its disks are copied or a snapshot of them is taken.

    AGENT              its agent writes out and freezes the file systems: what a clean unmount leaves
    SUSPEND            it is stopped for the moment: what a power cut leaves
    AGENT-OR-SUSPEND   the first that works; if none does, the guest goes on and that is said
    NONE               it goes on

It goes on afterwards, whatever happens. What is about to be done is noted in `.semishared/frozen.json`
before, with a token of this rest; it is ended by whoever comes first:

    the block that wanted the rest           also when it fails
    this process, when its front-end dies    progress.if_we_die
    a process beside it (guest/freeze_watch.py)           when this one is killed, or the rest takes longer
    than LIMIT_S
    the next action on the disks             disk/recovery.py

They wake it one after the other (a lock on the directory of records), and only from the rest that they have
found noted.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import Any, Iterator

from ..errors import GuestNotFrozen, GuestStillFrozen, SemisharedError, ToolFailed
from ..model.disk import names as disk_names
from ..named import NamedTuple
from ..tools import files, progress
from ..tools.effects import point
from ..tools.run import beside
from . import domain

LIMIT_S = 60
"""How long a guest rests at most."""
FREEZE_S = 30
"""How long its agent may take to write out what the guest has in memory."""
WAKE_S = 20
LOCK_S = 90
PYTHON = "/usr/bin/python3"
WATCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "freeze_watch.py")
ANY = "AGENT-OR-SUSPEND"
NO_AGENT = "agent is not configured"
NOT_ASKED = (NO_AGENT, "agent is not connected")
"""What libvirt says when it could not even ask the agent."""


class Rest(NamedTuple):
    """How a guest rested: AGENT, SUSPEND or NONE, and why in no better way."""

    how: str
    why: str = ""
    token: str = ""
    """Of this rest, in its note."""

    def to_data(self) -> dict[str, object]:
        """Return the rest as JSON data."""
        return {"rest": self.how, "why": self.why}


def run_of(name: str) -> str:
    """Return what tells one run of a domain from the next, on this host."""
    return str(domain.ask(name, "domid", lambda guest: guest.ID()))


def is_of_this_run(note: dict[str, object], name: str) -> bool:
    """Tell whether what a note says concerns the guest that runs now; raise ToolFailed if libvirtd does not
    say whether one does.

    A note that was taken for that of a guest which is gone would be forgotten, and the guest be at rest for
    ever.
    """
    state = domain.state(name) if name else "absent"
    if state == "unknown":
        raise ToolFailed(f"libvirtd on {os.uname().nodename} does not say whether {name} runs")
    return state in ("running", "paused") and note.get("run") == run_of(name)


def _path(directory: str) -> str:
    return disk_names.rest_note(directory)


@contextmanager
def _alone(directory: str) -> Iterator[None]:
    """Be, within the block, the only one who lets the guest rest or wakes it."""
    fd = os.open(disk_names.records(directory), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise GuestNotFrozen(
                        f"another process is waking the guest of {directory} for over {LOCK_S} s"
                    ) from None
            time.sleep(0.02)
            progress.touch()
        yield
    finally:
        os.close(fd)


@contextmanager
def resting(directory: str, name: str, how: str, copy: str = "") -> Iterator[Rest]:
    """Let the guest rest within the block, and yield how it does; raise GuestNotFrozen if it does not as
    wanted.

    Also raise that if it was woken before the block had ended: what was copied then shows no moment of rest.
    `copy`: one of the VM directory, to which its guest may have been switched when it is woken
    (relocation.py).
    """
    if how == "NONE" or not _can_rest(name, how):
        yield Rest("NONE")
        return
    token = os.urandom(8).hex()
    watch = [PYTHON, "-IS", WATCH, directory, name, token, str(LIMIT_S)]
    with beside(watch), progress.if_we_die(lambda: _wake_after(directory, name)):
        try:
            found = _begin(
                directory, name, how, {"token": token, **({"copy": copy} if copy else {})}
            )._replace(token=token)
            yield found
            if found.how != "NONE":
                _check_noted(directory, name, token)
        except BaseException:
            _wake_after(directory, name)
            raise
        wake(directory, name)


def _can_rest(name: str, how: str) -> bool:
    state = domain.state(name)
    # One that stands still since a disk has failed may be stopped, and is not woken from that:
    # `_resume_unless_broken`.
    return state == "running" or (state == "paused" and how == "SUSPEND" and domain.is_paused_on_error(name))


@contextmanager
def held(directory: str, name: str, rested: Rest) -> Iterator[None]:
    """Keep a guest that rests from being woken within the block, which is to be short; raise GuestNotFrozen
    if it was before.
    """
    with _alone(directory):
        _check_noted(directory, name, rested.token)
        yield


def _check_noted(directory: str, name: str, token: str) -> None:
    if (files.read_json(_path(directory)) or {}).get("token") != token:
        raise GuestNotFrozen(
            f"domain {name} on {os.uname().nodename} was woken after {LIMIT_S} s, before all was done"
        )


def _begin(directory: str, name: str, how: str, what: dict[str, str]) -> Rest:
    """Let the guest rest in the first way that works; `what` is noted with it."""
    why = ""
    for way in ("AGENT", "SUSPEND") if how == ANY else (how,):
        try:
            _freeze(directory, name, way, what)
        except SemisharedError as e:
            said = e.detail.rpartition("error: ")[2]
            why = f"{why}; {said}" if why else said
            if any(words in e.detail for words in NOT_ASKED):
                _forget(directory, way)
            else:
                # It may be doing it all the same.
                _wake_after(directory, name)
            continue
        return Rest(way, why)
    if how == ANY:
        return Rest("NONE", why)
    raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} does not rest ({how}): {why}")


def _freeze(directory: str, name: str, way: str, what: dict[str, str]) -> None:
    with _alone(directory):
        files.remove_staged(*os.path.split(disk_names.rest_note(directory)))
        # An agent that was asked, and did not answer in time, may still do it.
        earlier = files.read_json(_path(directory)) or {}
        ways = [*_ways(earlier, but=way), way]
        told = {"told": True} if earlier.get("told") else {}
        files.write_json(_path(directory), {"how": "+".join(ways), "run": run_of(name), **what, **told})
    point("rest noted")
    if way == "AGENT":
        domain.ask(name, "domfsfreeze", lambda guest: guest.fsFreeze(), timeout_s=FREEZE_S)
    else:
        domain.ask(name, "suspend", lambda guest: guest.suspend(), timeout_s=FREEZE_S)
    point("guest frozen")


def _ways(note: dict[str, object], but: str) -> list[str]:
    return [word for word in str(note.get("how", "")).split("+") if word not in ("", but)]


def _forget(directory: str, way: str) -> None:
    """Note no more a way in which the guest cannot rest."""
    with _alone(directory):
        note = files.read_json(_path(directory)) or {}
        ways = _ways(note, but=way)
        if ways:
            files.write_json(_path(directory), {**note, "how": "+".join(ways)})
        else:
            files.unlink(_path(directory))


def _wake_after(directory: str, name: str) -> None:
    """Wake the guest after something has failed, which is what is told; who watches goes on trying."""
    try:
        wake(directory, name)
    except SemisharedError:
        pass


def tidy(directory: str) -> None:
    """Remove what a killed action has left of a note that it began to write."""
    records, note = os.path.split(disk_names.rest_note(directory))
    if os.path.isdir(records) and any(disk_names.is_staged(entry, note) for entry in os.listdir(records)):
        with _alone(directory):
            files.remove_staged(records, note)


def wake(directory: str, name: str, token: str = "") -> bool:
    """End the rest that is noted, if there is one (with `token`: if it is that one); tell whether none is
    noted any more.

    Raise GuestStillFrozen when the agent does not answer, once; the note stays, and whoever comes next tries
    again.
    """
    if files.is_absent(_path(directory)):
        return True
    with _alone(directory):
        note = files.read_json(_path(directory))
        if note is None or (token and note.get("token") != token):
            return True
        if is_of_this_run(note, name):
            from . import active_layer

            active_layer.settle(directory, name)
            copy = str(note.get("copy", ""))
            if copy and active_layer.origin(copy) == directory:
                active_layer.settle(copy, name)
            ways = _ways(note, but="AGENT")
            if ways:
                _resume(name)
            if ways != str(note.get("how")).split("+") and not _thaw(directory, name, note):
                return False
            point("guest awake")
        files.unlink(_path(directory))
    point("guest thawed")
    return True


def _thaw(directory: str, name: str, note: dict[str, object]) -> bool:
    """Thaw the guest's file systems; tell whether they are."""
    try:
        domain.ask(name, "domfsthaw", lambda guest: guest.fsThaw(), timeout_s=WAKE_S)
    except SemisharedError as e:
        told = note.get("told") is True
        if NO_AGENT in e.detail:
            files.unlink(_path(directory))
        else:
            # Whom a user pauses from now on is none of ours.
            files.write_json(_path(directory), {**note, "how": "AGENT", "told": True})
        if told:
            return NO_AGENT in e.detail
        raise GuestStillFrozen(
            f"domain {name} on {os.uname().nodename}: {e.detail.rpartition('error: ')[2]}"
        ) from None
    return True


def _resume(name: str) -> None:
    """Let the guest run, if it was us who stopped it."""
    try:
        # Also if it runs: a suspend of a dead caller may just be beginning, and libvirt does one after the
        # other.
        domain.ask(name, "resume", _resume_unless_broken, timeout_s=WAKE_S)
    except SemisharedError:
        if domain.state(name) == "paused":
            raise


def _resume_unless_broken(guest: Any) -> None:
    if not domain.stands_still(guest):
        guest.resume()
