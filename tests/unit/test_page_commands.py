# SPDX-License-Identifier: Apache-2.0
"""What pages say of commands is what the command takes, and each command of the pages for operators runs in a
test.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Iterator, List, NoReturn

import pytest

import pages
from semishared.cli.main import COMMANDS, parser

pytestmark = pytest.mark.reads_checkout

PAGES = [pages.ROOT / "README.md", pages.ROOT / "SECURITY.md", *sorted(pages.DOCS.glob("*/*.md"))]
MISSING = re.compile(
    r"the following arguments are required|one of the arguments .* is required|.* expected one argument"
)
NO_COMMAND = ("--help", "--version", "SUBCOMMAND")


class Wrong(Exception):
    """The parser refuses a line."""


@pytest.fixture(autouse=True)
def _refusals_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise Wrong(message)

    monkeypatch.setattr(argparse.ArgumentParser, "error", error)


def refusal(words: List[str], is_whole: bool) -> str:
    """Return what the parser says against a line; one that only names a command need not be whole."""
    if words[0] in NO_COMMAND or words[-1] in NO_COMMAND:
        return ""
    if words[0] not in COMMANDS:
        return f"no subcommand {words[0]}"
    try:
        _, unknown = parser(words[0]).parse_known_args(words)
    except Wrong as e:
        return "" if not is_whole and MISSING.match(str(e)) else str(e)
    return f"unrecognized {unknown}" if unknown else ""


def refused(page: Path) -> Iterator[str]:
    text = page.read_text()
    for said in pages.commands(text):
        for words in pages.ways(pages.ours(said.text)):
            why = refusal(words, said.in_block) if words else ""
            if why:
                yield f"{page.name}:{said.line}: {said.text}: {why}"
    # In sentences and tables our name is often left out.
    for short in pages.INLINE.findall(text):
        if short.partition(" ")[0] in COMMANDS and " --" in short:
            for words in pages.ways(short):
                why = refusal(words, False)
                if why:
                    yield f"{page.name}: {short}: {why}"


@pytest.mark.fault(82, "a command that a page says is one that the parser takes")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_of_ours_on_a_page_are_taken_by_the_parser(page: Path) -> None:
    assert list(refused(page)) == []


@pytest.mark.fault(82, "each command of the pages for operators runs in a test")
def test_each_command_for_operators_runs_in_a_test() -> None:
    said = {said.text for page in pages.FOR_OPERATORS for said in pages.commands(page.read_text())}
    rows = [row.command for row in pages.runs()]
    assert sorted(said) == sorted(rows)
    for row in pages.runs():
        text = (pages.ROOT / "tests" / row.file).read_text()
        assert re.search(rf"^def {row.test}\(", text, re.MULTILINE), row
