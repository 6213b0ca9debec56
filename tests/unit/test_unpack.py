# SPDX-License-Identifier: Apache-2.0
"""Streams in a row that come by and by; and what unpacking may cost, the processor's time being made up."""

from __future__ import annotations

import bz2
import gzip
import lzma
import time
from typing import Any

import pytest

from semishared.errors import SourceTooSlow
from semishared.intake import unpack


class Slow:
    """A source that has a byte at a time: the first bytes of a stream may come in as many reads."""

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)

    def read(self, _size: int, /) -> bytes:
        return bytes([byte for _, byte in zip(range(1), self._left)])


@pytest.mark.parametrize(("packer", "kind"), [(gzip, "gzip"), (bz2, "bz2"), (lzma, "lzma")])
def test_a_second_stream_is_known_however_it_comes(packer: Any, kind: str) -> None:
    came = Slow(packer.compress(b"one") + packer.compress(b"two"))
    assert b"".join(unpack.unpacked(came, kind)) == b"onetwo"


def test_what_unpacking_may_cost_grows_with_what_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    work = unpack.Work(unpack.LEAST_S + 5)
    now[0] += unpack.LEAST_S + 2.5
    for _ in range(2):
        with pytest.raises(SourceTooSlow):
            work.came(1 << 20)
    work.came(1 << 20)
    now[0] += 4
    with pytest.raises(SourceTooSlow, match=f"and {11 << 20} bytes of it cost more than 8 s"):
        work.came(8 << 20)
