# SPDX-License-Identifier: Apache-2.0
"""Packets over a TCP connection, unencrypted, where `trusted_network = yes` holds at both ends.

    receiver -> sender   over ssh   the step, with the session's id and its secret key
    sender -> receiver   over ssh   {"event": "listening", "port"}
    receiver -> sender   by TCP     a proof that it has the key
    sender -> receiver   by TCP     packets, and the end of the stream; events still go over ssh

The network sees the content, but cannot change it: each packet carries the session's MAC, the manifest lists
the hash of each extent, and the generation is the hash of the manifest. An eavesdropper can send nothing. The
sender accepts one connection, once. If no receiver connects (a firewall), the packets go over ssh.
"""

from __future__ import annotations

import hmac
import socket
import time
from contextlib import contextmanager
from typing import Callable, Iterator

from ..tools import run
from ..tools.compress import Bytes
from ..wire import packets
from ..wire.messages import Part
from ..wire.session import Session

LISTEN_S = 4.0
"""Seconds that the sender waits for its receiver."""
CONNECT_S = 2.0
SAYS_S = 1.0
"""Seconds that a connected peer has to send its proof."""
PROOF = 32


def proof(session: packets.Session) -> bytes:
    """Return the bytes by which a receiver proves that it has the session's key."""
    return hmac.digest(session.key, b"receiver of " + session.id, "sha256")


@contextmanager
def offered(
    session: packets.Session, send: Callable[..., None], otherwise: Callable[[Bytes], None]
) -> Iterator[Callable[[Bytes], None]]:
    """Yield the function that writes to the receiver by TCP; `otherwise` if the receiver does not connect."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual) as server:
        send(event="listening", port=server.getsockname()[1])
        connection = _accepted(server, proof(session))
    if connection is None:
        yield otherwise
        return
    with connection:
        yield connection.sendall


def _accepted(server: socket.socket, expected: bytes) -> socket.socket | None:
    """Return the first connection with the right proof, None after LISTEN_S seconds without one."""
    deadline = time.monotonic() + LISTEN_S
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except OSError:
            continue
        connection.settimeout(SAYS_S)
        try:
            if hmac.compare_digest(connection.recv(PROOF, socket.MSG_WAITALL), expected):
                connection.settimeout(None)
                return connection
        except OSError:
            pass
        connection.close()
    return None


class Source:
    """What a receiver reads from: the TCP connection while it is open, else its ssh session with the peer."""

    def __init__(self, session: Session, keys: packets.Session) -> None:
        self._session, self._keys = session, keys
        self.host = session.host
        self._connection: socket.socket | None = None

    def read_into(self, room: Callable[[], memoryview], within_s: float) -> Part:
        """Read as Session.read_into does; connect when the peer says that it listens."""
        if self._connection is None:
            part = self._session.read_into(room, within_s)
            if isinstance(part, dict) and part.get("event") == "listening":
                self._connect(part.get("port"))
                return None
            return part
        if not run.wait_to_read(self._connection.fileno(), within_s):
            return None
        place = room()
        try:
            count = self._connection.recv_into(place)
        except OSError:
            count = 0  # reset: the sender also resets a connection that it did not accept
        if not count:
            # The answer comes over ssh; so do the packets, if this connection came too late.
            self.close()
            return None
        return place[:count]

    def _connect(self, port: object) -> None:
        if not isinstance(port, int) or not 0 < port < 65536:
            return
        try:
            where = self._session.address or self._session.host
            connection = socket.create_connection((where, port), CONNECT_S)
        except OSError:
            return  # the sender then uses ssh
        try:
            connection.sendall(proof(self._keys))
            connection.settimeout(None)
            self._connection = connection
        except OSError:
            connection.close()

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
