# SPDX-License-Identifier: Apache-2.0
"""Reads of an RBD image that are under way when somebody has enough, or fails: the image is closed next."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Callable, Optional

import pytest

from semishared.errors import CephUnavailable
from semishared.store.rbd import ceph, content
from semishared.tools.extents import EXTENT

Done = Callable[[object, Optional[bytes]], None]
SIZE = 20 * EXTENT
LATE_S = 0.2


class Image:
    """An open image as the bindings have it, whose reads come late from a thread of theirs, each at a time;
    some never do, or fail.
    """

    def __init__(self, failing: tuple[int, ...] = (), never: tuple[int, ...] = ()) -> None:
        self.failing, self.never = failing, never
        self.under_way: set[int] = set()

    def aio_read(self, offset: int, length: int, done: Done) -> None:
        index = offset // EXTENT
        self.under_way.add(index)
        if index not in self.never:
            threading.Timer(0 if index in (0, *self.failing) else LATE_S, self._read, (index, done)).start()

    def _read(self, index: int, done: Done) -> None:
        self.under_way.discard(index)
        done(None, None if index in self.failing else b"x")


def test_all_is_read() -> None:
    image = Image()
    assert sorted(index for index, _ in content.several(image, SIZE, range(20))) == list(range(20))
    assert not image.under_way


def test_whoever_has_enough_leaves_no_read_under_way() -> None:
    image = Image()
    with closing(content.several(image, SIZE, range(20))) as found:
        assert next(found)[0] == 0
        assert image.under_way
    assert not image.under_way


def test_a_read_that_fails_leaves_none_under_way() -> None:
    image = Image(failing=(2,))
    with pytest.raises(CephUnavailable, match="extent 2 cannot be read"):
        list(content.several(image, SIZE, range(20)))
    assert not image.under_way


def test_the_error_of_whoever_reads_is_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceph, "ANSWER_S", LATE_S)
    reads = content.several(Image(never=(3,)), SIZE, range(20))
    with pytest.raises(ValueError, match="no space"), closing(reads) as found:
        next(found)
        raise ValueError("no space")


def test_reads_that_are_not_answered_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceph, "ANSWER_S", 1)
    started = time.monotonic()
    with pytest.raises(CephUnavailable, match="reads are not answered within 2 s"):
        list(content.several(Image(never=(3,)), SIZE, range(4)))
    assert time.monotonic() - started < 3.5
