# SPDX-License-Identifier: Apache-2.0
"""In which order images of a pool go, and who waits for whom; that they go is for the suites with Ceph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Tuple

import pytest

from semishared.errors import ImageInUse
from semishared.model.refs import ImageRef
from semishared.store.rbd import claim, image, pool
from semishared.store.rbd.store import RbdStore

ASIDE = ["one-7-2", "one-7-2:1", "one-7-2:3"]


def test_of_several_none_is_waited_for_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    left = list(ASIDE)
    asked: List[Tuple[str, float]] = []

    def remove(where: object, name: str, wait_s: float = image.WATCH_S, trash: bool = False) -> bool:
        asked.append((name, wait_s))
        if name == ASIDE[0] and len(left) > 1:
            raise ImageInUse(f"{name} has clones")
        if name in left:
            left.remove(name)
        return True

    monkeypatch.setattr(claim, "settle_change", lambda *_: None)
    monkeypatch.setattr(pool, "names", lambda _: list(left))
    monkeypatch.setattr(pool, "remove", remove)
    where: Any = None
    pool.remove_all(where, "one-7")
    assert asked == [
        ("one-7", image.WATCH_S),
        (ASIDE[0], 0),
        (ASIDE[1], 0),
        (ASIDE[2], 0),
        (ASIDE[0], image.WATCH_S),
    ]


def test_before_an_image_is_staged_what_killed_makers_left_of_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: List[Tuple[str, str]] = []
    where: Any = SimpleNamespace(name="one")
    monkeypatch.setattr(RbdStore, "_settled", lambda *_: (where, "one-7"))
    monkeypatch.setattr(pool, "sweep", lambda _, name: done.append(("sweep", name)))
    monkeypatch.setattr(pool, "create", lambda _, name, __: done.append(("create", f"one/{name}")))
    of = ImageRef(100, 7, "raw", "one/one-7")
    staged = RbdStore(of.access).stage(of, 1 << 20)
    assert done == [("sweep", "one-7"), ("create", staged)]
