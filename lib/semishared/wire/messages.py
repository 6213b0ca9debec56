# SPDX-License-Identifier: Apache-2.0
"""Messages between front-end and host: JSON lines, and bytes announced by one ({"data": N}, then N bytes).

A JSON object that is longer than a line may be comes in pieces: {"piece": N, "more": true or false}, then N
bytes of its text, and again.

Every plan contains RELEASE, and a host with another release refuses it (HostOutdated). Only the package
defines the meaning of steps and answers, so both ends must have the same package.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Callable, Optional, Union

from .. import VERSION
from ..errors import HostFailed, TooLarge
from ..tools import run

BUILD = "BUILD"
"""File in an installed package: the hash of its other files, which tells builds of one VERSION apart."""
Message = Union[dict[str, object], bytes, None]
"""A JSON object, a chunk of data, or None at the end of the stream."""
Part = Union[dict[str, object], memoryview, None]
"""The same where `read_into` places data: the part of a chunk that has arrived."""
LONGEST_LINE = 4 << 20
"""Most bytes of a line, of a chunk of data, and of a piece of a longer message."""
LONGEST_MESSAGE = 64 << 20
"""Most bytes of a JSON object: those of 100,000 images or VMs."""
LONGEST_GREETING = 64 << 10
"""Most bytes of a login shell's output before the host side starts."""
OURS = (b'{"event": ', b'{"data": ', b'{"piece": ')
"""The beginning of a host side's first line, in every version."""
MUCH, LITTLE = 1 << 20, 4096
"""Bytes of one read; little for `read_into`, which copies the data that arrives with a line."""


def release(package: str) -> str:
    """Return the release of the package in a directory: its VERSION, and its build if it is installed."""
    try:
        with open(f"{package}/{BUILD}", encoding="ascii") as file:
            return f"{VERSION}+{file.read(64).strip()}"
    except FileNotFoundError:
        return VERSION  # a checkout, which starts its own host side


RELEASE = release(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Read at import: an installation may replace the package while this process runs."""


class Silence(Exception):
    """The other side said nothing for too long."""


class Reader:
    """Reads messages from a file descriptor."""

    def __init__(self, fd: int, greets: bool = False) -> None:
        self._fd = fd
        self._greets = greets
        """Whether ssh's login shell may write first: an `echo` in .bashrc or ~/.ssh/rc."""
        self.greeting = bytearray()
        """The output of the login shell."""
        self._buffer = bytearray()
        self._pieces = bytearray()
        self._is_piece = self._has_more = False
        self._awaited = -1
        """Size of the announced chunk, -1 for none; the next read continues an interrupted one."""

    def _wait(self, deadline: float | None) -> None:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not run.wait_to_read(self._fd, left):
                raise Silence

    def _fill(self, deadline: float | None, most: int) -> bool:
        self._wait(deadline)
        chunk = os.read(self._fd, most)
        self._buffer += chunk
        return bool(chunk)

    def read(self, timeout_s: float | None = None) -> Message:
        """Return the next message; raise Silence after `timeout_s` seconds, HostFailed if it is garbled."""
        while True:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            if self._awaited < 0:
                message = self._line(deadline, MUCH)
                if self._awaited < 0:
                    return message
            data = self._chunk(deadline)
            if not self._is_piece:
                return data
            self._pieces += data
            if len(self._pieces) > LONGEST_MESSAGE:
                raise HostFailed("a message is too long")
            if not self._has_more:
                text, self._pieces, self._is_piece = self._pieces, bytearray(), False
                return self._parsed(text)

    def read_into(self, room: Callable[[], memoryview], timeout_s: float | None = None) -> Part:
        """As `read`, but write a chunk's data into `room()`; return a view of the part that was written."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._awaited < 0:
            message = self._line(deadline, LITTLE)
            if self._awaited < 0:
                return message
        if self._is_piece:
            whole = self.read(timeout_s)
            assert not isinstance(whole, bytes)
            return whole
        place = room()[: self._awaited]
        count = min(len(place), len(self._buffer))
        if count:
            place[:count] = self._buffer[:count]
            del self._buffer[:count]
        elif place:
            self._wait(deadline)
            count = os.readv(self._fd, [place])
            if not count:
                raise HostFailed("the stream ended within a chunk of data")
        self._awaited = self._awaited - count or -1
        return place[:count]

    def _line(self, deadline: float | None, most: int) -> dict[str, object] | None:
        """Return the next JSON object, None at the end of the stream; record the size of announced data."""
        line = self._raw_line(deadline, most)
        while line is not None and self._greets:
            at = min((line.find(ours) for ours in OURS if ours in line), default=-1)
            self.greeting += line if at < 0 else line[:at]
            if len(self.greeting) > LONGEST_GREETING:
                raise HostFailed(f"the login shell there writes to stdout: {bytes(self.greeting[:200])!r}")
            self._greets = at < 0
            line = self._raw_line(deadline, most) if self._greets else line[at:]
        if line is None:
            return None
        message = self._parsed(line)
        if "data" in message or "piece" in message:
            self._is_piece = "piece" in message
            size, self._has_more = message["piece" if self._is_piece else "data"], message.get("more") is True
            if type(size) is not int or not 0 <= size <= LONGEST_LINE:
                raise HostFailed("a chunk of data has no sensible size")
            self._awaited = size
        return message

    def _raw_line(self, deadline: float | None, most: int) -> bytes | None:
        seen = 0
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if seen > LONGEST_LINE:
                raise HostFailed("a message is too long")
            if not self._fill(deadline, most):
                if self._buffer and not self._greets:
                    raise HostFailed(f"not a message: {bytes(self._buffer[:200])!r}")
                self.greeting += self._buffer[:LONGEST_GREETING]
                return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    @staticmethod
    def _parsed(text: bytes | bytearray) -> dict[str, object]:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise HostFailed(f"not a message: {bytes(text[:200])!r}")
        return message

    def _chunk(self, deadline: float | None) -> bytes:
        size = self._awaited
        while len(self._buffer) < size:
            if not self._fill(deadline, MUCH):
                raise HostFailed("the stream ended within a chunk of data")
        self._awaited = -1
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


class Writer:
    """Writes messages to a file descriptor, from any thread.

    With `wait`, it never blocks: it calls `wait` while the other side reads nothing.
    """

    def __init__(self, fd: int, wait: Optional[Callable[[], None]] = None) -> None:
        self._fd = fd
        self.written = 0
        """Bytes written so far."""
        self._lock = threading.Lock()
        self._wait = wait
        if wait:
            os.set_blocking(fd, False)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.write(self._fd, view)
                self.written += count
                view = view[count:]
            except BlockingIOError:
                if not self._wait:
                    raise
                self._wait()

    def end(self) -> None:
        """Write no more: another file may get the descriptor's number."""
        self._fd = -1

    def send(self, **message: object) -> None:
        """Send a JSON object; raise OSError (EBADF) after `end`, TooLarge before anything is sent."""
        text = json.dumps(message).encode()
        if len(text) > LONGEST_MESSAGE:
            raise TooLarge(f"a message of {len(text)} bytes, and who reads it takes {LONGEST_MESSAGE}")
        with self._lock:
            if len(text) <= LONGEST_LINE:
                self._write(text + b"\n")
                return
            for at in range(0, len(text), LONGEST_LINE):
                piece = memoryview(text)[at : at + LONGEST_LINE]
                more = b"true" if at + len(piece) < len(text) else b"false"
                self._write(b'{"piece": %d, "more": %s}\n' % (len(piece), more))
                self._write(piece)

    def send_data(self, data: bytes | memoryview) -> None:
        """Send a chunk of at most LONGEST_LINE bytes."""
        assert len(data) <= LONGEST_LINE
        with self._lock:
            self._write(b'{"data": %d}\n' % len(data))
            self._write(data)
