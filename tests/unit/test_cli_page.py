# SPDX-License-Identifier: Apache-2.0
"""docs/reference/cli.md and the command: each subcommand, option and exit code of the one is in the other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from semishared.cli.main import COMMANDS, parser
from semishared.plan.care import gc

pytestmark = pytest.mark.reads_checkout

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md").read_text()
SECTIONS = {text.split("\n", 1)[0]: text for text in re.split(r"(?m)^## ", PAGE)[1:]}
EVERYWHERE = {"--help", "-h", "--json"}
UNSAID = {("doctor", "--root"), ("support-bundle", "--root")}
"""For tests and for an OpenNebula in a directory; --help has them."""


def options(command: str) -> set[str]:
    """Return the options that the parser of a subcommand knows."""
    top = parser(command)
    choices = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    return {
        word
        for action in choices[command]._actions
        for word in action.option_strings
        if word.startswith("--")
    }


def test_every_subcommand_has_a_section_and_no_other_does() -> None:
    assert {title.split()[1] for title in SECTIONS if title.startswith("semishared ")} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_those_of_the_parser(command: str) -> None:
    section = re.sub(r"(?s)```console.*?```", "", SECTIONS[f"semishared {command}"])
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", section))
    known = options(command)
    assert said <= known | EVERYWHERE, f"the page of {command} knows more than its parser"
    missing = {word for word in known - EVERYWHERE - said if (command, word) not in UNSAID}
    assert not missing, f"the page of {command} does not say {missing}"


@pytest.mark.parametrize("command", COMMANDS)
def test_exit_codes_are_those_of_the_help(command: str) -> None:
    top = parser(command)
    choices = next(
        action.choices for action in top._actions if isinstance(action, argparse._SubParsersAction)
    )
    description = choices[command].description or ""
    codes = " ".join(description.split()).split("exit codes:")[1]
    in_help = set(re.findall(r"(?:^|[,;\n]) ?([0-9])(?= )", codes))
    section = SECTIONS[f"semishared {command}"]
    on_page = set(re.findall(r"(?m)^\| ([0-9]) \|", section)) or set(
        re.findall(r"\b([0-9])(?=:|,| )", section.rpartition("Exit code")[2])
    )
    assert in_help == on_page, (codes, on_page)


def test_what_gc_finds_is_what_the_page_says() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.+?) \| (.+) \|$", SECTIONS["semishared gc"])
    assert rows == [tuple(kind) for kind in gc.KINDS]
