# SPDX-License-Identifier: Apache-2.0
"""The speed within bursts: equal averages, told apart."""

from __future__ import annotations

from semishared.stage.multicast import Arrival, octets

MiB = 1 << 20
BURST = MiB // 5
"""A slice of udp-sender, about."""


def arrival(ticks: list[tuple[int, float]]) -> int:
    watched = Arrival()
    for count, seconds in ticks:
        watched.note(count, seconds)
    return watched.speed()


def test_who_waits_for_another_one_is_told_from_him() -> None:
    # 1 MiB/s on average for both, in slices: one has each within 20 ms.
    fast = arrival([(BURST, 0.02), *[(0, 0.02)] * 9] * 15)
    slow = arrival([(BURST // 10, 0.02)] * 150)
    assert 9 * MiB < fast < 11 * MiB and 0.9 * MiB < slow < 1.1 * MiB


def test_chatter_and_nothing_are_no_speed() -> None:
    assert arrival([]) == 0
    assert arrival([(500, 0.02)] * 10) == 0


def test_ticks_in_which_this_host_was_busy_elsewhere_are_left_out() -> None:
    assert arrival([(BURST, 0.5), *[(BURST, 0.02)] * 2]) > 9 * MiB


def test_counters_are_the_kernels() -> None:
    text = (
        b"TcpExt: A B\nTcpExt: 1 2\nIpExt: InOctets InMcastOctets InBcastOctets\nIpExt: 9 40 "
        b"2\nMPTcpExt: C\nMPTcpExt: 7\n"
    )
    assert octets(text) == 42
    assert octets(b"") == octets(b"TcpExt: A\nTcpExt: 1\n") == 0
