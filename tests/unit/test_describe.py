# SPDX-License-Identifier: Apache-2.0
"""What a host says of a base that it may be given; the store is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from semishared import store
from semishared.errors import StoreUnavailable
from semishared.model.base.steps import DescribeBase
from semishared.model.refs import ImageRef
from semishared.stage import manifests


class Away:
    """The content of an image in a store that is not there."""

    def see(self) -> str:
        raise StoreUnavailable("away")

    def expected(self, generation: str) -> None:
        raise StoreUnavailable("away")


def test_host_that_does_not_reach_the_store_needs_no_room_that_it_knows_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "content", lambda _: Away())
    found = manifests.describe(DescribeBase(str(tmp_path), ImageRef(100, 7, "raw", "/x", "a" * 32)))
    assert (found.needed, found.has, found.current) == (0, False, "") and "away" in found.trouble
