# SPDX-License-Identifier: Apache-2.0
"""What a step's function may take beside the step's fields (table.py): counters, and the session.

Counters are those when the plan arrived; for the session see wire/messages.py.
"""

from __future__ import annotations

from typing import Callable, Iterator, Optional, Union

from ..base.room import Ask
from ..disk.epochs import Planned
from ..errors import TransferCorrupt
from ..tools import progress
from ..wire.messages import Message, Writer


class Work:
    """One plan, as its steps see it."""

    planned: Planned
    """Counters of this machine when the plan arrived."""
    seq: int
    """SEQ of the VM's last history record when the front-end planned, -1 if unknown."""
    ask: Optional[Ask]
    """Asks the front-end; None if it does not answer."""
    tell: Callable[..., None]
    """Sends an event to the front-end."""
    write: Callable[[Union[bytes, memoryview]], None]
    """Sends data to the front-end."""
    poll: Callable[[], object]
    """Returns the front-end's next message, None if there is none yet."""

    def __init__(
        self,
        planned: Planned,
        writer: Writer,
        next_message: Callable[[], Message],
        poll: Callable[[], Message],
        answers: bool,
    ) -> None:
        self.planned, self.seq = planned, planned.seq
        self.ask = self.question if answers else None
        self.tell, self.write, self.poll = writer.send, writer.send_data, poll
        self._inbox = next_message
        self._end: Message = None

    def _next(self) -> Message:
        """Return the next message."""
        # The front-end may wait for another host or a backup server; it has limits of its own. If it dies,
        # this process ends, too (hostside.py).
        with progress.waiting():
            return self._inbox()

    @property
    def chunks(self) -> Iterator[bytes]:
        """Yield the data that follows the plan, up to the first other message."""
        while True:
            message = self._next()
            if not isinstance(message, bytes):
                break
            yield message
        self._end = message

    @property
    def extents(self) -> Iterator[tuple[int, bytes]]:
        """Yield (index, bytes) of the extents that follow the plan, each after its {"extent": index}."""
        while True:
            message = self._next()
            if not isinstance(message, dict) or "extent" not in message:
                break
            content = self._next()
            if not isinstance(content, bytes) or not isinstance(message["extent"], int):
                raise TransferCorrupt("an extent without its bytes")
            yield message["extent"], content
        self._end = message

    def sha256(self) -> str:
        """Return the data's hash, from the message behind it."""
        return str(self._end.get("sha256")) if isinstance(self._end, dict) else ""

    def warn(self, text: str) -> None:
        """Send a warning for the action's log."""
        self.tell(event="warning", text=text)

    def question(self, **question: object) -> dict[str, object]:
        """Ask the front-end; return its answer, {} if it has none."""
        self.tell(event="ask", **question)
        message = self._next()
        answer = message.get("answer") if isinstance(message, dict) else None
        return answer if isinstance(answer, dict) else {}
