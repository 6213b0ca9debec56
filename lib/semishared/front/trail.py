# SPDX-License-Identifier: Apache-2.0
"""The trail: one line of JSON for each thing that was changed, in syslog and in a log of ours.

    {"time": "2026-11-28T13:20:05Z", "who": "alice@fe", "did": "gc", "what": "--yes", "result": "ok",
     "seconds": 1.4}
    {"time": "2026-11-28T13:20:04Z", "who": "oned@fe", "did": "evict", "what": "base 100-7-.. on h2",
     "result": "told"}

`did` is the operator's verb, or what a verb or an action of oned's did on its way: `commit disk`, `evict`,
`fence`, `gc removal`. `result`: ok, an error's id, `exit N` of a verb that said more itself, or `told`, where
a host does it by itself after the answer. An error's text is not in it: programs put what they were given
into that, passwords too. What names and words hold besides is taken out by `redacted`.

The log is /var/log/one/semishared.log ($ONE_LOCATION/var/semishared.log), opened for each line and written by
one write(2) at its end: lines of processes do not mix, and logrotate may rename it at any time. Nothing fails
by the trail: a full disk or a missing directory is a warning of a verb at a terminal, once.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from contextlib import contextmanager
from typing import Iterable, Iterator, Sequence

from .. import NAME
from ..errors import SemisharedError
from ..tools import this_machine, trail_lines
from ..tools.redact import Redactor

OK, TOLD = "ok", "told"
_by_verb = False
"""Whether this process is the operator's command, not an action of oned's."""
_count = 0
_is_warned = False


@contextmanager
def by_operator() -> Iterator[None]:
    """Within the block, what is done is done for the user of the operator's command, not for oned."""
    global _by_verb, _count, _is_warned
    _by_verb, _count, _is_warned = True, 0, False
    try:
        yield
    finally:
        _by_verb = False


def evicting(host: str, bases: Sequence[object]) -> None:
    """Note the bases that a host is told to remove, for room: it does, unless a disk has leased one since."""
    for base in bases:
        note("evict", f"base {base} on {host}", TOLD)


def evicted(host: str, bases: Sequence[str]) -> None:
    """Note the bases that a host says it has removed by its own decision; its syslog has them too."""
    for base in bases:
        note("evict", f"base {base} on {host}, by itself")


def count() -> int:
    """Return how many lines this process has written for its operator."""
    return _count


def path() -> str:
    """Return where the log lies: beside oned's own."""
    own = os.environ.get("ONE_LOCATION")
    return f"{own}/var/{NAME}.log" if own else f"/var/log/one/{NAME}.log"


def who() -> str:
    """Return USER@FRONT-END that has it done: under sudo the user that called it; oned of its actions."""
    return f"{this_machine.login() if _by_verb else 'oned'}@{os.uname().nodename}"


def of_words(words: Iterable[str]) -> str:
    """Return the words of a command line as a shell takes them, without what is secret in them."""
    # Before they are quoted: behind a quote a form is another one.
    return shlex.join(map(redacted, words))


def redacted(text: str) -> str:
    """Return a text without what is secret in it: by its form, or as it stands in one_auth or beside it."""
    return Redactor(_known()).text(text)


def _known() -> Iterator[str]:
    """Yield the secrets of this front-end's user."""
    auth = os.environ.get("ONE_AUTH") or os.path.expanduser("~/.one/one_auth")
    key = os.path.join(os.path.dirname(os.path.abspath(auth)), f"{NAME}_key")
    for file in (auth, key):
        said = _first_line(file)
        password = said.partition(":")[2] if file == auth else said
        yield from (said, password)


def _first_line(file: str) -> str:
    if not os.path.isfile(file):
        return ""  # without one_auth there is nothing of it to be hidden
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode("utf-8", "replace").partition("\n")[0].strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def line(did: str, what: str, result: str, seconds: float | None = None, *, now: float | None = None) -> str:
    """Return a line of the trail."""
    return trail_lines.line(who(), did, redacted(what), redacted(result), seconds, now=now)


def note(did: str, what: str, result: str = OK, seconds: float | None = None) -> None:
    """Write a line to syslog and to the log; nothing fails by this."""
    global _count, _is_warned
    _count += 1
    why = ""
    try:
        said = line(did, what, result, seconds)
        trail_lines.to_syslog(said)
        _append(path(), said)
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
    if why and _by_verb and not _is_warned and sys.stderr.isatty():
        _is_warned = True
        print(f"{NAME}: what was done is not in {path()}: {why}", file=sys.stderr)


def _append(file: str, said: str) -> None:
    """Add a line to a log by one write; raise OSError, also if only a part of it could be written."""
    directory = os.stat(os.path.dirname(file))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(file, flags, 0o640)
    try:
        if os.geteuid() == 0 and os.fstat(fd).st_uid != directory.st_uid:
            # The next line is oneadmin's.
            os.fchown(fd, directory.st_uid, directory.st_gid)
        data = f"{said}\n".encode("ascii")
        if os.write(fd, data) != len(data):
            raise OSError("the disk is full")
    finally:
        os.close(fd)


@contextmanager
def noted(did: str, what: str) -> Iterator[None]:
    """Note how the block ended, and how long it took."""
    began = time.monotonic()
    try:
        yield
    except SemisharedError as e:
        note(did, what, e.id, time.monotonic() - began)
        raise
    note(did, what, OK, time.monotonic() - began)


def answered(host: str, step: object, answer: object) -> None:
    """Note what a host has committed by a step of action.NOTED, as its answer says."""
    own = getattr(step, "disk", None)
    vm = getattr(own, "vm", getattr(step, "vm", -1))
    for one in getattr(answer, "disks", [answer]):
        size, number = getattr(one, "bytes", 0), getattr(one, "disk", getattr(own, "disk", -1))
        # A disk with a `why` goes on as it is: nothing of it was committed.
        if size and not hasattr(one, "why"):
            note("commit disk", f"VM {vm} disk {number} on {host}: {size} bytes")
