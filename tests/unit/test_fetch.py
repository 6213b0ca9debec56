# SPDX-License-Identifier: Apache-2.0
"""Bases on their way whose store cannot say what they have, in temporary directories."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from semishared import store
from semishared.errors import ImageChanged, StoreUnavailable
from semishared.model.base import names as base_names
from semishared.model.base.steps import FetchBases, Part
from semishared.model.disk import names as disk_names
from semishared.model.refs import ImageRef
from semishared.stage import fetch
from semishared.stage.partial import Partial
from semishared.tools import extents, inspection

DATA = os.urandom(extents.EXTENT + 4096)


def filled(copied: bytes, root: Path, monkeypatch: pytest.MonkeyPatch, is_gone: bool = False) -> ImageRef:
    """Have a base of which one extent is here made from a store that hashes nothing, and may be gone at the
    end; return its image.
    """
    (root / "source").write_bytes(DATA)
    found = extents.copy(f"{root}/source", None, "raw", "store_read")
    image = ImageRef(100, 1, "raw", "/x", found.generation)
    before = Partial(str(root), image)
    before.begin(found.text())
    before.put(1, DATA[extents.EXTENT :])
    before.close()

    class Content:
        def see(self) -> str:
            return "seen"

        def generation(self, seen: str) -> str:
            return ""

        def copy(self, seen: str, target: str, format: str) -> extents.Manifest:  # noqa: A002 - as there
            (root / "source").write_bytes(copied)
            return extents.copy(f"{root}/source", target, format, "store_read")

        def publish(self, found: extents.Manifest, seen: str) -> None:
            if is_gone:
                raise StoreUnavailable("gone")

    monkeypatch.setattr(store, "content", lambda _: Content())
    monkeypatch.setattr(fetch, "standing_back", nullcontext)
    monkeypatch.setattr(fetch, "load", lambda: None)
    monkeypatch.setattr(inspection, "check", lambda *_: None)
    fetch.fill(
        FetchBases(str(root), (Part(image, ()),), (), "all", "", "auto", 0, 0, (), ()),
        lambda **_: None,
        lambda: None,
    )
    return image


def test_base_is_copied_beside_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = filled(DATA, tmp_path, monkeypatch)
    base = base_names.base(str(tmp_path), image.base_name)
    assert Path(base_names.image(base)).read_bytes() == DATA
    assert not [entry for entry in os.listdir(base) if "image" in entry and entry != "image"]


def test_other_content_leaves_what_had_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was: list[int] = []
    closing = Partial.close

    def close(self: Partial) -> None:
        if self._fd >= 0:
            was.append(os.fstat(self._fd).st_nlink)
        closing(self)

    monkeypatch.setattr(Partial, "close", close)
    with pytest.raises(ImageChanged):
        filled(DATA[:-1] + bytes([DATA[-1] ^ 1]), tmp_path, monkeypatch)
    assert was and all(was), "what was open is what has the name"


def test_copy_of_a_store_that_goes_away_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreUnavailable):
        filled(DATA, tmp_path, monkeypatch, is_gone=True)
    left = os.listdir(base_names.staging(str(tmp_path), "100-1"))
    assert "image" in left and not [name for name in left if disk_names.is_staged(name)]
