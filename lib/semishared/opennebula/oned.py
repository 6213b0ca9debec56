# SPDX-License-Identifier: Apache-2.0
"""Questions to oned over XML-RPC (`one.vm.info` and its like).

The client is our own: xmlrpc.client, with http.client and email, takes 15 ms to load, two thirds of all that
an action with a question loads.
"""

from __future__ import annotations

import os
import re
import socket
from typing import TYPE_CHECKING, Any, TypeVar
from xml.etree import ElementTree

from ..errors import GoneFromOned, OnedUnavailable
from .xml import Datastore, Host, Image, View, Vm, parse

if TYPE_CHECKING:
    from typing import Sequence

URL = r"(https?)://(?:([^@/?#\s]*)@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._\-]+)(?::([0-9]{1,5}))?(/[!-~]*)?\Z"
PIECE = 1 << 16
Kind = TypeVar("Kind", bound=View)


class RpcFailed(Exception):
    """What came is no answer; says why."""


class Endpoint:
    """Where oned listens.

    A question that it does not read, or a silence in its answer, lasts at most `timeout_s`. Each question has
    a connection of its own, in HTTP/1.0: the answer ends with the connection. It holds numbers, texts and
    booleans.
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
        """Return the answer of `method`; raise RpcFailed, OSError."""
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
        # As bytes: Python would treat a text as an internationalised name, by tables that nothing else here
        # needs.
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
    """Return the name or address in an endpoint's URL, '' if it is no URL."""
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
    """Return an answer: up to its Content-Length, as proxies may keep the connection open, else all."""
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
    """Return the Content-Length of a head, -1 without one."""
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
    """Return the value in a <value>, of the kinds that oned answers with; raise RpcFailed."""
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


TIMEOUT_S = 30
NO_EXISTS = 0x0400
"""oned's code for an object that it does not have (include/Request.h)."""


class Oned:
    """oned for the driver's user: session from ONE_AUTH, endpoint from ONE_XMLRPC, as for the CLI.

    Every question raises OnedUnavailable, with oned's reason if there is one.
    """

    def __init__(self) -> None:
        home = os.path.expanduser("~")
        self.endpoint = (
            os.environ.get("ONE_XMLRPC")
            or _first_line(f"{home}/.one/one_endpoint")
            or "http://localhost:2633/RPC2"
        )
        auth = os.environ.get("ONE_AUTH") or f"{home}/.one/one_auth"
        self.key = os.path.join(os.path.dirname(os.path.abspath(auth)), "semishared_key")
        """The key of front-ends (tools/key.py), beside one_auth, which all front-ends of an HA group have."""
        self._session = _first_line(auth)
        if not self._session:
            raise OnedUnavailable(f"no OpenNebula session in {auth}")
        try:
            self._server = Endpoint(self.endpoint, TIMEOUT_S)
        except RpcFailed as e:
            raise OnedUnavailable(f"not an endpoint of oned: {e}: {self.endpoint}") from None

    def vm(self, vm_id: int) -> Vm:
        return Vm.parse(self._ask("one.vm.info", vm_id))

    def image(self, image_id: int) -> Image:
        return Image.parse(self._ask("one.image.info", image_id))

    def datastore(self, datastore_id: int) -> Datastore:
        return Datastore.parse(self._ask("one.datastore.info", datastore_id))

    def datastore_with_secrets(self, datastore_id: int) -> Datastore:
        """Return datastore `datastore_id`, its passwords decrypted, as OpenNebula's own drivers get it."""
        return Datastore.parse(self._call("one.datastore.info", datastore_id, True))

    def cluster(self, cluster_id: int) -> View:
        return View(parse(self._ask("one.cluster.info", cluster_id), "CLUSTER"))

    def require_admin(self) -> None:
        """Raise OnedUnavailable unless this user sees all users' VMs and images (group oneadmin)."""
        user = View(parse(self._call("one.user.info", -1), "USER"))
        if user.number("GID") != 0:
            raise OnedUnavailable(
                f"user {user.text('NAME')} is not of group oneadmin and does not see all VMs"
            )

    def vms(self) -> list[Vm]:
        """Return all VMs that are not DONE."""
        return self._pool(Vm, "vm", -2, -1, -1, -1)

    def vms_of(self, ids: Sequence[int]) -> list[Vm]:
        """Return these VMs in one answer, whole but for all history records before the last.

        A VM that is DONE is among them; one that oned does not know is missing.
        """
        pool = parse(self._call("one.vmpool.infoset", ",".join(map(str, ids)), True), "VM_POOL")
        return [Vm(element) for element in pool.findall("VM")]

    def newest_vm(self, from_id: int) -> int:
        """Return the highest id of VMs, DONE or not, -1 for none from `from_id` on."""
        return max((vm.id for vm in self._pool(Vm, "vm", -2, max(from_id, 0), -1, -2)), default=-1)

    def images(self) -> list[Image]:
        return self._pool(Image, "image", -2, -1, -1)

    def datastores(self) -> list[Datastore]:
        return self._pool(Datastore, "datastore")

    def hosts(self) -> list[Host]:
        return self._pool(Host, "host")

    def create_datastore(self, template: str) -> int:
        """Make a datastore from its template and return its id."""
        return int(self._answer("one.datastore.allocate", template, -1))

    def update_datastore(self, datastore_id: int, attributes: str) -> None:
        """Add attributes to a datastore's template."""
        self._answer("one.datastore.update", datastore_id, attributes, 1)

    def update_vm(self, vm_id: int, attributes: str) -> None:
        """Set attributes of a VM's user template; the others stay, also those that a user saves meanwhile.

        oned merges in one step, in each state of the VM, while a driver works on it too (SEMISHARED = [ ]
        removes one: VirtualMachine::append_template, Template::merge).
        """
        self._answer("one.vm.update", vm_id, attributes, 1)

    def update_image(self, image_id: int, attributes: str) -> None:
        """Set attributes of an image's template, the others stay; `NAME = [ ]` removes one."""
        self._answer("one.image.update", image_id, attributes, 1)

    def reschedule(self, vm_id: int) -> None:
        """Have the scheduler find another host for a VM."""
        self.act(vm_id, "resched")

    def act(self, vm_id: int, action: str) -> None:
        """Have oned begin an action on a VM (one.vm.action)."""
        self._answer("one.vm.action", action, vm_id)

    def deploy(self, vm_id: int, host_id: int, datastore_id: int) -> None:
        """Have oned begin to deploy a VM on a host, if that has room, in a system datastore."""
        self._answer("one.vm.deploy", vm_id, host_id, True, datastore_id)

    def vm_groups(self) -> list[View]:
        return self._pool(View, "vm_group", -2, -1, -1)

    def documents(self, type: int) -> list[View]:  # noqa: A002 - OpenNebula's word
        """Return all documents of a type (100: services of OneFlow)."""
        return self._pool(View, "document", -2, -1, -1, type)

    def create_document(self, template: str, type: int) -> int:  # noqa: A002 - OpenNebula's word
        """Make a document and return its id."""
        return int(self._answer("one.document.allocate", template, type))

    def update_document(self, document_id: int, attributes: str) -> None:
        """Set attributes of a document, the others stay."""
        self._answer("one.document.update", document_id, attributes, 1)

    def front_ends(self) -> list[list[str]]:
        """Return the front-ends' addresses of each zone, none for one without HA."""
        zones = [zone.all("SERVER_POOL/SERVER") for zone in self._pool(View, "zone")]
        found = ((address_of(server.text("ENDPOINT")) for server in zone) for zone in zones)
        return [[address for address in zone if address] for zone in found]

    def hooks(self) -> list[View]:
        return self._pool(View, "hook", -2, -1, -1)

    def version(self) -> str:
        return str(self._answer("one.system.version"))

    def _pool(self, kind: type[Kind], name: str, *arguments: int) -> list[Kind]:
        pool = parse(self._call(f"one.{name.replace('_', '')}pool.info", *arguments), f"{name}_pool".upper())
        return [kind(element) for element in pool.findall(name.upper())]

    def _ask(self, method: str, object_id: int) -> bytes:
        return self._call(method, object_id)

    def _call(self, method: str, *arguments: int | str) -> bytes:
        answer = self._answer(method, *arguments)
        if not isinstance(answer, str):
            raise OnedUnavailable(f"{method}: answer not understood")
        return answer.encode("utf-8", "surrogatepass")

    def _answer(self, method: str, *arguments: int | str) -> int | str:
        what = " ".join([method, *(str(word) for word in arguments if isinstance(word, int))])
        try:
            answer = self._server.ask(method, self._session, *arguments)
        except (OSError, RpcFailed) as e:
            raise OnedUnavailable(f"oned does not answer {what}: {e} ({self.endpoint})") from None
        if not isinstance(answer, list) or len(answer) < 2 or not isinstance(answer[1], (str, int)):
            raise OnedUnavailable(f"{what}: answer not understood")
        if answer[0] is not True:
            raise (GoneFromOned if answer[2:3] == [NO_EXISTS] else OnedUnavailable)(f"{what}: {answer[1]}")
        return answer[1]


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return ""
