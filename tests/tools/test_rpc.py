# SPDX-License-Identifier: Apache-2.0
"""Questions to oned, against the library's server of XML-RPC and against servers that answer wrongly, all by
real sockets.
"""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable, Iterator, List
from xmlrpc.server import SimpleXMLRPCRequestHandler, SimpleXMLRPCServer

import pytest

from semishared.opennebula import oned
from semishared.opennebula.oned import Endpoint, RpcFailed

WORDS = [
    "",
    "plain",
    "<VM><NAME>a &amp; b</NAME></VM>",
    "]]> & < > \" '",
    "ümläut \U0001f600",
    "two\nlines\tand more",
    "x" * 300_000,
]


class Handler(SimpleXMLRPCRequestHandler):
    """Keeps what it was sent beside the question."""

    rpc_paths = ("/RPC2", "/else")
    seen: List[str] = []

    def do_POST(self) -> None:
        """Answer."""
        self.seen.append(f"{self.path} {self.headers.get('Authorization')}")
        super().do_POST()


class Server(SimpleXMLRPCServer):
    """Of HTTPS, once there is a context."""

    context: ssl.SSLContext | None = None

    def get_request(self):
        """Take a connection."""
        connection, address = super().get_request()
        return (
            self.context.wrap_socket(connection, server_side=True) if self.context else connection
        ), address

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that does not trust us has gone."""


@pytest.fixture()
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler, logRequests=False) as server:
        server.register_function(lambda *words: [True, *words], "echo")
        server.register_function(lambda: [1, [2, "three", [False]], ""], "nested")
        server.register_function(lambda: {"a": 1}, "other")
        Handler.seen.clear()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def at(server: Server, before: str = "http://", after: str = "/RPC2") -> Endpoint:
    return Endpoint(f"{before}127.0.0.1:{server.server_address[1]}{after}", 5)


@pytest.mark.parametrize("word", WORDS, ids=lambda word: word[:10])
def test_words_come_and_go_as_they_are(server: Server, word: str) -> None:
    assert at(server).ask("echo", word, 7, -1, True, False) == [True, word, 7, -1, True, False]


def test_lists_and_paths_and_users(server: Server) -> None:
    assert at(server).ask("nested") == [1, [2, "three", [False]], ""]
    assert at(server, after="").ask("nested") == at(server, after="/else").ask("nested")
    assert at(server, before="http://one%40x:secret@").ask("echo") == [True]
    assert Handler.seen == [
        "/RPC2 None",
        "/RPC2 None",
        "/else None",
        f"/RPC2 Basic {base64.b64encode(b'one@x:secret').decode()}",
    ]


def test_faults_and_kinds_that_oned_has_not(server: Server) -> None:
    with pytest.raises(RpcFailed, match="not supported"):
        at(server).ask("unknown")
    with pytest.raises(RpcFailed, match="<struct>"):
        at(server).ask("other")
    with pytest.raises(RpcFailed, match="404"):
        at(server, after="/nowhere").ask("echo")


def test_https_only_with_a_certificate_that_is_trusted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=oned",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            str(key),
            "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
    )
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(certificate, key)
    with pytest.raises(ssl.SSLCertVerificationError):
        at(server, before="https://").ask("echo")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert at(server, before="https://").ask("echo", "x") == [True, "x"]


@pytest.fixture()
def answering() -> Iterator[Callable[[bytes], Endpoint]]:
    """Return an endpoint whose every question is answered with these bytes, and its connection closed; b''
    for never.
    """
    listeners: List[socket.socket] = []
    kept: List[socket.socket] = []

    def begin(answer: bytes) -> Endpoint:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            if answer:
                connection.sendall(answer)
                connection.close()
            kept.append(connection)

        threading.Thread(target=serve, daemon=True).start()
        return Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}/RPC2", 1)

    yield begin
    for opened in (*listeners, *kept):
        opened.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/xml\r\n"
ANSWER = b"<methodResponse><params><param><value>%s</value></param></params></methodResponse>"


@pytest.mark.parametrize(
    "answer,said",
    [
        (b"garbage", "no answer in HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "no answer in HTTP"),
        (b"HTTP/1.1 500 Internal\r\n\r\n" + ANSWER % b"x", "HTTP/1.1 500 Internal"),
        (OK + b"\r\n", "does not parse"),
        (OK + b"\r\n<methodResponse><params>", "does not parse"),
        (OK + b"Content-Length: 5000\r\n\r\n" + ANSWER % b"x", "cut off"),
        (OK + b"\r\n<html/>", "holds no value"),
        (OK + b"\r\n" + ANSWER % b"<i4>seven</i4>", "<i4> of 'seven'"),
        (OK + b"\r\n" + ANSWER % b"<boolean>2</boolean>", "<boolean> of '2'"),
        (OK + b"\r\n" + ANSWER % b"<double>1.5</double>", "<double>"),
        (
            OK + b"\r\n" + ANSWER.replace(b"?>", b'encoding="odd"?>') % b"<string>\xff</string>",
            "does not parse",
        ),
    ],
)
def test_what_is_no_answer_is_refused(
    answering: Callable[[bytes], Endpoint], answer: bytes, said: str
) -> None:
    with pytest.raises(RpcFailed, match=said):
        answering(answer).ask("one.vm.info", "oneadmin:secret", 7)


def test_an_answer_without_its_length_ends_with_the_connection(
    answering: Callable[[bytes], Endpoint],
) -> None:
    assert answering(OK + b"\r\n" + ANSWER % b"<i8>-7</i8>").ask("x") == -7
    assert answering(OK + b"\r\n" + ANSWER % b"untyped").ask("x") == "untyped"


def test_silence_has_an_end(answering: Callable[[bytes], Endpoint]) -> None:
    with pytest.raises(TimeoutError):
        answering(b"").ask("x")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:2633",
        "ftp://h/RPC2",
        "http://",
        "http://h:port/",
        "http://h h/",
        "http://h/a b",
        "http://h/a\r\nX: y",
        "http://\u00fc/",
        "http://127.0.0.1:99999/",
    ],
)
def test_an_endpoint_that_is_none(url: str) -> None:
    with pytest.raises(RpcFailed):
        Endpoint(url, 1).ask("x")


def test_a_whole_answer_is_not_waited_for_any_longer() -> None:
    """Not all that stands before oned ends a connection when it has answered."""
    body = ANSWER % b"<string>there</string>"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                for piece in (OK, b"Content-Length: %d\r\n\r\n" % len(body), body[:7], body[7:]):
                    connection.sendall(piece)
                done.wait(30)

        done = threading.Event()
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/RPC2", 5).ask("x") == "there"
        finally:
            done.set()
            thread.join()


def test_what_a_long_answer_costs_grows_as_it_does() -> None:
    """Of many thousand VMs, without its length: each piece was looked for the end of the head in all that had
    come before it.
    """

    class Connection:
        pieces = [b"x" * 4096] * 3000 + [b"\n" + b"x" * 4096, b"\r\n\r", OK[:-1]]

        def recv(self, size: int) -> bytes:
            return self.pieces.pop() if self.pieces else b""

    began = time.process_time()
    said = oned._received(Connection())  # type: ignore[arg-type]
    assert len(said) > 3001 * 4096 and time.process_time() - began < 2
