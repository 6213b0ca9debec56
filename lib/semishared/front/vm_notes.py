# SPDX-License-Identifier: Apache-2.0
"""Notes on the front-end of the VMs whose vector in oned is to be written (plan/care/vm_vector.py).

    semishared_vms/<vm>.changed    an action has ended; empty, or what it has failed with
    semishared_vms/<vm>.taken      the same, while a publisher is at it
    semishared_vms/<vm>.known      what a publisher has to know of a VM the next time

An action leaves a note, and does not publish by itself, but for what it moves meanwhile (now.py). oned would
let it: oned holds no lock while a driver works, and one.vm.update looks at no state
(src/rm/api/VirtualMachineAPI.cc:250). But an action knows one disk, and the vector is of all; the others'
records are on the host, behind one more ssh; and an oned that is slow or down must not keep an action from
ending. A note costs one system call, after the action. `publish --due`, by the timer, does the rest; `detach`
and `commit` publish at their end.

The mtime of a note says when it is due. A publisher takes a note by renaming it, so what an action notes
meanwhile is a new one. Notes are hints: an action that is killed leaves none, and what oned does with that VM
next does. One that is lost leaves an old vector until then, or until `semishared publish`.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..model.disk import names as disk_names
from ..named import NamedTuple

if TYPE_CHECKING:
    from typing import Dict, Iterator, List, Optional, Tuple

VERSION = 1
LONGEST = 2000
"""Bytes of an error in a note."""
CHANGED, TAKEN, KNOWN = ".changed", ".taken", ".known"
LATER_S = 600
"""Until a VM is looked at again whose guest alone may change what is said, or whose host does not answer."""
LATE_S = 1800
"""Nothing waits longer where the timer runs every two minutes, with 100 VMs of 1,500."""
BUSY_S = 60
"""Until it is looked at again if oned is at work on it."""


def directory() -> str:
    """Return the directory of notes, beside one_auth."""
    auth = os.environ.get("ONE_AUTH") or os.path.expanduser("~/.one/one_auth")
    return os.path.join(os.path.dirname(os.path.abspath(auth)), "semishared_vms")


def _path(vm: int, kind: str) -> str:
    return f"{directory()}/{vm}{kind}"


STAMP = "%Y-%m-%d %H:%M UTC"


def stamp(seconds: Optional[float] = None) -> str:
    """Return a time, now by default, as it is shown."""
    return time.strftime(STAMP, time.gmtime(seconds))


def leave(vm: int, error: str = "") -> None:
    """Note that a VM has changed, or that an action on it failed with `error`; nothing fails by this."""
    with suppress(OSError):
        try:
            _leave(vm, error)
        except FileNotFoundError:
            os.makedirs(directory(), 0o750, exist_ok=True)
            _leave(vm, error)


def _leave(vm: int, error: str) -> None:
    path = _path(vm, CHANGED)
    new = f"{path}.{os.getpid()}" if error else path
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
    try:
        os.write(fd, f"{stamp()} {error}".encode()[:LONGEST] if error else b"")
    finally:
        os.close(fd)
    if error:
        os.rename(new, path)  # a publisher never sees half of one


def leave_gone(vm: int) -> None:
    """Note that a VM's directory was removed: without a line of an image there is nothing to be done."""
    if os.path.lexists(_path(vm, KNOWN)):
        leave(vm)
        return
    with suppress(OSError):
        os.unlink(_path(vm, CHANGED))


# -- for the publisher, which has the lock ----------------------------------------------------------


def lock() -> str:
    """Return the lock of publishers, in its directory, which is there then; raise OSError."""
    os.makedirs(directory(), 0o750, exist_ok=True)
    return f"{directory()}/lock"


class Known(NamedTuple):
    """What neither oned nor a host knows."""

    since: str = ""
    """Since when a local disk has what its image has not, as it was first seen."""
    error: str = ""
    """What the last action has failed with."""
    images: Tuple[int, ...] = ()
    """Images that have a line on this VM."""


def due(now: float) -> List[int]:
    """Return the VMs that are to be looked at, those that wait longest first; only names and times are read.

    A time further ahead than any that is set was written before the clock was set back.
    """
    found: Dict[int, float] = {}
    for vm, when in _times():
        if not now < when <= now + 2 * LATER_S:
            found[vm] = min(when, found.get(vm, when))
    return sorted(found, key=lambda vm: (found[vm], vm))


def late() -> List[float]:
    """Return for how many seconds VMs wait that have waited for more than LATE_S: no publisher runs."""
    now = time.time()
    times = {vm: when for vm, when in _times() if when < now - LATE_S}
    return [now - when for when in times.values()]


def _times() -> Iterator[Tuple[int, float]]:
    """Yield VMs, and when their files say that they are due; raise OSError."""
    try:
        entries = list(os.scandir(directory()))
    except FileNotFoundError:
        return
    for entry in entries:
        number, dot, kind = entry.name.partition(".")
        if not disk_names.is_number(number) or f".{kind}" not in (CHANGED, TAKEN, KNOWN):
            continue
        with suppress(FileNotFoundError):
            when = entry.stat(follow_symlinks=False).st_mtime
            if when:
                yield int(number), when


def every() -> List[int]:
    """Return the VMs of which there is a file."""
    try:
        names = (name.partition(".")[0] for name in os.listdir(directory()))
    except FileNotFoundError:
        return []
    return sorted({int(name) for name in names if disk_names.is_number(name)})


def sweep(now: float) -> None:
    """Remove what killed processes have left unfinished."""
    from ..tools import files

    files.remove_stale(directory())
    for name in os.listdir(directory()):
        path = f"{directory()}/{name}"
        with suppress(FileNotFoundError):
            if f"{CHANGED}." in name and os.lstat(path).st_mtime < now - BUSY_S:
                os.unlink(path)


def take(vm: int) -> Tuple[bool, str]:
    """Take the note of a VM: return whether there was one, and the error in it."""
    from ..tools.effects import point

    try:
        os.rename(_path(vm, CHANGED), _path(vm, TAKEN))
        point("took a note")
    except FileNotFoundError:
        pass
    return noted(vm)


def noted(vm: int) -> Tuple[bool, str]:
    """Return what `take` does; take nothing."""
    from ..tools import files

    for kind in (CHANGED, TAKEN):
        with suppress(FileNotFoundError):
            return True, files.read(_path(vm, kind), LONGEST).decode("utf-8", "replace")
    return False, ""


def known(vm: int) -> Known:
    """Return what is known of a VM; a damaged file says nothing."""
    from ..tools import files

    found = files.hint(_path(vm, KNOWN))
    images = found.get("images")
    numbers = images if isinstance(images, list) else []
    return Known(
        str(found.get("since", "")),
        str(found.get("error", "")),
        tuple(number for number in numbers if type(number) is int),
    )


def remember(vm: int, known: Known, due_at: float = 0) -> None:
    """Keep what is known of a VM, which is looked at again `due_at`; 0: when an action says so."""
    from ..tools import files
    from ..tools.effects import point

    if known == Known() and not due_at:
        if files.unlink(_path(vm, KNOWN)):
            point("forgot a VM")
        return
    said = {"version": VERSION, "since": known.since, "error": known.error, "images": list(known.images)}
    if files.hint(_path(vm, KNOWN)) != said:
        files.write_json(_path(vm, KNOWN), said)
    os.utime(_path(vm, KNOWN), (due_at, due_at))
    point("remembered a VM")


def put_off(vm: int, due_at: float) -> None:
    """Have a VM looked at again at `due_at`; a note that comes meanwhile is due at once."""
    for kind in (TAKEN, KNOWN):
        with suppress(FileNotFoundError):
            os.utime(_path(vm, kind), (due_at, due_at))


def drop(vm: int) -> None:
    """Remove the note that was taken: what it asks for is done."""
    with suppress(FileNotFoundError):
        os.unlink(_path(vm, TAKEN))
