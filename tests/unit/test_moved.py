# SPDX-License-Identifier: Apache-2.0
"""The line in the VM's log of what an action has moved."""

from __future__ import annotations

from lab import moved as of_tests
from semishared.front import moved

MiB = 1 << 20


def test_the_line_says_how_much_how_long_and_from_where() -> None:
    said = moved.line("h2", {"received": 12 * MiB, "store_read": 300 * MiB}, {"h3": 12 * MiB}, 3.8)
    assert said == "h2: 300.0 MiB read from the store in 3.8 s (78.9 MiB/s), 12.0 MiB received from h3"
    said = moved.line("h2", {"received": 12 * MiB}, {"h3": 1, "h1": 2}, 0.01)
    assert said == "h2: 12.0 MiB received from h1, h3 in 0.0 s (120.0 MiB/s)"
    assert moved.line("h2", {"new": 1}, {}, 1) == "h2: 1 B new in 1.0 s (1 B/s)"


def test_tests_read_it_back() -> None:
    sizes = {kind: number * MiB for number, kind in enumerate(moved.WORDS, 1)}
    two = moved.line("h2", sizes, {"h3": 1}, 1), moved.line("fe.org", {"sent": 5}, {}, 1)
    text = "".join(f"INFO: clone: {line}\n" for line in two)
    assert of_tests.by_host(text) == {"h2": sizes, "fe.org": {"sent": 5}}
    assert of_tests.total(text, "sent") == sizes["sent"] + 5
    assert of_tests.by_host("INFO: h2: nothing\nWARN: h3: 5 MiB of it (3/s)\n") == {}
