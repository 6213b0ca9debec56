# SPDX-License-Identifier: Apache-2.0
"""Bytes between machines: from one to another, from one to the front-end, from a program to one."""

from __future__ import annotations

import hashlib
import os
from typing import IO, Any, Callable, Dict

from ..errors import SemisharedError, ToolTimeout, TransferCorrupt
from ..model import answers
from ..model.exchange import File
from ..model.steps import SendVm, SentVm, Step
from ..named import NamedTuple
from ..wire.messages import Message
from ..wire.session import Session

Answer = Callable[[Dict[str, object]], object]
"""Returns the answer to a host's question."""

REMOTES = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))


class Limits(NamedTuple):
    """The limits of a sending machine: time, and bytes that the receiver takes."""

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
) -> SentVm:
    """Send to `target` what `source` sends; return the source's word, with its `bytes` and `seconds` added.

    The target waits for `end`. `say`: a line for the log. Raise TransferCorrupt beyond the limit of bytes,
    ToolTimeout.
    """
    from ..opennebula.report import Progress
    from ..tools.rate_limit import Pace

    progress, pace, size = Progress(say), Pace(limits.rate), 0
    target.begin(receives, answers=True)
    source.begin(sends)
    # Signs of life do not count: by them a host could hold this for ever.
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
    sent: SentVm = answers.one(source.host, SendVm, message)
    return sent._replace(bytes=size, seconds=round(progress.seconds, 1))


def _next(source: Session, limits: Limits) -> Message:
    """Return a machine's next message; raise ToolTimeout if none comes within a standstill."""
    message = source.read(limits.standstill_s)
    if message is None:
        raise ToolTimeout(f"{source.host} has sent no byte for {limits.standstill_s:.0f} s")
    return message


def end(target: Session, sha256: str, answer: Answer) -> list[Any]:
    """Tell the target of a relay the expected hash of all; return its answers."""
    target.send(end=True, sha256=sha256)
    return target.finish(answer)


def fetch(source: Session, sends: tuple[Step, ...]) -> tuple[list[Any], File, IO[bytes]]:
    """Return a machine's answers, the file that it sent, and the open file that keeps it."""
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
    """Have `steps` carried out, the last with the output of OpenNebula's downloader for `url`.

    `answer` answers the machine's questions.
    """
    from ..tools.run import stream

    digest = hashlib.sha256()
    session.begin(steps, answers=True)
    try:
        for chunk in stream([f"{REMOTES}/datastore/downloader.sh", "--nodecomp", url, "-"]):
            digest.update(chunk)
            session.send_data(chunk)
    except SemisharedError:
        # So that the host removes what has come, which may fill its disk.
        session.send(end=True, sha256="")
        try:
            session.finish()
        except SemisharedError:
            pass
        raise
    session.send(end=True, sha256=digest.hexdigest())
    return session.finish(answer)
