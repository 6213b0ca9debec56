# SPDX-License-Identifier: Apache-2.0
"""XML-RPC of an oned that listens in a node of the lab."""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
import threading
import xmlrpc.client
from typing import Any, List, Tuple
from xml.etree import ElementTree

from lab import Node
from lab.oned.drivers import Refused
from lab.oned.template import Template, add

_CLONE_NEWNET = 0x40000000


def _connected(pid: int, address: Tuple[str, int]) -> socket.socket:
    """Open a connection from within a process's network; setns moves the thread that calls it alone."""
    made: List[socket.socket] = []
    failed: List[OSError] = []

    def work() -> None:
        try:
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(namespace)
            made.append(socket.create_connection(address, timeout=120))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


class _Connection(http.client.HTTPConnection):
    def __init__(self, pid: int) -> None:
        super().__init__("127.0.0.1", 2633)
        self._pid = pid

    def connect(self) -> None:
        """Connect in the node."""
        self.sock = _connected(self._pid, (self.host, self.port))


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
