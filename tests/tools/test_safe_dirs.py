# SPDX-License-Identifier: Apache-2.0
"""Which directories that are there already users may register as shares: what they name is looked at only
below SAFE_DIRS.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from semishared.errors import RestrictedPath, StoreUnavailable
from semishared.model.share.share import Tree
from semishared.model.share.steps import FoundDirectory
from semishared.share import registered
from semishared.tools.hung_store import unless_it_hangs


@pytest.fixture()
def top() -> Iterator[Path]:
    """Return a directory on the way to which all may pass; that of tmp_path's is root's alone."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        (Path(name) / "safe/theirs/below").mkdir(parents=True)
        (Path(name) / "link").symlink_to(f"{name}/safe/theirs")
        yield Path(name)


@pytest.fixture()
def tree(top: Path) -> Tree:
    return Tree("plain", f"{top}/root")


def test_what_is_not_below_safe_dirs_is_not_even_looked_at(tree: Tree, top: Path) -> None:
    # A look would find that it leads to where it may.
    with pytest.raises(RestrictedPath, match="none of the datastore's SAFE_DIRS"):
        registered.found(tree, f"{top}/link", (f"{top}/safe/",))


@pytest.mark.parametrize("where", ["safe/theirs/below/root", "link/below", "safe/theirs", "safe"])
def test_what_is_above_or_in_a_directory_of_another_datastore_no_guest_is_given(
    tree: Tree, top: Path, where: str
) -> None:
    theirs, safe = f"{top}/safe/theirs", (f"{top}/safe",)
    assert registered.found(tree, theirs, safe, (f"{top}/safe/their", f"{top}/elsewhere")) == FoundDirectory(
        theirs
    )
    with pytest.raises(
        RestrictedPath, match=rf"{theirs} has to do with {top}/safe.*, which no guest may be given"
    ):
        registered.found(tree, theirs, safe, (f"{top}/elsewhere", f"{top}/{where}"))


def test_what_hangs_below_them_is_not_waited_for_for_ever(
    tree: Tree, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(os.path, "realpath", lambda _: never.wait(60))
    monkeypatch.setattr(registered, "unless_it_hangs", partial(unless_it_hangs, limit_s=0.2))
    try:
        with pytest.raises(StoreUnavailable, match="theirs .*hangs"):
            registered.found(tree, f"{top}/safe/theirs", (f"{top}/safe",))
    finally:
        never.set()
