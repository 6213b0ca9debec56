# SPDX-License-Identifier: Apache-2.0
"""A moment of rest for a running guest, while its disks are copied or a snapshot of them is taken.

    AGENT              the agent flushes and freezes the file systems: what a clean unmount leaves
    SUSPEND            libvirt stops the guest for the moment: what a power cut leaves
    AGENT-AND-SUSPEND  both, one after the other: nothing is written meanwhile, also past the file systems
    AGENT-OR-SUSPEND   the first that works; if neither does, the guest goes on, and the reason is reported
    NONE               the guest goes on

The guest is woken afterwards, whatever happens. `.semishared/frozen.json` notes the rest before it begins,
with a token. The first of these ends it:

    the block that wanted the rest           also when it fails
    this process, when its front-end dies    progress.if_we_die
    a watching process (guest/freeze_watch.py)   when this one is killed, or after LIMIT_S
    the next action on the disks             disk/recovery.py

They wake the guest one at a time (a lock on the directory of records), and only from the rest that is noted.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from typing import Any, Iterator

from ..errors import GuestNotFrozen, GuestStillFrozen, SemisharedError, ToolFailed
from ..model.disk import names as disk_names
from ..model.disk.snapshot_steps import Rested
from ..named import NamedTuple
from ..tools import files, progress
from ..tools.effects import point
from ..tools.run import beside
from . import domain

LIMIT_S = 60
"""Seconds that a guest rests at most."""
FREEZE_S = 30
"""Seconds that the agent may take to flush and freeze the guest's file systems."""
WAKE_S = 20
LOCK_S = 90
PYTHON = "/usr/bin/python3"
WATCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "freeze_watch.py")
ANY = "AGENT-OR-SUSPEND"
BOTH = "AGENT-AND-SUSPEND"
NO_AGENT = "agent is not configured"
NOT_ASKED = (NO_AGENT, "agent is not connected")
"""libvirt's errors when it could not even ask the agent."""


class Rest(NamedTuple):
    """How a guest rests: AGENT, SUSPEND or NONE, and why not in a better way."""

    how: str
    why: str = ""
    token: str = ""
    """Identifies this rest in its note."""

    @property
    def answer(self) -> Rested:
        """Return what the host answers about it."""
        return Rested(self.how, self.why)


def run_of(name: str) -> str:
    """Return what distinguishes one run of a domain from the next, on this host."""
    return str(domain.ask(name, "domid", lambda guest: guest.ID()))


def is_of_this_run(note: dict[str, object], name: str) -> bool:
    """Return True if a note is of the present run of the guest; raise ToolFailed if libvirtd does not answer.

    Without an answer the note must stay: if it were removed as another run's, the guest would rest for ever.
    """
    state = domain.state(name) if name else "absent"
    if state == "unknown":
        raise ToolFailed(f"libvirtd on {os.uname().nodename} does not say whether {name} runs")
    return state in ("running", "paused") and note.get("run") == run_of(name)


def _path(directory: str) -> str:
    return disk_names.rest_note(directory)


@contextmanager
def _alone(directory: str) -> Iterator[None]:
    """Hold the lock, within the block, under which a guest is stopped and woken."""
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
    """Have the guest rest within the block, and yield how; raise GuestNotFrozen if it cannot as wanted.

    Raise that also if the guest was woken before the block ended: a copy then shows no single moment. `copy`:
    a copy of the VM directory, to which the guest may have switched by the time it is woken (go_over.py).
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
    # A guest that a disk error has paused may be stopped; `_resume_unless_broken` leaves it paused.
    return state == "running" or (state == "paused" and how == "SUSPEND" and domain.is_paused_on_error(name))


@contextmanager
def held(directory: str, name: str, rested: Rest) -> Iterator[None]:
    """Keep a resting guest from being woken within the block, which must be short.

    Raise GuestNotFrozen if it was woken before.
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
    """Stop the guest in the first way that works, or in both; the note holds `what`, too."""
    if how == BOTH:
        found = _begin(directory, name, "AGENT", what)
        _freeze(directory, name, "SUSPEND", what)
        return found._replace(how=BOTH)
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
                # The guest may come to rest all the same.
                _wake_after(directory, name)
            continue
        return Rest(way, why)
    if how == ANY:
        return Rest("NONE", why)
    raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} does not rest ({how}): {why}")


def _freeze(directory: str, name: str, way: str, what: dict[str, str]) -> None:
    with _alone(directory):
        files.remove_staged(*os.path.split(disk_names.rest_note(directory)))
        # An agent that did not answer in time may still freeze the guest.
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
    """Remove from the note a way in which the guest cannot rest."""
    with _alone(directory):
        note = files.read_json(_path(directory)) or {}
        ways = _ways(note, but=way)
        if ways:
            files.write_json(_path(directory), {**note, "how": "+".join(ways)})
        else:
            files.unlink(_path(directory))


def _wake_after(directory: str, name: str) -> None:
    """Wake the guest after a failure, whose error counts; the watching process keeps trying."""
    try:
        wake(directory, name)
    except SemisharedError:
        pass


def tidy(directory: str) -> None:
    """Remove the staged note of a killed action."""
    records, note = os.path.split(disk_names.rest_note(directory))
    if os.path.isdir(records) and any(disk_names.is_staged(entry, note) for entry in os.listdir(records)):
        with _alone(directory):
            files.remove_staged(records, note)


def wake(directory: str, name: str, token: str = "") -> bool:
    """End the noted rest (with `token`: if it is that one); return True if no rest is noted any more.

    Raise GuestStillFrozen, once, if the agent does not answer; the note stays, and the next action tries
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

            active_layer.follow(directory, name)
            copy = str(note.get("copy", ""))
            if copy and active_layer.origin(copy) == directory:
                active_layer.follow(copy, name)
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
    """Have the agent thaw the file systems; raise GuestStillFrozen at a first failure, then return False."""
    try:
        domain.ask(name, "domfsthaw", lambda guest: guest.fsThaw(), timeout_s=WAKE_S)
    except SemisharedError as e:
        told = note.get("told") is True
        if NO_AGENT in e.detail:
            files.unlink(_path(directory))
        else:
            # Only the agent's part stays noted: if a user pauses the guest now, it is not ours to resume.
            files.write_json(_path(directory), {**note, "how": "AGENT", "told": True})
        if told:
            return NO_AGENT in e.detail
        raise GuestStillFrozen(
            f"domain {name} on {os.uname().nodename}: {e.detail.rpartition('error: ')[2]}"
        ) from None
    return True


def _resume(name: str) -> None:
    """Resume the guest, if this suite has suspended it."""
    try:
        # Even if it runs: a dead caller's suspend may be under way, and libvirt does one call at a time.
        domain.ask(name, "resume", _resume_unless_broken, timeout_s=WAKE_S)
    except SemisharedError:
        if domain.state(name) == "paused":
            raise


def _resume_unless_broken(guest: Any) -> None:
    if not domain.stands_still(guest):
        guest.resume()
