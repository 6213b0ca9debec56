# SPDX-License-Identifier: Apache-2.0
"""Bases by a TCP connection beside ssh: only where both ends trust the network, to who has the key, and else
as ever.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import List

import pytest

from semishared.config import PATH, Config
from semishared.errors import HostUnreachable, MissingImage
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.stage import clear_tcp, peers
from semishared.stage.ensure import ensure
from semishared.stage.partial import Partial
from semishared.stage.peers import Incoming
from semishared.tools import extents
from semishared.wire import packets, session
from tools.world import MiB, World

TRUSTING = Config(staging_trusted_network="yes")


@pytest.fixture()
def image(world: World) -> s.ImageRef:
    """An image with 16 MiB of data in pieces, staged here."""
    found = world.image(size=64 * MiB)
    with open(found.source, "r+b") as file:
        for at in (5, 41):
            file.seek(at * MiB)
            file.write(os.urandom(8 * MiB))
    return found._replace(generation=ensure(str(world.root), found, None).base.generation)


@pytest.fixture()
def connected(monkeypatch: pytest.MonkeyPatch) -> List[bool]:
    """For each time that a sender has offered a connection: whether it was taken."""
    found: List[bool] = []
    connect = clear_tcp.Source._connect

    def _connect(source: clear_tcp.Source, port: object) -> None:
        connect(source, port)
        found.append(source._connection is not None)

    monkeypatch.setattr(clear_tcp.Source, "_connect", _connect)
    monkeypatch.setattr(clear_tcp, "CONNECT_S", 30.0)
    return found


@pytest.fixture()
def trusting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other end have a configuration that trusts the network."""
    there = tmp_path / "there"
    shutil.copytree(Path(session.HERE).parent, there / "lib" / "semishared")
    # Which of both ways is taken is not to depend on how busy this machine is.
    source = there / "lib" / "semishared" / "stage" / "clear_tcp.py"
    patient = (
        source.read_text()
        .replace("LISTEN_S = 4.0", "LISTEN_S = 15.0")
        .replace("SAYS_S = 1.0", "SAYS_S = 30.0")
    )
    assert "= 15.0" in patient and "= 30.0" in patient
    source.write_text(patient)
    monkeypatch.setattr(peers, "STALL_S", 60.0)
    (there / "etc").mkdir()
    said = Path(PATH).read_text(encoding="utf-8").replace("trusted_network = no", "trusted_network = yes")
    assert "trusted_network = yes" in said
    (there / "etc" / "semishared.conf").write_text(said)
    monkeypatch.setattr(session, "HERE", str(there / "lib" / "semishared" / "hostside.py"))


def fetch(world: World, image: s.ImageRef, target: Partial, config: Config, generation: str = "") -> int:
    name = f"100-7-{generation or image.generation}"
    packed: List[int] = []
    step = base_steps.ServeBase(str(world.root), name, (), packets.Session.new().text, "none", 0)
    peers.fetch("localhost", step, target, config, lambda _, size: packed.append(size), lambda host: False)
    return sum(packed)


def whole(target: Partial) -> bool:
    target.finish()
    return extents.copy(f"{target.directory}/image", None, "raw", "test") == target.manifest


def test_base_comes_beside_ssh_where_both_trust_the_network(
    world: World, image: s.ImageRef, tmp_path: Path, trusting: None, connected: List[bool]
) -> None:
    target = Partial(str(tmp_path / "other"), image)
    assert fetch(world, image, target, TRUSTING) >= 16 * MiB
    assert connected == [True] and whole(target)


def test_nothing_goes_in_clear_where_one_of_both_does_not_trust_it(
    world: World, image: s.ImageRef, tmp_path: Path, connected: List[bool], request: pytest.FixtureRequest
) -> None:
    target = Partial(str(tmp_path / "one"), image)
    fetch(world, image, target, TRUSTING)
    assert whole(target)
    request.getfixturevalue("trusting")
    target = Partial(str(tmp_path / "other"), image)
    fetch(world, image, target, Config())
    assert whole(target) and connected == [], "nobody offered"


def test_base_comes_over_ssh_where_the_connection_cannot_be_made(
    world: World,
    image: s.ImageRef,
    tmp_path: Path,
    trusting: None,
    connected: List[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refused)
    target = Partial(str(tmp_path / "other"), image)
    fetch(world, image, target, TRUSTING)
    assert connected == [False] and whole(target)


def test_what_is_wrong_at_the_peer_is_said_over_ssh(
    world: World, image: s.ImageRef, tmp_path: Path, trusting: None, connected: List[bool]
) -> None:
    wrong = image._replace(generation="0" * 32)
    with pytest.raises(MissingImage):
        fetch(world, image, Partial(str(tmp_path / "other"), wrong), TRUSTING, wrong.generation)
    assert connected == [True]


def test_who_has_not_the_key_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_tcp, "LISTEN_S", 60.0)
    keys, other = packets.Session.new(), packets.Session.new()
    ports: List[int] = []
    got: List[bytes] = []

    def come(port: int) -> None:
        for said in (b"", b"x" * 10, clear_tcp.proof(other), clear_tcp.proof(keys)):
            with socket.create_connection(("localhost", port), 30) as connection:
                connection.sendall(said)
                connection.settimeout(30)
                try:
                    got.append(connection.recv(100))
                except ConnectionResetError:
                    got.append(b"")

    def told(event: str, port: int) -> None:
        assert event == "listening"
        ports.append(port)
        threading.Thread(target=come, args=[port], daemon=True).start()

    with clear_tcp.offered(keys, told, lambda data: None) as write:
        write(b"for the last one")
    deadline = time.monotonic() + 60
    while len(got) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert got == [b"", b"", b"", b"for the last one"]
    with pytest.raises(OSError):
        socket.create_connection(("localhost", ports[0]), 1)


def test_sender_to_whom_nobody_comes_goes_on_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clear_tcp, "LISTEN_S", 0.1)
    sent: List[object] = []
    with clear_tcp.offered(packets.Session.new(), lambda **_: None, sent.append) as write:
        write(b"over ssh")
    assert sent == [b"over ssh"]


class Peer:
    """A session that offers a connection to where nobody is let in, and has more to say after that."""

    host, address = "localhost", ""

    def __init__(self) -> None:
        self.server = socket.create_server(("", 0))
        self.said: List[object] = [
            {"event": "done"},
            {"event": "listening", "port": self.server.getsockname()[1]},
        ]

    def read_into(self, room: object, within_s: float) -> object:
        return self.said.pop()


def test_a_connection_that_is_reset_is_one_that_was_not_made() -> None:
    """As of a receiver that waits to be let in when its sender has listened long enough: four others before
    it can do that.
    """
    peer, keys = Peer(), packets.Session.new()
    source = clear_tcp.Source(peer, keys)  # type: ignore[arg-type]
    buffer = memoryview(bytearray(100))
    assert source.read_into(lambda: buffer, 1) is None and source._connection
    peer.server.close()
    assert source.read_into(lambda: buffer, 5) is None and source._connection is None
    assert source.read_into(lambda: buffer, 1) == {"event": "done"}, "what there is to be said comes over ssh"


def test_what_is_wrong_with_a_source_is_nothing_that_ends_the_plan() -> None:
    class Broken:
        host = "h1"

        def read_into(self, room: object, within_s: float) -> object:
            raise ConnectionResetError(104, "Connection reset by peer")

        def close(self) -> None:
            pass

    opener = packets.Opener(packets.Session.new())
    with pytest.raises(HostUnreachable, match="h1.*reset"), Incoming(Broken(), opener) as incoming:  # type: ignore[arg-type]
        incoming.next(5)
