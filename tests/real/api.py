# SPDX-License-Identifier: Apache-2.0
"""XML-RPC of an oned that listens in a node of the lab."""

from __future__ import annotations

import http.client
import socket
import xmlrpc.client
from typing import Any, List
from xml.etree import ElementTree

from lab import Node
from lab.oned.drivers import Refused
from lab.oned.rpc import inside
from lab.oned.template import Template, add


class _Connection(http.client.HTTPConnection):
    def __init__(self, pid: int) -> None:
        super().__init__("127.0.0.1", 2633)
        self._pid = pid

    def connect(self) -> None:
        """Connect in the node."""
        address = (self.host, self.port)
        self.sock = inside(self._pid, lambda: socket.create_connection(address, timeout=120))


class _Transport(xmlrpc.client.Transport):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        """Return a connection of its own for each call: several threads may ask."""
        return _Connection(self._node.pid)


class Api:
    """Call methods of one oned as its first user."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.session = node.path("/var/lib/one/.one/one_auth").read_text().strip()

    def call(self, method: str, *words: Any) -> Any:
        """Call one.METHOD and return its answer; Refused if oned says no, OSError if it does not listen."""
        server = xmlrpc.client.ServerProxy("http://oned/RPC2", transport=_Transport(self.node))
        done, answer, *_ = getattr(server, f"one.{method}")(self.session, *words)
        if not done:
            raise Refused(str(answer))
        return answer

    def info(self, kind: str, number: int) -> ElementTree.Element:
        """Return one object."""
        return ElementTree.fromstring(self.call(f"{kind}.info", number))

    def pool(self, kind: str, *words: int) -> List[ElementTree.Element]:
        """Return all objects of a kind."""
        return list(ElementTree.fromstring(self.call(f"{kind}pool.info", *words)))


def template_of(element: ElementTree.Element | None) -> Template:
    """Return what a TEMPLATE, USER_TEMPLATE or SNAPSHOTS element holds."""
    found: Template = {}
    for child in element if element is not None else ():
        value = {row.tag: row.text or "" for row in child} if len(child) else child.text or ""
        add(found, child.tag, value)
    return found
