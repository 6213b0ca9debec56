# SPDX-License-Identifier: Apache-2.0
"""What is sent to a peer: at the rate that was asked for, and packed if that pays on the network that there
is.
"""

from __future__ import annotations

import signal
import time
from typing import Callable

from ..model.steps_base import ServeBase, ServeExtents
from ..tools import compress, progress
from ..tools.compress import Bytes
from ..tools.rate_limit import Pace
from ..wire import packets

WRITE_S = 30
"""Seconds after which a receiver that takes nothing any more is lost; ssh would wait for a quarter of an
hour.
"""
PIECE = 1 << 20
"""Bytes of one write; where the rate is lower, what goes in a second: who receives is to see that something
comes.
"""
IN_FLIGHT, TRIED, TRIED_S = 12 << 20, 48 << 20, 0.5
"""Bytes of a base that go before the network's rate shows, as pipes and sockets hold so many; and bytes or
seconds until it has.
"""


class Out:
    """Packets on their way out; how fast they go says whether to pack them."""

    def __init__(self, step: ServeBase | ServeExtents, write: Callable[[Bytes], None]) -> None:
        self._write, self._pace, self._codec, self._rate, self._unpacks = (
            write,
            Pace(step.rate),
            step.codec,
            step.rate,
            step.unpacks,
        )
        self.sealer = packets.Sealer(packets.Session.of(step.session), compress.NONE)
        self.plain, self._is_chosen = 0, False
        self._seen, self._seconds = 0, 0.0
        """Bytes beyond those that were in flight at once, and seconds in which nobody took more of them."""

    @property
    def packs(self) -> bool:
        return self.sealer.compressor != compress.NONE

    def choose(self, group: list[packets.Extent]) -> None:
        """Choose by this group what the others are packed with, when there is enough known for that."""
        if self._is_chosen:
            return
        link = float(self._rate)
        if self._codec == compress.AUTO and not link:
            if self._seen < TRIED and self._seconds < TRIED_S:
                return
            link = self._seen / max(self._seconds, 1e-6)
        self._is_chosen = True
        if self._codec != compress.AUTO or self._rate or compress.pays(link):
            self.sealer.compressor = compress.choose(
                self._codec, self._unpacks, b"".join(item.content for item in group), link
            )

    def send(self, pieces: list[Bytes]) -> None:
        """Write a packet, at the rate that was asked for."""
        size = min(PIECE, self._rate or PIECE)
        for piece in pieces:
            for at in range(0, len(piece), size):
                part = piece[at : at + size]
                self._pace.wait(len(part))
                started = time.monotonic()
                signal.alarm(WRITE_S)
                self._write(part)
                signal.alarm(0)
                if self.plain > IN_FLIGHT:
                    self._seen, self._seconds = (
                        self._seen + len(part),
                        self._seconds + time.monotonic() - started,
                    )
                progress.count("sent", len(part))
