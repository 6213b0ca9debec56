# SPDX-License-Identifier: Apache-2.0
"""A line of the trail (front/trail.py says what is in it) and its way to syslog, for front-ends and hosts.

A host writes lines of its own for what it decides alone: the front-end, which notes all that it has a host
do, does not know of that before the host has done it, or never.
"""

from __future__ import annotations

import json
import os
import time

from .. import NAME
from . import progress

OK = "ok"
LONGEST = 400
"""Characters of a value: names may be long, and a line is to be read."""


def line(
    who: str, did: str, what: str, result: str, seconds: float | None = None, *, now: float | None = None
) -> str:
    """Return a line: JSON in ASCII, so that no name ends it, or begins another one. It hides no secret."""
    said = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "who": _cut(who),
        "did": _cut(did),
        "what": _cut(what),
        "result": _cut(result),
    }
    return json.dumps({**said, **({} if seconds is None else {"seconds": round(seconds, 3)})})


def _cut(text: str) -> str:
    # What is no text in UTF-8 is no JSON that others read.
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def to_syslog(said: str) -> None:
    """Write a line to syslog, which journald is as well; without one it is lost."""
    import syslog

    syslog.openlog(NAME, 0, syslog.LOG_DAEMON)
    syslog.syslog(syslog.LOG_INFO, said)
    syslog.closelog()


def by_host(did: str, what: str) -> None:
    """Note in this host's syslog what it has done by its own decision, and which user's work it did.

    `what` names things of ours alone. Nothing fails by this.
    """
    here = os.uname().nodename
    who = (progress.asked_by or "oned").partition("/")[0]
    try:
        to_syslog(line(f"{who}@{here}", did, f"{what} on {here}, by itself", OK))
    except (OSError, ValueError):
        return
