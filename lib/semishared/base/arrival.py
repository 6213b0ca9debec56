# SPDX-License-Identifier: Apache-2.0
"""How fast multicast comes to this host while it comes.

udp-sender gives a slice of packets to all, and waits until all have it. So on average the same comes to
everyone, at the pace of the slowest: who is fast has each slice at once and then waits, who is slow receives
all the time. What tells them apart is the speed within the bursts.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from types import TracebackType

TICK_S = 0.03
LATE_S = 0.06
"""A tick that took longer says more about how busy this host's processors are than about its network."""
WINDOW = 50
"""Ticks that are looked at: 1.5 s."""
LEAST = 64 << 10
"""Bytes in the window below which nothing is said: that may be anybody's chatter."""
NETSTAT = "/proc/net/netstat"
MOST = 32 << 10


def octets(text: bytes) -> int:
    """Return how many bytes of multicast and broadcast are in the text of /proc/net/netstat (the kernel's
    snmp counters).
    """
    _, _, rest = text.partition(b"\nIpExt:")
    names, _, rest = rest.partition(b"\nIpExt:")
    counts = dict(zip(names.split(), rest.partition(b"\n")[0].split()))
    return int(counts.get(b"InMcastOctets", 0)) + int(counts.get(b"InBcastOctets", 0))


class Arrival:
    """Watches, within a `with` block, what comes."""

    def __init__(self) -> None:
        self._ticks: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Arrival:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        fd = os.open(NETSTAT, os.O_RDONLY)
        try:
            before, at = octets(os.pread(fd, MOST, 0)), time.monotonic()
            while not self._ended.wait(TICK_S):
                count, now = octets(os.pread(fd, MOST, 0)), time.monotonic()
                self.note(count - before, now - at)
                before, at = count, now
        finally:
            os.close(fd)

    def note(self, count: int, seconds: float) -> None:
        """Note that `count` bytes came within the last `seconds`."""
        if seconds < LATE_S:
            self._ticks.append((count, seconds))

    def speed(self) -> int:
        """Return bytes per second, as the average byte of the last seconds came; 0 if too little is known."""
        ticks = list(self._ticks)
        total = sum(count for count, _ in ticks)
        return int(sum(count * count / seconds for count, seconds in ticks) / total) if total >= LEAST else 0
