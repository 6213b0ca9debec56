# SPDX-License-Identifier: Apache-2.0
"""How often a store is asked while a base comes, and whose fault it is when it stands still; store, peer and
clock are made up.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterable, Iterator

import pytest

from semishared import store
from semishared.config import Config
from semishared.errors import HostUnreachable
from semishared.model.base.steps import FetchBases, Part
from semishared.model.refs import ImageRef
from semishared.stage import peers, source_speed
from semishared.stage.bases_in_progress import Account, Orders
from semishared.stage.fetch_from_sources import Filling

EXTENTS = 64
IMAGE = ImageRef(100, 7, "raw", "one/one-7", generation="a" * 32)
STORE = "store 100"


class Target:
    """A base of which nothing is here yet; it is its partial too."""

    is_known, is_over = True, False

    def __init__(self) -> None:
        self.partial = self
        self.part = Part(IMAGE, ("h1",))
        self.have: set[int] = set()
        self.manifest = SimpleNamespace(extents={index: str(index) for index in range(EXTENTS)})

    def missing(self) -> list[int]:
        return [index for index in range(EXTENTS) if index not in self.have]

    @property
    def count(self) -> int:
        return len(self.have)

    total = EXTENTS

    def put(self, index: int, content: bytes, digest: str) -> bool:
        self.have.add(index)
        return True


class Content:
    """What is in the store; it stands still before one extent."""

    def __init__(self, stands_still: Callable[[], None]) -> None:
        self.asked: list[str] = []
        self._stands_still = stands_still

    def see(self) -> str:
        self.asked.append("see")
        return "seen"

    def generation(self, seen: str) -> str:
        return IMAGE.generation

    def read(self, wanted: Iterable[int], seen: str = "") -> Iterator[tuple[int, bytes]]:
        self.asked.append(f"read what was {seen}")
        for index in wanted:
            if index == 4:
                self._stands_still()
            yield index, b"x"


def filling(monkeypatch: pytest.MonkeyPatch, content: Content, target: Any, root: str) -> Filling:
    monkeypatch.setattr(store, "content", lambda image: content)
    step = FetchBases(root, (target.part,), (), "all", "", "none", 0, 0, (), ())
    return Filling(step, target, Account(target, lambda **_: None), Orders(lambda: None), Config())


def test_store_is_opened_once_for_what_is_read_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content, target = Content(lambda: None), Target()
    filling(monkeypatch, content, target, str(tmp_path))._store(target)  # type: ignore[arg-type]
    assert not target.missing()
    assert content.asked == ["see", "read what was seen", "see"], "of what others wait for there is nothing"


@pytest.mark.parametrize("stands_still_s", [1, 33])
def test_peer_that_breaks_off_while_the_store_stands_still_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stands_still_s: float
) -> None:
    """Nobody took what it sent: it has given up, as it must (outgoing.WRITE_S). One that breaks off by itself
    has.
    """
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    has_stood: list[bool] = []

    def stand_still() -> None:
        now[0] += stands_still_s
        has_stood.append(True)

    class Coming:
        at = 1000.0

        def __init__(self, *_: object) -> None:
            pass

        def __enter__(self) -> Coming:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def turn(self, within_s: float) -> bool:
            # What was read ahead is there yet at the first look.
            if len(has_stood) > 1:
                raise HostUnreachable("h1 has ended with code 142")
            has_stood.extend([True] * bool(has_stood))
            return False

    monkeypatch.setattr(peers, "Coming", Coming)
    target = Target()
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], target)  # type: ignore[arg-type]
    assert (choice.begin(), choice.tried) == (STORE, "h1")
    found = filling(monkeypatch, Content(stand_still), target, str(tmp_path))
    assert found._beside(target, choice) is None  # type: ignore[arg-type]
    assert found.account.troubles == ["h1: h1 has ended with code 142"]
    choice.end(has_failed=False)
    assert choice.begin() == STORE and choice.tried == ("h1" if stands_still_s == 33 else "")
