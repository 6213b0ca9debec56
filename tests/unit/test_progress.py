# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a session: bars that are drawn in place, JSON lines for programs."""

from __future__ import annotations

import io
import json
import re

import pytest

from semishared.cli.progress import Bars, Lines, bar, bars

SIZES = [(80, 24), (40, 24), (20, 5), (200, 60), (10, 2), (1, 1)]


def screen(written: str, columns: int, high: int) -> tuple[list[str], list[str]]:
    """Return what a terminal shows after that was written to it, and what has scrolled away above."""
    lines, at, gone = [""], 0, list[str]()
    for code, text in re.findall(r"(\x1b\[\d*[AKJ]|\n)|([^\x1b\n]+)", written):
        if code == "\n":
            at += 1
            if at == len(lines):
                lines.append("")
            if len(lines) > high:
                gone.append(lines.pop(0))
                at -= 1
        elif code.endswith("A"):
            at = max(0, at - int(code[2:-1]))
        elif code.endswith("J"):
            del lines[at + 1 :]
            lines[at] = ""
        elif code.endswith("K"):
            lines[at] = ""
        else:
            assert len(text) <= columns, f"{text!r} wraps"
            lines[at] = text
    return lines, gone


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
    drawn = Bars(out, lambda: clock[0])
    drawn.tell(event="host", host="h1", have=15, of=30, source="stream", done=False)
    half = "h1 [###############...............]  50 % from stream"
    assert screen(out.getvalue(), 80, 24) == ([half, ""], [])
    drawn.tell(event="note", host="h2", text="slow")
    assert screen(out.getvalue(), 80, 24) == (["h2: slow", half, ""], [])
    drawn.tell(event="host", host="h1", have=1, of=1, source="", done=True)
    assert screen(out.getvalue(), 80, 24) == (["h2: slow", f"h1 [{'#' * 30}] has it", ""], [])


@pytest.mark.fault(76, "bars of any number of hosts fit the terminal, and nothing of them stays behind")
@pytest.mark.parametrize(("columns", "high"), SIZES)
def test_bars_fit_any_terminal(columns: int, high: int) -> None:
    out, clock = io.StringIO(), [0.0]
    drawn = Bars(out, lambda: clock[0], lambda _: (columns, high))
    for have in range(4):
        for number in range(40):
            clock[0] += 1
            name = f"compute-node-with-a-long-name-{number}"
            is_done = have == 3 and number < 12
            drawn.tell(event="host", host=name, have=have, of=4, source="peer", done=is_done)
    lines, gone = screen(out.getvalue(), columns, high)
    assert len(lines) <= high and lines[-1] == ""
    assert not gone, "a line that scrolled away can be drawn over no more"
    if high == 24:
        assert lines[-2] == "and 18 more: 12 done"
        assert len(lines) == 24


@pytest.mark.fault(76, "bars of any number of hosts fit the terminal, and nothing of them stays behind")
def test_names_are_cut_by_the_width_that_is_there() -> None:
    event = {"host": "compute-node-with-a-long-name-7", "have": 2, "of": 4, "source": "peer"}
    (wide,) = bars([event], 120, 5)
    assert wide.startswith("compute-node-with-a-long-name-7 [###############...............]  50 % from peer")
    (usual,) = bars([event], 79, 5)
    assert usual.startswith("compute-node-with-a-long") and "] " in usual and usual.endswith("50 % from peer")
    (narrow,) = bars([event], 39, 5)
    assert "[" not in narrow and narrow.endswith("50 % from peer") and narrow.startswith("compute")
    assert bar({"host": "h", "have": 0, "of": 0}, 1, 30).startswith("h [....")
