# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a session: bars that are drawn in place, JSON lines for programs."""

from __future__ import annotations

import io
import json

from semishared.cli.command import Bars, Lines, bar


def test_lines_are_few_but_every_end_is_told() -> None:
    out, clock = io.StringIO(), [0.0]
    lines = Lines(out, 1.0, lambda: clock[0])
    for tenth in range(30):
        clock[0] = tenth / 10
        lines.tell(event="host", host="h1", have=tenth, of=30, done=False)
        lines.tell(event="host", host="h2", have=tenth, of=30, done=False)
    lines.tell(event="host", host="h1", have=1, of=1, done=True)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [item["have"] for item in found if item["host"] == "h1"] == [0, 10, 20, 1]
    assert len(found) == 7


def test_bars_are_drawn_in_place_and_notes_stay_above() -> None:
    out, clock = io.StringIO(), [0.0]
    bars = Bars(out, lambda: clock[0])
    bars.tell(event="host", host="h1", have=15, of=30, source="stream", done=False)
    bars.tell(event="note", host="h2", text="slow")
    bars.tell(event="host", host="h1", have=1, of=1, source="", done=True)
    half = "h1                   [###############...............]  50 % from stream\n"
    assert out.getvalue() == (
        f"\x1b[2K{half}\x1b[1A\x1b[2Kh2: slow\n\x1b[2K{half}\x1b[1A\x1b[2K"
        + "h1                   ["
        + "#" * 30
        + "] has it\n"
    )
    assert bar({"host": "h" * 40, "have": 0, "of": 0}).startswith("h" * 20 + " [....")
