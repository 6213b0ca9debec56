# SPDX-License-Identifier: Apache-2.0
"""Messages between front-end and host: JSON lines, and bytes announced by one ({"data": N}, then N bytes).

A JSON object that is longer than a line may be comes in pieces: {"piece": N, "more": true or false}, then N
bytes of its text, and again.

Every plan carries RELEASE, and a host that has another one refuses it (HostOutdated): what steps and answers
mean is agreed on nowhere but in the package itself, so both ends must have the very same.
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
"""File in an installed package: the hash of all others, by which it is known from any other of the same
VERSION.
"""
Message = Union[dict[str, object], bytes, None]
"""A JSON object, a chunk of data, or None at the end of the stream."""
Part = Union[dict[str, object], memoryview, None]
"""The same, where data is read into its place: what has come of a chunk."""
LONGEST_LINE = 4 << 20
"""Bytes of a line, of a chunk of data, and of a piece of what is longer, for who writes it and for who reads
it.
"""
LONGEST_MESSAGE = 64 << 20
"""Bytes of a JSON object, for who writes it and for who reads it: what 100,000 images or VMs take."""
LONGEST_GREETING = 64 << 10
"""Bytes of what a login shell says before our host side is started."""
OURS = (b'{"event": ', b'{"data": ', b'{"piece": ')
"""How the first line of a host side begins, of whichever version."""
MUCH, LITTLE = 1 << 20, 4096
"""Bytes that are read at once; little where data is read into its place: what comes with a line has to be
copied there.
"""


def release(package: str) -> str:
    """Return what the package in that directory is: its VERSION, and its build if it is installed."""
    try:
        with open(f"{package}/{BUILD}", encoding="ascii") as file:
            return f"{VERSION}+{file.read(64).strip()}"
    except FileNotFoundError:
        return VERSION  # a checkout: the host side that it starts is its own


RELEASE = release(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Read with the modules, not when it is asked for: an installation may exchange the package meanwhile."""


class Silence(Exception):
    """Nothing was said for too long."""


class Reader:
    """Read messages from a file descriptor."""

    def __init__(self, fd: int, greets: bool = False) -> None:
        self._fd = fd
        self._greets = greets
        """Whether what comes first may be a login shell's, of ssh: `echo` in .bashrc, or in ~/.ssh/rc."""
        self.greeting = bytearray()
        """What it has said."""
        self._buffer = bytearray()
        self._pieces = bytearray()
        self._is_piece = self._has_more = False
        self._awaited = -1
        """Size of the chunk that was announced, -1 if none was: a read that was given up is gone on with by
        the next.
        """

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
        """Return the next message; raise Silence after `timeout_s` seconds without one, HostFailed if it is
        garbled.
        """
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
        """As `read`, but what comes of a chunk is written at once where `room` says: return as much of that
        as was written.
        """
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
        """Return the next JSON object, None at the end of the stream; note how much data it announces."""
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
        """Return the next line, None at the end of the stream."""
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
    """Write messages to a file descriptor, from any thread.

    With `wait`, a writer never blocks: it calls that when the other side takes nothing for now.
    """

    def __init__(self, fd: int, wait: Optional[Callable[[], None]] = None) -> None:
        self._fd = fd
        self.written = 0
        """Bytes."""
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
        """Write no more: what is opened next may have the same number."""
        self._fd = -1

    def send(self, **message: object) -> None:
        """Send a JSON object; OSError (EBADF) after `end`, TooLarge before anything is sent."""
        text = json.dumps(message).encode()
        if len(text) > LONGEST_MESSAGE:
            raise TooLarge(f"a message of {len(text)} bytes, and who reads it takes {LONGEST_MESSAGE}")
        with self._lock:
            if len(text) <= LONGEST_LINE:
                self._write(text + b"\n")
                return
            for at in range(0, len(text), LONGEST_LINE):
                piece = memoryview(text)[at : at + LONGEST_LINE]
                self._write(
                    b'{"piece": %d, "more": %s}\n'
                    % (len(piece), b"true" if at + len(piece) < len(text) else b"false")
                )
                self._write(piece)

    def send_data(self, data: bytes | memoryview) -> None:
        """Send a chunk of at most LONGEST_LINE bytes."""
        assert len(data) <= LONGEST_LINE
        with self._lock:
            self._write(b'{"data": %d}\n' % len(data))
            self._write(data)
