# SPDX-License-Identifier: Apache-2.0
"""Packets: whole and in order or not at all; nothing of another session, nothing forged, nothing damaged."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.do import codec, packets
from semishared.do.codec import Sample
from semishared.errors import BadArguments, TransferCorrupt

SESSION = packets.Session(b"s" * 16, b"k" * 32)
CONTENTS = st.lists(st.tuples(st.integers(0, 1 << 40), st.binary(max_size=300)), max_size=5)


def extent(number: int, content: bytes) -> packets.Extent:
    return packets.Extent(number, hashlib.sha256(content).hexdigest(), content)


def stream(groups: list[list[tuple[int, bytes]]], session: packets.Session = SESSION) -> bytes:
    sealer = packets.Sealer(session, codec.NONE)
    pieces = sealer.manifest(b"manifest")
    for group in groups:
        pieces += sealer.extents([extent(*item) for item in group])
    return b"".join(pieces)


def opened(data: bytes, cuts: list[int], session: packets.Session = SESSION) -> list[tuple[int, bytes]]:
    opener = packets.Opener(session)
    found, start = [], 0
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        found += list(opener.feed(data[start:end]))
        start = end
    return found


@given(st.lists(CONTENTS, max_size=4), st.lists(st.integers(0, 3000), max_size=6))
def test_what_went_in_comes_out_however_it_is_cut(groups: list[list[tuple[int, bytes]]], cuts: list[int]) -> None:
    found = opened(stream(groups), cuts)
    assert found[0] == (packets.MANIFEST, b"manifest")
    out = [[(item.number, item.content) for item in packets.extents_in(plain)] for _, plain in found[1:]]
    assert out == groups


@given(st.integers(0, 2000), st.integers(1, 255))
def test_any_changed_byte_ends_the_stream_and_is_never_taken(at: int, change: int) -> None:
    data = bytearray(stream([[(1, b"a" * 100)], [(2, b"b" * 100), (3, b"c" * 50)]]))
    at %= len(data)
    whole = opened(bytes(data), [])
    data[at] ^= change
    found: list[tuple[int, bytes]] = []
    opener = packets.Opener(SESSION)
    try:
        for item in opener.feed(bytes(data)):
            found.append(item)
    except TransferCorrupt:
        pass
    assert found == whole[: len(found)] and len(found) < len(whole)


def test_other_sessions_other_keys_and_repeated_packets_are_refused() -> None:
    data = stream([[(1, b"a")]])
    for other in (packets.Session(b"t" * 16, SESSION.key), packets.Session(SESSION.id, b"l" * 32)):
        with pytest.raises(TransferCorrupt):
            opened(stream([[(1, b"a")]], other), [])
    sealer = packets.Sealer(SESSION, codec.NONE)
    first = b"".join(sealer.manifest(b"x"))
    for again in (first + first, b"".join(sealer.extents([extent(1, b"a")])), b"GET / HTTP/1.0\r\n" * 20, b"\0" * 200):
        with pytest.raises(TransferCorrupt):
            opened(again, [])
    assert opened(data[:-1], [])[1:] == []


def test_sessions_in_text() -> None:
    assert packets.Session.of(SESSION.text) == SESSION
    assert packets.Session.new() != packets.Session.new()
    for wrong in ("", ":", "00:11", "x" * 97, SESSION.text + "00"):
        with pytest.raises(BadArguments):
            packets.Session.of(wrong)


def test_packets_that_lie_about_their_extents_are_refused() -> None:
    for plain in (b"", b"\0\0\0\1", b"\0\0\0\2" + b"\0" * 44, b"\xff\xff\xff\xff" + b"\0" * 100):
        with pytest.raises(TransferCorrupt):
            list(packets.extents_in(plain))


MBIT_100 = 12_500_000


@pytest.mark.parametrize(
    ("ratios", "rate", "wanted"),
    [
        ({"zstd": 0.3, "lzop": 0.4}, MBIT_100, "zstd"),
        ({"zstd": 1.0, "lzop": 1.0}, MBIT_100, "none"),
        ({"zstd": 0.97, "lzop": 0.99}, MBIT_100, "none"),
        ({"zstd": 0.3, "lzop": 0.4}, 10_000_000_000, "none"),
        ({"lzop": 0.4}, 0, "lzop"),
        ({}, 0, "none"),
    ],
)
def test_compressor_that_pays_is_chosen(ratios: dict[str, float], rate: float, wanted: str) -> None:
    samples = [Sample("none", 1.0, float("inf")), *(Sample(name, ratio, 900e6) for name, ratio in ratios.items())]
    assert codec.best(samples, rate) == wanted


def test_slow_compressor_does_not_pay_although_it_is_the_better_one() -> None:
    samples = [Sample("none", 1.0, float("inf")), Sample("zstd", 0.2, 30e6), Sample("lzop", 0.4, 900e6)]
    assert codec.best(samples, 117e6) == "lzop"
