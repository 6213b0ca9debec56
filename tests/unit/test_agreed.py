# SPDX-License-Identifier: Apache-2.0
"""Whoever removes data is asked at a terminal, in the same way everywhere."""

from __future__ import annotations

import argparse
import io
from types import ModuleType

import pytest

from semishared.cli import command, gc, share


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.fault(42, "what removes data asks at a terminal, unless --yes")
@pytest.mark.parametrize(
    ("typed", "yes", "may"),
    [
        ("y\n", False, True),
        ("yes\n", False, True),
        ("n\n", False, False),
        ("\n", False, False),
        ("", False, False),
        ("", True, True),
    ],
)
def test_a_terminal_is_asked(typed: str, yes: bool, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    monkeypatch.setattr("sys.stdout", out)
    assert command.agreed(argparse.Namespace(yes=yes), ["a share would go\x1b"]) == may
    assert ("a share would go?\n" in out.getvalue()) == (not yes)


def test_a_program_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert command.agreed(argparse.Namespace(yes=False), ["x"])


@pytest.mark.fault(42, "--yes and --dry-run are the same words everywhere")
@pytest.mark.parametrize("module", [gc, share])
def test_both_words_are_known_to_what_removes_data(module: ModuleType) -> None:
    parser = argparse.ArgumentParser()
    command.describe(parser, module.ARGUMENTS)
    assert {"--yes", "--dry-run"} <= set(parser._option_string_actions)
