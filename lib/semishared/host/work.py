# SPDX-License-Identifier: Apache-2.0
"""What steps have of their plan: its conversation (wire/messages.py), and the state at its arrival."""

from __future__ import annotations

from typing import Callable, Iterator

from ..base import room
from ..disk.epochs import Planned
from ..errors import TransferCorrupt
from ..tools import progress
from ..wire.messages import Message, Writer


class Conversation:
    """The rest of the conversation that a plan came with.

    `poll` returns what the front-end has said meanwhile, None if nothing; `answers`: it answers questions.
    """

    def __init__(
        self, writer: Writer, next_message: Callable[[], Message], poll: Callable[[], Message], answers: bool
    ) -> None:
        self.send = writer.send
        self.send_data = writer.send_data
        self.poll = poll
        self._inbox = next_message
        self._answers = answers
        self._end: Message = None

    def next(self) -> Message:
        """Return the next message."""
        # The front-end may wait for another host, or for a backup server: it has limits of its own. If it
        # dies, so does this process (hostside.py).
        with progress.waiting():
            return self._inbox()

    def chunks(self) -> Iterator[bytes]:
        """Yield the data that follows the plan, up to a message that is none."""
        while True:
            message = self.next()
            if not isinstance(message, bytes):
                break
            yield message
        self._end = message

    def extents(self) -> Iterator[tuple[int, bytes]]:
        """Yield the extents that follow the plan, {"extent": index} and the bytes of each, up to a message
        that is none.
        """
        while True:
            message = self.next()
            if not isinstance(message, dict) or "extent" not in message:
                break
            content = self.next()
            if not isinstance(content, bytes) or not isinstance(message["extent"], int):
                raise TransferCorrupt("an extent without its bytes")
            yield message["extent"], content
        self._end = message

    def sha256(self) -> str:
        """Return what the message behind the data says that its hash is."""
        return str(self._end.get("sha256")) if isinstance(self._end, dict) else ""

    @property
    def asking(self) -> room.Ask | None:
        """What asks the front-end, None if it does not answer."""
        return self.ask if self._answers else None

    def warn(self, text: str) -> None:
        """Say what the action's log is to say as a warning."""
        self.send(event="warning", text=text)

    def ask(self, **question: object) -> dict[str, object]:
        """Ask the front-end; return its answer, an empty one if it has none."""
        self.send(event="ask", **question)
        message = self.next()
        answer = message.get("answer") if isinstance(message, dict) else None
        return answer if isinstance(answer, dict) else {}


class Steps:
    """Steps of one plan to functions: `planned` is what was so when it arrived."""

    def __init__(self, planned: Planned, talk: Conversation) -> None:
        self.planned = planned
        self.talk = talk
