# SPDX-License-Identifier: Apache-2.0
"""What a peer sends, read ahead: while one packet comes, the one before it is hashed and written."""

from __future__ import annotations

import queue
import threading
import time
from types import TracebackType

from ..errors import HostUnreachable, SemisharedError
from ..wire import packets
from .apart import Source

AHEAD = 2
"""Packets that are here and not yet looked at, beside the one that comes."""
LOOK_S = 0.25
"""Between two looks whether it is over."""


class Incoming:
    """The packets of a plan that serves, within a `with` block."""

    def __init__(self, source: Source, opener: packets.Opener) -> None:
        self._source, self._opener = source, opener
        self.came = 0
        """Bytes so far."""
        self.at = 0.0
        """When the packet was here that `next` returned last: time.monotonic()."""
        self._error: SemisharedError | None = None
        self._is_left = False
        self._queue: queue.Queue[tuple[packets.Packet | None, float]] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Incoming:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._is_left = True
        # Before the session closes its files: another one may get their numbers.
        self._thread.join()
        self._source.close()

    def _read(self) -> None:
        try:
            while not self._is_left:
                part = self._source.read_into(self._opener.get_buffer, LOOK_S)
                if isinstance(part, memoryview):
                    self.came += len(part)
                    packet = self._opener.buffer_updated(len(part))
                    if packet:
                        self._put(packet)
                elif part is not None:
                    break
        except SemisharedError as e:
            self._error = e
        except OSError as e:
            # What is wrong with this source is nothing that ends the plan: another one is asked.
            self._error = HostUnreachable(f"{self._source.host}: {e}")
        self._put(None)

    def _put(self, packet: packets.Packet | None) -> None:
        at = time.monotonic()
        while not self._is_left:
            try:
                return self._queue.put((packet, at), timeout=LOOK_S)
            except queue.Full:
                pass  # a slow disk, or whoever takes them has left

    def next(self, within_s: float) -> packets.Packet | None:
        """Return the next packet, None if there is no other; raise TimeoutError if none came in that time, or
        what has ended it.
        """
        try:
            packet, self.at = self._queue.get(timeout=within_s)
        except queue.Empty:
            raise TimeoutError from None
        if packet is None and self._error:
            raise self._error
        return packet
