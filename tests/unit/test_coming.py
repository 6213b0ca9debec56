# SPDX-License-Identifier: Apache-2.0
"""When a peer is given up: its bytes, the clock and whoever takes them are made up."""

from __future__ import annotations

import os
import time
from typing import Iterator

import pytest

from semishared.config import Config
from semishared.errors import ToolTimeout
from semishared.model.base.steps import ServeBase
from semishared.stage import peers
from semishared.stage.peers import Out
from semishared.tools import rate_limit
from semishared.tools.extents import EXTENT
from semishared.wire import packets

KiB, MiB = 1 << 10, 1 << 20


class Clock:
    """Time that passes where somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Slow:
    """What comes of one packet: (seconds, bytes), again and again; it is whole after `size`."""

    at = 0.0

    def __init__(self, clock: Clock, size: int, ticks: Iterator[tuple[float, int]]) -> None:
        self.came, self._clock, self._left, self._ticks = 0, clock, size, ticks

    def next(self, within_s: float) -> None:
        seconds, count = next(self._ticks)
        self._clock.now, self.came, self._left = (
            self._clock.now + seconds,
            self.came + count,
            self._left - count,
        )
        if self._left > 0:
            raise TimeoutError


def coming(clock: Clock, rate: int, size: int, ticks: Iterator[tuple[float, int]]) -> peers.Coming:
    step = ServeBase("/x", "100-7-" + "a" * 32, (), packets.Session.new().text, "none", rate)
    found = peers.Coming("h1", step, None, Config(), lambda count, more: None)  # type: ignore[arg-type]
    found._last, found._told, found._unheard = clock.now, 0, 0
    found._incoming = Slow(clock, size, ticks)  # type: ignore[assignment]
    return found


def taken(found: peers.Coming) -> None:
    while found.turn(1.0) is not None:
        pass


@pytest.mark.parametrize(
    ("rate", "tick"),
    [
        (0, (1.0, 200 * KiB)),
        (300 * KiB, (1.0, 300 * KiB)),
        # The host before waits for the extent itself, and then sends it.
        (30 * KiB, (1.0, 30 * KiB)),
    ],
)
def test_peer_whose_packet_takes_long_is_waited_for(clock: Clock, rate: int, tick: tuple[float, int]) -> None:
    waits = [(1.0, 0)] * (EXTENT // rate if rate else 0)
    found = coming(clock, rate, EXTENT, iter([*waits, *[tick] * (EXTENT // tick[1] + 1)]))
    begun = clock.now
    taken(found)
    assert clock.now - begun > peers.STALL_S, "that was not longer than the limit"


@pytest.mark.parametrize(("rate", "count", "seconds"), [(0, 0, 13), (0, 10 * KiB, 13), (MiB, 0, 21)])
def test_peer_from_whom_nothing_comes_is_left(clock: Clock, rate: int, count: int, seconds: int) -> None:
    begun = clock.now
    with pytest.raises(ToolTimeout, match="bytes came from h1 in"):
        taken(coming(clock, rate, EXTENT, iter([(1.0, count)] * 100)))
    assert clock.now - begun == seconds


def test_at_a_low_rate_something_goes_every_second(clock: Clock) -> None:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    sent: list[tuple[float, int]] = []
    step = ServeBase("/x", "", (), packets.Session.new().text, "none", 50 * KiB)
    out = Out(step, lambda part: sent.append((clock.now, len(part))))
    out._pace = rate_limit.Pace(step.rate, lambda: clock.now, sleep)
    out.send([os.urandom(400 * KiB)])
    times = [at for at, _ in sent]
    assert sum(size for _, size in sent) == 400 * KiB
    assert all(later - before <= 1.01 for before, later in zip(times, times[1:])) and times[-1] - times[0] > 6
