# SPDX-License-Identifier: Apache-2.0
"""Packets: whole and in order or not at all; nothing of another session, nothing forged, nothing damaged."""

from __future__ import annotations

import hashlib
import struct
from typing import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadArguments, TooLarge, TransferCorrupt
from semishared.tools import compress, extents
from semishared.tools.compress import Sample
from semishared.wire import packets

SESSION = packets.Session(b"s" * 16, b"k" * 32)
CONTENTS = st.lists(st.tuples(st.integers(0, 1 << 40), st.binary(max_size=300)), max_size=5)


def extent(number: int, content: bytes) -> packets.Extent:
    return packets.Extent(number, hashlib.sha256(content).hexdigest(), content)


def stream(groups: list[list[tuple[int, bytes]]], session: packets.Session = SESSION) -> bytes:
    sealer = packets.Sealer(session, compress.NONE)
    pieces = sealer.manifest(b"manifest")
    for group in groups:
        pieces += sealer.extents([extent(*item) for item in group])
    return b"".join(pieces)


def feed(opener: packets.Opener, data: bytes) -> Iterator[packets.Packet]:
    """Yield the packets that are complete with `data`."""
    left = memoryview(data)
    while left:
        room = opener.get_buffer()
        count = min(len(room), len(left))
        room[:count] = left[:count]
        packet = opener.buffer_updated(count)
        left = left[count:]
        if packet:
            yield packet


def contents(opener: packets.Opener, packet: packets.Packet) -> list[tuple[int, bytes]]:
    """Return what a receiver takes of a packet: extents that are what the table says; a manifest is number
    -1.
    """
    kind, group, plain = opener.open(packet)
    if kind == packets.MANIFEST:
        found = [(-1, bytes(plain))]
    else:
        found = [
            (item.number, bytes(item.content))
            for item in group
            if hashlib.sha256(item.content).hexdigest() == item.sha256
        ]
    opener.reuse(packet)
    return found


def opened(data: bytes, cuts: list[int], session: packets.Session = SESSION) -> list[list[tuple[int, bytes]]]:
    opener = packets.Opener(session)
    found, start = [], 0
    for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        found += [contents(opener, packet) for packet in feed(opener, data[start:end])]
        start = end
    return found


@given(st.lists(CONTENTS, max_size=4), st.lists(st.integers(0, 3000), max_size=6))
def test_what_went_in_comes_out_however_it_is_cut(
    groups: list[list[tuple[int, bytes]]], cuts: list[int]
) -> None:
    assert opened(stream(groups), cuts) == [[(-1, b"manifest")], *groups]


@given(st.integers(0, 2000), st.integers(1, 255))
def test_no_changed_byte_is_ever_taken(at: int, change: int) -> None:
    data = bytearray(stream([[(1, b"a" * 100)], [(2, b"b" * 100), (3, b"c" * 50)]]))
    at %= len(data)
    whole = [item for packet in opened(bytes(data), []) for item in packet]
    data[at] ^= change
    found: list[tuple[int, bytes]] = []
    opener = packets.Opener(SESSION)
    try:
        for packet in feed(opener, bytes(data)):
            found += contents(opener, packet)
    except TransferCorrupt:
        # What came before it was right.
        assert found == whole[: len(found)]
    assert len(found) < len(whole) and all(item in whole for item in found)


def test_manifest_may_be_as_large_as_stores_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packets.MOST[packets.MANIFEST] == extents.MANIFEST_LIMIT > packets.MOST[packets.EXTENTS]
    data = b"".join(packets.Sealer(SESSION, compress.NONE).manifest(bytes(70 << 20)))
    opener = packets.Opener(SESSION)
    (packet,) = feed(opener, data)
    kind, _, plain = opener.open(packet)
    assert kind == packets.MANIFEST and len(plain) == 70 << 20
    opener.reuse(packet)
    assert not opener._spare, "what comes after it is smaller"


@pytest.mark.parametrize("kind", [packets.MANIFEST, packets.EXTENTS])
def test_packet_that_is_too_large_is_refused_by_its_head(kind: int) -> None:
    head = packets._HEAD.pack(
        packets._MAGIC, SESSION.id, 0, kind, 0, 0, packets.MOST[kind] + 1, packets.MOST[kind] + 1
    )
    with pytest.raises(TransferCorrupt, match="not whole"):
        list(feed(packets.Opener(SESSION), head + bytes(packets._MAC)))


def test_buffers_are_used_again_and_only_when_they_were_given_back() -> None:
    opener = packets.Opener(SESSION)
    first, second, third = feed(opener, stream([[(1, b"a" * 900)], [(2, b"b" * 900)]]))
    kept = bytes(second.payload)
    opener.reuse(third)
    sealer = packets.Sealer(SESSION, compress.NONE)
    sealer.manifest(b""), sealer.extents([]), sealer.extents([])
    (fourth,) = feed(opener, b"".join(sealer.extents([extent(3, b"c" * 800)])))
    assert fourth.payload.obj is third.payload.obj and bytes(second.payload) == kept
    assert first.payload.obj is not second.payload.obj
    assert contents(opener, fourth) == [(3, b"c" * 800)]


def test_other_sessions_other_keys_and_repeated_packets_are_refused() -> None:
    data = stream([[(1, b"a")]])
    for other in (packets.Session(b"t" * 16, SESSION.key), packets.Session(SESSION.id, b"l" * 32)):
        with pytest.raises(TransferCorrupt):
            opened(stream([[(1, b"a")]], other), [])
    sealer = packets.Sealer(SESSION, compress.NONE)
    first = b"".join(sealer.manifest(b"x"))
    for again in (
        first + first,
        b"".join(sealer.extents([extent(1, b"a")])),
        b"GET / HTTP/1.0\r\n" * 20,
        b"\0" * 200,
    ):
        with pytest.raises(TransferCorrupt):
            opened(again, [])
    assert opened(data[:-1], [])[1:] == []


def test_sessions_in_text() -> None:
    assert packets.Session.of(SESSION.text) == SESSION
    assert packets.Session.new() != packets.Session.new()
    for wrong in ("", ":", "00:11", "x" * 97, SESSION.text + "00"):
        with pytest.raises(BadArguments):
            packets.Session.of(wrong)


class Liar(packets.Sealer):
    """Has the key, and says more, or less, than it sends."""

    def lie(self, table: bytes, payload: bytes) -> bytes:
        return b"".join(self._seal(packets.EXTENTS, table, payload))


@pytest.mark.parametrize(
    ("table", "payload"),
    [
        (b"x", b""),
        (struct.pack(">QI32s", 0, 10, b""), b"123456789"),
        (struct.pack(">QI32s", 0, 10, b""), b"12345678901"),
        (b"", b"1"),
        (struct.pack(">QI32s", 0, (4 << 20) + 1, b""), bytes((4 << 20) + 1)),
        (bytes(44 * 2000), b""),
    ],
    ids=["half a row", "less", "more", "no row", "too long", "too many"],
)
def test_packets_that_lie_about_their_extents_are_refused(table: bytes, payload: bytes) -> None:
    with pytest.raises(TransferCorrupt):
        opened(Liar(SESSION, compress.NONE).lie(table, payload), [])


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
    samples = [
        Sample("none", 1.0, float("inf")),
        *(Sample(name, ratio, 900e6) for name, ratio in ratios.items()),
    ]
    assert compress.best(samples, rate) == wanted


@pytest.mark.parametrize(
    ("wanted", "unpacks", "expected"),
    [
        ("auto", ("none", "zstd", "lzop"), "zstd"),
        ("auto", ("none", "lzop"), "lzop"),
        ("auto", ("none",), "none"),
        ("auto", (), "none"),
        ("zstd", ("none", "zstd"), "zstd"),
        ("zstd", ("none", "lzop"), "none"),
        ("none", ("none", "zstd"), "none"),
    ],
)
def test_nothing_is_packed_that_cannot_be_unpacked(
    wanted: str, unpacks: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "available", lambda: ["none", "zstd", "lzop"])
    monkeypatch.setattr(
        compress, "pack", lambda name, content: content[: len(content) // {"zstd": 4, "lzop": 2}[name]]
    )
    assert compress.choose(wanted, unpacks, b"text " * 1000, 1000.0) == expected
    with pytest.raises(BadArguments):
        compress.choose("gzip", unpacks, b"text", 0)


def test_slow_compressor_does_not_pay_although_it_is_the_better_one() -> None:
    samples = [Sample("none", 1.0, float("inf")), Sample("zstd", 0.2, 30e6), Sample("lzop", 0.4, 900e6)]
    assert compress.best(samples, 117e6) == "lzop"


@pytest.mark.fault(40, "a manifest that no receiver takes is not sent")
def test_a_manifest_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packets.MOST, packets.MANIFEST, 100)
    sealer = packets.Sealer(packets.Session.new(), "none")
    assert sealer.manifest(b"x" * 100)
    with pytest.raises(TooLarge):
        sealer.manifest(b"x" * 101)
