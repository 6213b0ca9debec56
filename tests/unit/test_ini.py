# SPDX-License-Identifier: Apache-2.0
"""semishared.conf is read as configparser reads it: whatever the text is, both find the same, or both refuse
it.
"""

from __future__ import annotations

import configparser
import sys
from pathlib import Path
from typing import Dict, Optional, Tuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from semishared import config
from semishared.config import PATH
from semishared.errors import BadAttribute

Found = Optional[Dict[Tuple[str, str], str]]
LINES = st.sampled_from(
    [
        "[a]",
        "[b]",
        "[DEFAULT]",
        "  [b]",
        "[]",
        "[a",
        "[a]b]",
        "[c] rest",
        "a]",
        "key = value",
        "KEY=other",
        "two: words = here",
        "x=y:z",
        "  indented = 1",
        "\tdeep",
        "    deeper",
        "= nothing",
        ": nothing",
        "alone",
        "empty =",
        "empty:",
        "# comment",
        "  ; comment",
        "k = v # no comment",
        "",
        "   ",
        "[d]x",
        "a = [b]",
        "\u00fc = \u00e9",
    ]
)


def theirs(path: Path) -> Found:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return None
    return {(section, key): text for section in parser.sections() for key, text in parser.items(section)}


def ours(path: Path) -> Found:
    try:
        return config.read(str(path))
    except BadAttribute:
        return None


@given(st.lists(LINES, max_size=12) | st.lists(st.text("[]=: #;a\t\n", max_size=9), max_size=6))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_as_the_library_reads_it(tmp_path: Path, lines: list[str]) -> None:
    # Older libraries end a section's name at the first bracket, not at the last.
    assume(sys.version_info >= (3, 10) or not any(line.count("]") > 1 for line in lines))
    path = tmp_path / "conf"
    path.write_text("\n".join(lines))
    assert ours(path) == theirs(path)


def test_what_is_delivered_is_read_whole() -> None:
    found = config.read(PATH)
    assert found == theirs(Path(PATH))
    assert len(found) > 25


def test_no_file_and_no_text(tmp_path: Path) -> None:
    assert config.read(str(tmp_path / "none")) == {}
    (tmp_path / "conf").write_bytes(b"[a]\nk = \xff\n")
    with pytest.raises(BadAttribute):
        config.read(str(tmp_path / "conf"))


@pytest.mark.parametrize(
    "text,said",
    [
        ("a = 1", "line 1"),
        ("[a]\n\nb", "line 3"),
        ("[a]\n[a]", "twice"),
        ("[a]\nb = 1\nB: 2", "'b' is in .a. twice"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "conf").write_text(text)
    with pytest.raises(BadAttribute, match=said):
        config.read(str(tmp_path / "conf"))
