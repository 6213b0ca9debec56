# SPDX-License-Identifier: Apache-2.0
"""What a front-end lets a machine say while it carries out one plan: answers of the right shape
(model/answers.py), and not without end.
"""

from __future__ import annotations

from typing import Sequence

from ..errors import FalseAnswer
from ..model import answers
from .messages import Message, Part

MOST_KEPT = 10_000
"""Messages that are kept of a host that talks while it is written to, and lines that it wants the log to
have.
"""
MOST_SAID = 1 << 21
"""Messages that a host says of one plan: that it lives, and how far it is, once in seconds; and it asks for a
base or for room.
"""


class Hearing:
    """What has been heard of a plan."""

    def __init__(self, host: str, steps: Sequence[str] = ()) -> None:
        self._host, self._steps, self._count = host, list(steps), 0
        self._may_send = not answers.SENDING.isdisjoint(steps)

    def check(self, message: Message | Part, kept: int) -> None:
        """Raise FalseAnswer for what a host side does not say, or not as often; `kept`: messages that nobody
        has taken yet.
        """
        if isinstance(message, dict):
            self._count += 1
            if message.get("event") != "alive":
                answers.heard(self._host, self._steps, message)
        elif not self._may_send:
            raise FalseAnswer(f"{self._host} has sent data that nobody has asked for")
        if self._count > MOST_SAID or kept > MOST_KEPT:
            raise FalseAnswer(f"{self._host} talks without end")
