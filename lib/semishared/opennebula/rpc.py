# SPDX-License-Identifier: Apache-2.0
"""XML-RPC as far as oned's questions need it: a call with numbers, words and truths, and an answer of the
same.

The library's own, with http.client and what that needs of email, is two thirds of what an action that asks
would load: 15 ms. Each question has a connection of its own, in HTTP/1.0, whose answer ends where the
connection does.
"""

from __future__ import annotations

import re
import socket
from typing import Any
from xml.etree import ElementTree

URL = r"(https?)://(?:([^@/?#\s]*)@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::([0-9]{1,5}))?(/[!-~]*)?\Z"
PIECE = 1 << 16


class RpcFailed(Exception):
    """What came is no answer; says why."""


class Endpoint:
    """Where oned listens. A question that it does not read, or a silence in its answer, lasts at most
    `timeout_s`.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        found = re.match(URL, url)
        if not found or int(found.group(4) or 0) > 65535:
            raise RpcFailed("not http://HOST[:PORT][/PATH] or https://")
        scheme, self._user, host, port, self._path = found.groups()
        self._is_https = scheme == "https"
        self._address = host.strip("[]"), int(port or (443 if self._is_https else 80))
        self._host = f"{host}:{port}" if port else host
        self._timeout_s = timeout_s

    def ask(self, method: str, *arguments: object) -> Any:
        """Return what `method` answers; raise RpcFailed, OSError."""
        body = _call(method, arguments)
        lines = [
            f"POST {self._path or '/RPC2'} HTTP/1.0",
            f"Host: {self._host}",
            "Content-Type: text/xml",
            f"Content-Length: {len(body)}",
        ]
        if self._user:
            import base64
            from urllib.parse import unquote_to_bytes

            lines.append(f"Authorization: Basic {base64.b64encode(unquote_to_bytes(self._user)).decode()}")
        head = "\r\n".join([*lines, "", ""]).encode("ascii")
        with self._connected() as connection:
            connection.sendall(head + body)
            return _answered(_received(connection))

    def _connected(self) -> socket.socket:
        name, port = self._address
        # As bytes: of a word Python would make an internationalised name first, by tables that nothing else
        # here needs.
        connection = socket.create_connection((name.encode("ascii"), port), self._timeout_s)  # type: ignore[arg-type] # bytes will do
        if not self._is_https:
            return connection
        import ssl

        try:
            return ssl.create_default_context().wrap_socket(connection, server_hostname=self._address[0])
        except BaseException:
            connection.close()
            raise


def address_of(url: str) -> str:
    """Return the name or address in the URL of an endpoint, '' if it is none."""
    found = re.match(URL, url)
    return found.group(3).strip("[]") if found else ""


def _call(method: str, arguments: tuple[object, ...]) -> bytes:
    values = "".join(f"<param><value>{_typed(argument)}</value></param>" for argument in arguments)
    text = (
        f"<?xml version='1.0' "
        f"encoding='UTF-8'?><methodCall><methodName>{method}</methodName><params>{values}</params></methodCall>"
    )
    return text.encode("utf-8", "surrogateescape")


def _typed(value: object) -> str:
    if isinstance(value, bool):
        return f"<boolean>{value:d}</boolean>"
    if isinstance(value, int):
        return f"<int>{value}</int>"
    return f"<string>{str(value).replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')}</string>"


def _received(connection: socket.socket) -> bytes:
    """Return an answer: as much as it says it is, for not all that stands before oned ends a connection of
    HTTP/1.0, or all there is.
    """
    said, length, has_head = bytearray(), -1, False
    while length < 0 or len(said) < length:
        piece = connection.recv(PIECE)
        if not piece:
            break
        # The end of a head may come in two pieces.
        since = max(len(said) - 3, 0)
        said += piece
        end = -1 if has_head else said.find(b"\r\n\r\n", since)
        if end >= 0:
            has_head, told = True, _told(bytes(said[:end]))
            length = end + 4 + told if told >= 0 else -1
    return bytes(said)


def _told(head: bytes) -> int:
    """Return how many bytes follow a head, as it says; -1 if it does not."""
    for name, _, told in (header.partition(b":") for header in head.split(b"\r\n")):
        if name.lower() == b"content-length" and told.strip().isdigit():
            return int(told)
    return -1


def _answered(said: bytes) -> Any:
    """Return the value in an answer of HTTP; raise RpcFailed."""
    head, found, body = said.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0]
    if not status.startswith(b"HTTP/1.") or not found:
        raise RpcFailed(f"no answer in HTTP, {len(said)} bytes")
    if status.split()[1:2] != [b"200"]:
        raise RpcFailed(status.decode("ascii", "replace"))
    if len(body) < _told(head):
        raise RpcFailed(f"its answer was cut off after {len(body)} of {_told(head)} bytes")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, LookupError, ValueError) as e:
        raise RpcFailed(f"its answer does not parse: {e}") from None
    value = root.find("params/param/value")
    if root.tag == "methodResponse" and value is not None:
        return _value(value)
    raise RpcFailed(
        " ".join(word.strip() for word in root.itertext() if word.strip()) or "its answer holds no value"
    )


def _value(element: ElementTree.Element) -> Any:
    """Return what a <value> holds: of its kinds those that oned answers with; raise RpcFailed."""
    if not len(element):
        return element.text or ""
    kind, text = element[0].tag, element[0].text or ""
    if kind == "array":
        return [_value(value) for value in element[0].findall("data/value")]
    if kind == "string":
        return text
    try:
        if kind in ("int", "i4", "i8"):
            return int(text)
        if kind == "boolean":
            return {"0": False, "1": True}[text.strip()]
    except (ValueError, KeyError):
        pass
    raise RpcFailed(f"<{kind}> of {text[:20]!r} in its answer")
