# SPDX-License-Identifier: Apache-2.0
"""Bytes between machines: from one to another, from one to the front-end, from a program to one."""

from __future__ import annotations

import hashlib
import os
from typing import IO, Any, Callable

from ..errors import SemisharedError, ToolTimeout, TransferCorrupt
from ..model.exchange import File
from ..model.steps import Step
from ..named import NamedTuple
from ..wire.messages import Message
from ..wire.session import Session
from .answering import Answer

REMOTES = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))


class Limits(NamedTuple):
    """What a machine that sends may take: of time and of the one that receives."""

    rate: int
    """Bytes per second at most, 0 for no limit."""
    most: int
    """Bytes at most, 0 for no limit."""
    standstill_s: float
    """Seconds without a byte."""


def relay(
    source: Session,
    sends: tuple[Step, ...],
    target: Session,
    receives: tuple[Step, ...],
    limits: Limits,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Give `target` what `source` sends; return what that says of it. Raise TransferCorrupt for more than the
    limit, ToolTimeout.

    To that is added how much it was and how long it took: `bytes`, `seconds`. The target waits for `end`.
    `say`: a line for the log.
    """
    from ..opennebula.report import Progress
    from ..tools.rate_limit import Pace

    progress, pace, size = Progress(say), Pace(limits.rate), 0
    target.begin(receives, answers=True)
    source.begin(sends)
    # Its signs of life are no bytes: a host could hold this for ever by them.
    message = _next(source, limits)
    while isinstance(message, bytes):
        size += len(message)
        if limits.most and size > limits.most:
            raise TransferCorrupt(
                f"{source.host} has sent more than the {limits.most >> 20} MiB that the VM's "
                f"disks and memory can be"
            )
        pace.wait(len(message))
        target.send_data(message)
        progress.tell(f"{size >> 20} MiB have crossed")
        message = _next(source, limits)
    source.finish()
    return {
        **(message if isinstance(message, dict) else {}),
        "bytes": size,
        "seconds": round(progress.seconds, 1),
    }


def _next(source: Session, limits: Limits) -> Message:
    """Return what a machine sends next; raise ToolTimeout if that is nothing for as long as a standstill
    is.
    """
    message = source.read(limits.standstill_s)
    if message is None:
        raise ToolTimeout(f"{source.host} has sent no byte for {limits.standstill_s:.0f} s")
    return message


def end(target: Session, sha256: str, answer: Answer) -> list[Any]:
    """Tell the target of a relay that it has all, if it has what has this hash; return its answers."""
    target.send(end=True, sha256=sha256)
    return target.finish(answer)


def fetch(source: Session, sends: tuple[Step, ...]) -> tuple[list[Any], File, IO[bytes]]:
    """Return the answers of a machine, the file that it sent and what holds that."""
    kept = os.fdopen(os.memfd_create("fetched"), "w+b")
    digest = hashlib.sha256()
    source.begin(sends)
    message = source.read()
    while isinstance(message, bytes):
        digest.update(message)
        kept.write(message)
        message = source.read()
    kept.flush()
    answers = message.get("results") if isinstance(message, dict) else []
    return (
        list(answers) if isinstance(answers, list) else [],
        File(f"/proc/self/fd/{kept.fileno()}", digest.hexdigest()),
        kept,
    )


def download(session: Session, steps: tuple[Step, ...], url: str, answer: Answer) -> list[Any]:
    """Have `steps` carried out, the last with what OpenNebula's downloader brings from `url`; what that asks
    afterwards is answered.
    """
    from ..tools.run import stream

    digest = hashlib.sha256()
    session.begin(steps, answers=True)
    try:
        for chunk in stream([f"{REMOTES}/datastore/downloader.sh", "--nodecomp", url, "-"]):
            digest.update(chunk)
            session.send_data(chunk)
    except SemisharedError:
        # So that the host removes what it has: it may be what fills its disk.
        session.send(end=True, sha256="")
        try:
            session.finish()
        except SemisharedError:
            pass
        raise
    session.send(end=True, sha256=digest.hexdigest())
    return session.finish(answer)
