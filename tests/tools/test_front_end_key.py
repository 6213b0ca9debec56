# SPDX-License-Identifier: Apache-2.0
"""The key of front-ends as a file: which one is gone by, and how `setup` makes it. Several front-ends:
operate/test_front_ends.py.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Callable

import pytest

from semishared.tools import key
from tools.test_setup import Site, site

__all__ = ["site"]
HARM: dict[str, tuple[str, Callable[[Path], object]]] = {
    "gone": ("is missing", Path.unlink),
    "a link to it": (
        "cannot be read: Too many levels",
        lambda path: (path.rename(f"{path}.1"), path.symlink_to(f"{path}.1")),
    ),
    "a directory": ("is damaged", lambda path: (path.unlink(), path.mkdir(mode=0o700))),
    "a pipe": ("is damaged", lambda path: (path.unlink(), os.mkfifo(path, 0o600))),
    "read by the group": ("has mode 640", lambda path: path.chmod(0o640)),
    "written by all": ("has mode 602", lambda path: path.chmod(0o602)),
    "of another user": ("belongs to user 1234", lambda path: os.chown(path, 1234, -1)),
    "empty": ("is damaged", lambda path: path.write_text("")),
    "cut": ("is damaged", lambda path: path.write_text("5e" * 31)),
    "longer": ("is damaged", lambda path: path.write_text("5e" * 33)),
    "no digits": ("is damaged", lambda path: path.write_text("xy" * 32)),
}


@pytest.mark.fault(27, "a key that others may read or change, or that is none, is nothing to go by")
@pytest.mark.parametrize("what", HARM)
def test_only_a_whole_key_of_ones_own_is_gone_by(tmp_path: Path, what: str) -> None:
    path = tmp_path / "semishared_key"
    key.make(str(path))
    assert (
        key.look(str(path)) == (path.read_bytes().strip(), "") and stat.S_IMODE(path.stat().st_mode) == 0o600
    )
    why, harm = HARM[what]
    harm(path)
    found, said = key.look(str(path))
    assert found == b"" and why in said


def test_a_key_is_made_once_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "semishared_key"
    key.make(str(path))
    first = path.read_text()
    with pytest.raises(FileExistsError):
        key.make(str(path))
    assert path.read_text() == first and os.listdir(tmp_path) == ["semishared_key"]


def test_codes_differ_by_key_and_by_each_word(tmp_path: Path) -> None:
    lists = (
        ["fence", "1", "23"],
        ["fence", "12", "3"],
        ["fence", "123"],
        ["compared", "1", "23"],
        ["fence", "1", "23", ""],
    )
    codes = {key.code(b"5e" * 32, words) for words in lists} | {key.code(b"5f" * 32, lists[0])}
    assert len(codes) == 6
    assert key.is_right(b"5e" * 32, lists[0], key.code(b"5e" * 32, lists[0])) and not key.is_right(
        b"5e" * 32, lists[0], ""
    )


@pytest.mark.fault(27, "setup makes the front-end's key once, and no second one")
def test_setup_makes_the_key_and_nothing_else_if_that_is_asked(site: Site) -> None:
    path = site.auth.parent / "semishared_key"
    said = site.setup("--key").stdout
    assert said == f"made {path}\n" and not site.oned.datastores and key.look(str(path))[1] == ""
    first = path.read_text()
    assert (
        site.setup("--key").stdout == "" and site.setup("--apply").stderr == "" and path.read_text() == first
    )
    path.chmod(0o644)
    assert "has mode 644" in site.setup("--key", code=2).stderr
    done = site.setup("--apply", code=1)
    assert "SS182" in done.stderr and "semi_img: id 100" in done.stdout, "datastores are there all the same"
    path.unlink()
    assert f"made {path}" in site.setup("--apply", "--json").stderr and path.read_text() != first
