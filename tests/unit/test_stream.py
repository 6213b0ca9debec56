# SPDX-License-Identifier: Apache-2.0
"""Messages between front-end and host, through a real pipe."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any, Callable, Iterator, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import HostFailed, TooLarge
from semishared.wire import messages as messages_module
from semishared.wire.messages import LONGEST_GREETING, LONGEST_LINE, Reader, Silence, Writer


class Pipe:
    """A socket pair: `say` raw bytes or write messages at one end, read messages at the other."""

    def __init__(self) -> None:
        self.left, self.right = socket.socketpair()
        self.writer, self.reader = Writer(self.left.fileno()), Reader(self.right.fileno())

    def say(self, data: bytes, *, end: bool = True) -> None:
        def speak() -> None:
            try:
                self.left.sendall(data)
                if end:
                    self.left.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # the test has seen enough and closed

        threading.Thread(target=speak, daemon=True).start()

    def say_all(self, speak: Callable[[], object]) -> None:
        """Let the writer say more than the pipe holds."""
        threading.Thread(target=speak, daemon=True).start()

    def close(self) -> None:
        self.left.close()
        self.right.close()


@pytest.fixture()
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


messages = st.lists(
    st.one_of(
        st.binary(max_size=300),
        st.dictionaries(st.text(max_size=5).filter(lambda key: key != "data"), st.text(max_size=20)),
    ),
    max_size=8,
)


@given(messages)
def test_messages_arrive_as_they_were_sent(sent: list[Union[bytes, dict[str, str]]]) -> None:
    pipe = Pipe()
    for message in sent:
        if isinstance(message, bytes):
            pipe.writer.send_data(message)
        else:
            pipe.writer.send(**message)
    pipe.left.shutdown(socket.SHUT_WR)
    assert [pipe.reader.read(60) for _ in sent] == sent
    assert pipe.reader.read(60) is None
    pipe.close()


def test_a_chunk_of_four_mebibytes_arrives_through_a_small_pipe(pipe: Pipe) -> None:
    data = os.urandom(1 << 20) * 4
    threading.Thread(target=pipe.writer.send_data, args=[data], daemon=True).start()
    assert pipe.reader.read(10) == data


@given(messages, st.integers(1, 90), st.booleans())
def test_data_is_written_where_it_belongs_and_nothing_else_is(
    sent: list[Union[bytes, dict[str, str]]], size: int, is_slow: bool
) -> None:
    pipe = Pipe()
    place, found, expected = (
        bytearray(100),
        bytearray(),
        b"".join(item for item in sent if isinstance(item, bytes)),
    )
    if not is_slow:
        for message in sent:
            pipe.writer.send_data(message) if isinstance(message, bytes) else pipe.writer.send(**message)
    heard: list[object] = []
    for message in sent:
        if is_slow:
            pipe.writer.send_data(message) if isinstance(message, bytes) else pipe.writer.send(**message)
        due = len(found) + len(message)
        while True:
            part = pipe.reader.read_into(lambda: memoryview(place)[:size], 5)
            if not isinstance(part, memoryview):
                heard.append(part)
                break
            assert part.obj is place and len(part) <= size
            found += part
            if len(found) == due:
                break
    assert bytes(found) == expected and heard == [item for item in sent if isinstance(item, dict)]
    pipe.left.shutdown(socket.SHUT_WR)
    assert pipe.reader.read_into(lambda: memoryview(place), 5) is None and pipe.reader.read(5) is None
    pipe.close()


def test_data_that_ends_early_or_does_not_come_is_said(pipe: Pipe) -> None:
    place = bytearray(10)
    pipe.say(b'{"data": 8}\nabc', end=False)
    found = b""
    while len(found) < 3:
        part = pipe.reader.read_into(lambda: memoryview(place), 5)
        assert isinstance(part, memoryview)
        found += part
    with pytest.raises(Silence):
        pipe.reader.read_into(lambda: memoryview(place), 0.01)
    pipe.left.shutdown(socket.SHUT_WR)
    with pytest.raises(HostFailed, match="within a chunk"):
        pipe.reader.read_into(lambda: memoryview(place), 5)


def test_messages_in_crumbs_arrive(pipe: Pipe) -> None:
    def speak() -> None:
        for byte in b'{"a": 1}\n{"data": 3}\nxyz{"b": 2}\n':
            pipe.left.sendall(bytes([byte]))

    threading.Thread(target=speak, daemon=True).start()
    assert [pipe.reader.read(60) for _ in range(3)] == [{"a": 1}, b"xyz", {"b": 2}]


@pytest.mark.parametrize(
    "said",
    [
        b"Welcome to host h1!\n",
        b"\n",
        b"[1]\n",
        b"3\n",
        b'"x"\n',
        b"null\n",
        b"\xff\xfe\n",
        b'{"event": "do',
        b"{",
        b"[" * 100000 + b"\n",
        b'{"data": -1}\n',
        b'{"data": 1.5}\n',
        b'{"data": "3"}\n',
        b'{"data": null}\n',
        b'{"data": 99999999999}\n',
        b'{"data": 5}\nabc',
        b'{"data": 4194305}\n',
        b"x" * (LONGEST_LINE + 10),
    ],
    ids=lambda said: repr(said[:20]),
)
def test_what_is_no_message_is_a_failed_host(pipe: Pipe, said: bytes) -> None:
    pipe.say(said)
    with pytest.raises(HostFailed):
        pipe.reader.read(60)


@pytest.mark.fault(
    50,
    "a login shell that greets is passed over, with or without a last newline, however our first line begins",
)
@pytest.mark.parametrize(
    "greeting",
    [b"Welcome to host h1!\n", b"one\n\n{}\n[1]\n\xff\n", b"without an end", b"x" * 60_000 + b"\n"],
)
@pytest.mark.parametrize(
    "first", [b'{"event": "done"}\n', b'{"data": 3}\nabc', b'{"piece": 7, "more": false}\n{"a":1}']
)
def test_what_a_login_shell_says_is_passed_over(greeting: bytes, first: bytes) -> None:
    pipe = Pipe()
    reader = Reader(pipe.right.fileno(), greets=True)
    pipe.say(greeting + first)
    assert reader.read(20) in ({"event": "done"}, b"abc", {"a": 1})
    assert bytes(reader.greeting).replace(b"\n", b"") == greeting.replace(b"\n", b"")
    assert reader.read(20) is None
    pipe.close()


def test_an_endless_greeting_is_given_up_and_a_host_that_only_greets_ends() -> None:
    for said, error in ((b"x\n" * (LONGEST_GREETING + 10), True), (b"Welcome\nfriend", False)):
        pipe = Pipe()
        reader = Reader(pipe.right.fileno(), greets=True)
        pipe.say(said)
        if error:
            with pytest.raises(HostFailed, match="login shell"):
                reader.read(20)
        else:
            assert reader.read(20) is None and reader.greeting == b"Welcomefriend"
        pipe.close()


def test_after_its_first_line_a_host_does_not_greet() -> None:
    pipe = Pipe()
    reader = Reader(pipe.right.fileno(), greets=True)
    pipe.say(b'hi\n{"event": "alive"}\nhi\n')
    assert reader.read(20) == {"event": "alive"}
    with pytest.raises(HostFailed):
        reader.read(20)
    pipe.close()


@pytest.mark.fault(
    40,
    "a list of 12,000 images, 2,000 VMs, 100,000 extents arrives, with names of 255 and paths of 4,096 bytes",
)
@pytest.mark.parametrize(
    "row",
    [
        ({"name": "i" * 255, "source": "s" * 255}, 12_000),
        ({"vm": 7, "disks": [{"path": "/" + "p" * 4095}] * 4}, 2000),
        ([4096, 8192, "a" * 64], 100_000),
    ],
    ids=["images", "VMs", "extents"],
)
def test_long_lists_travel(pipe: Pipe, row: tuple[object, int]) -> None:
    rows = [row[0]] * row[1]
    pipe.say_all(
        lambda: (
            pipe.writer.send(results=rows),
            pipe.writer.send_data(b"abc"),
            pipe.writer.send(event="alive"),
        )
    )
    place = bytearray(10)
    assert pipe.reader.read_into(lambda: memoryview(place), 60) == {"results": rows}
    assert [pipe.reader.read(60) for _ in range(2)] == [b"abc", {"event": "alive"}]


@pytest.mark.fault(
    40, "a message that its reader would not take is refused by who writes it, before a byte of it"
)
def test_what_would_not_be_read_is_not_written(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "LONGEST_MESSAGE", 5 << 20)
    with pytest.raises(TooLarge):
        pipe.writer.send(text="x" * (5 << 20))
    pipe.say_all(lambda: pipe.writer.send(text="x" * ((5 << 20) - 12)))
    message = pipe.reader.read(60)
    assert isinstance(message, dict) and len(str(message["text"])) == (5 << 20) - 12


def test_more_pieces_than_a_message_may_have_are_given_up(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "LONGEST_MESSAGE", 100_000)
    pipe.say(
        b'{"piece": 60000, "more": true}\n'
        + b"x" * 60_000
        + b'{"piece": 60000, "more": true}\n'
        + b"x" * 60_000
    )
    with pytest.raises(HostFailed, match="too long"):
        pipe.reader.read(20)


@pytest.mark.fault(41, "what has come is copied twice at most, however many lines it is")
def test_short_lines_are_not_copied_again_and_again(pipe: Pipe) -> None:
    lines = 20_000

    class Counted(bytearray):
        copied = 0

        def partition(self, *words: Any) -> Any:
            type(self).copied += len(self)
            return super().partition(*words)

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            type(self).copied += len(found) if isinstance(at, slice) else 0
            return found

    pipe.reader._buffer = Counted(b'{"a": 1}\n' * lines)
    for _ in range(lines):
        if not isinstance(pipe.reader._buffer, Counted):
            pipe.reader._buffer = Counted(pipe.reader._buffer)
        assert pipe.reader.read(20) == {"a": 1}
    assert Counted.copied <= 2 * len(b'{"a": 1}\n') * lines


def test_an_endless_line_is_given_up_before_memory_is(pipe: Pipe) -> None:
    def speak() -> None:
        try:
            while True:
                pipe.left.sendall(b"x" * 65536)
        except OSError:
            pass

    threading.Thread(target=speak, daemon=True).start()
    with pytest.raises(HostFailed, match="too long"):
        pipe.reader.read(20)


@given(st.binary(max_size=60), st.booleans())
def test_any_bytes_are_messages_then_an_end_or_a_failed_host(said: bytes, after_a_message: bool) -> None:
    pipe = Pipe()
    pipe.say((b'{"data": 2}\nab' if after_a_message else b"") + said)
    try:
        while pipe.reader.read(60) is not None:
            pass
    except HostFailed:
        pass
    pipe.close()


@pytest.mark.parametrize("said", [b"", b'{"ev', b'{"data": 100}\nabc'])
def test_silence_is_noticed_wherever_it_begins(pipe: Pipe, said: bytes) -> None:
    pipe.say(said, end=False)
    start = time.monotonic()
    with pytest.raises(Silence):
        pipe.reader.read(0.05)
    assert time.monotonic() - start < 30


def test_messages_of_two_threads_do_not_mix(pipe: Pipe) -> None:
    def speak(letter: bytes) -> None:
        for _ in range(50):
            pipe.writer.send_data(letter * 5000)
            pipe.writer.send(said=letter.decode())

    threads = [threading.Thread(target=speak, args=[letter], daemon=True) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    found = [pipe.reader.read(60) for _ in range(300)]
    for letter in "abc":
        assert found.count(letter.encode() * 5000) == 50
        assert found.count({"said": letter}) == 50


def test_writer_that_has_ended_writes_into_no_other_file(pipe: Pipe) -> None:
    number = pipe.left.fileno()
    pipe.writer.end()
    other, seen = socket.socketpair()
    os.dup2(other.fileno(), number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        pipe.writer.send(skip="h1")
    seen.setblocking(False)
    with pytest.raises(BlockingIOError):
        seen.recv(1)
