# SPDX-License-Identifier: Apache-2.0
"""What the operator's command prints goes through one writer, which leaves nothing that controls a
terminal.
"""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest

from semishared.cli import command, progress

CLI = Path(command.__file__).parent
HOSTILE = "a\x1b[2Jb\x9b31mc\nd\re\u202ef\u2066g\x00h\ud800\u200bi\x85j\u2028k"


@pytest.mark.fault(
    45,
    "no control character of what others have named is printed, nor one that turns the direction of writing",
)
def test_nothing_that_is_printed_controls_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    command.put(f"host {HOSTILE}")
    command.table("IMAGE|OWNER", [[HOSTILE, "1"]])
    bars = io.StringIO()
    progress.Bars(bars).tell(event="note", host=HOSTILE, text=HOSTILE)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 3 and all(line.isprintable() for line in printed.split("\n"))
    assert "host a?[2Jb?31mc?d?e?f?g?h??i?j?k" in printed
    drawn = bars.getvalue().removesuffix("\n")
    assert drawn.startswith("\x1b[2K") and drawn[4:].isprintable()


@pytest.mark.fault(
    45, "a name that the terminal's locale has not ends no command: `?` is shown for what it lacks"
)
def test_a_name_that_the_locale_has_not_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="iso8859-1")
    monkeypatch.setattr("sys.stdout", terminal)
    command.put("VM \u65e5 \xe9")
    command.table("VM \u65e5|\xe9", [])
    progress.Bars(terminal).tell(event="note", host="h", text="\u65e5")
    command.put("\u65e5", to=terminal)
    terminal.flush()
    printed = terminal.detach().getvalue()
    assert printed.startswith(b"VM ? \xe9\nVM ?  \xe9\n") and printed.endswith(b"?\n")


class Terminal(io.StringIO):
    """A terminal, as far as isatty(3) tells."""

    def isatty(self) -> bool:
        return True


ROWS = [
    ["0 web", "POWEROFF", "host-17", "0", "debian-12-cloud", "local, overlay, 3 snapshots", "388.0 KiB"],
    ["1042 db", "ACTIVE", "h1", "11", "os", "local, clone, 1.2 GiB not committed, production", "-"],
]
HEAD = "VM|STATE|ON|DISK|IMAGE|LIVES|SIZE|BASE|WHY"
BASES = [["100-0-103ca959", "not persistent: the default"], ["-", "SEMISHARED_PLACE = local of image 7"]]
STATUS = [[*row, *base] for row, base in zip(ROWS, BASES)]


@pytest.mark.fault(80, "a table fits a terminal, wrapped between words: no name or number is broken")
@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_table_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for rows in STATUS, STATUS * 3, [[cell[:12] for cell in row] for row in STATUS]:
        terminal = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr("sys.stdout", terminal)
            patched.setenv("COLUMNS", str(columns))
            command.table("A|LIVES|WHY", [[row[0], row[5], f"{row[8]} {row[8]}"] for row in rows])
            narrow = terminal.getvalue()
            command.table(HEAD, rows)
        assert max(map(len, narrow.splitlines())) <= columns
        words = {word for row in rows for cell in row for word in cell.split()}
        assert words <= set(terminal.getvalue().split())
        whole = terminal.getvalue()[len(narrow) :]
        least = sum(max(map(len, " ".join(column).split())) + 2 for column in zip(HEAD.split("|"), *rows))
        assert max(map(len, whole.splitlines())) <= max(columns, least)


def test_a_row_is_one_line_for_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    command.table(HEAD, STATUS)
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.fault(45, "names in JSON are escaped")
def test_json_is_ascii_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    command.put_json({"name": HOSTILE}, None)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isascii() and line.isprintable()


def test_lines_of_ours_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    command.put_all("one\n  two\n")
    command.put()
    command.put_all("three")
    assert capsys.readouterr().out == "one\n  two\n\nthree\n"


@pytest.mark.reads_checkout
@pytest.mark.fault(45, "nothing of the operator's command prints but by that writer")
@pytest.mark.parametrize("path", sorted(CLI.glob("*.py")), ids=lambda path: path.name)
def test_nobody_else_prints(path: Path) -> None:
    if path.name == "command.py":  # the one writer, and what draws again words and numbers of ours
        return
    names = [node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)]
    assert "print" not in names
