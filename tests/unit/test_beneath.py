# SPDX-License-Identifier: Apache-2.0
"""Paths below a directory that somebody else can write to; with what such a one can do:
tests/tools/test_links.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from semishared.errors import UnexpectedLink
from semishared.tools import beneath


def test_link_in_the_way_is_named_with_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/below").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b").symlink_to(tmp_path / "elsewhere")
    for make in (False, True):
        with pytest.raises(
            UnexpectedLink, match=f"{tmp_path}/a/b on .* is a symbolic link, to {tmp_path}/elsewhere"
        ):
            beneath.open_directory(str(tmp_path), "a/b/below", make=make)
