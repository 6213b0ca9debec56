# SPDX-License-Identifier: Apache-2.0
"""The XML-RPC face of the simulated oned."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import xmlrpc.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, List, Optional, Tuple

from .core import Core
from .drivers import Refused
from .template import Template, merge, parse, parse_any, render

_CLONE_NEWNET = 0x40000000
_NO_AUTH, _NO_EXISTS, _API, _INTERNAL, _NO_METHOD = 0x0100, 0x0400, 0x1000, 0x2000, -506


def inside(pid: Optional[int], opened: Callable[[], socket.socket]) -> socket.socket:
    """Open a socket, with a pid inside that process's network namespace."""
    made: List[socket.socket] = []
    failed: List[BaseException] = []

    def work() -> None:
        try:
            if pid is not None:
                namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(namespace)
            made.append(opened())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            failed.append(error)

    # setns moves one thread only, so the socket is made in a thread of its own; it stays usable anywhere.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def listen(address: Tuple[str, int], pid: Optional[int] = None) -> socket.socket:
    """Open a listening socket, with a pid inside that process's network namespace."""
    return inside(pid, lambda: socket.create_server(address, backlog=128))


class Rpc:
    """Serve one.*.info from the pools; runs until closed."""

    def __init__(self, core: Core, pid: Optional[int] = None, port: int = 2633) -> None:
        self.core = core
        self.allocate_datastore: Callable[[str], int] = lambda template: -1
        self.update_datastore: Callable[[int, str], None] = lambda number, attributes: None
        self.update_vm: Callable[[int, Template, bool], None] = core.vm_update
        self.update_image: Callable[[int, Template, bool], None] = lambda number, attributes, append: None
        self.actions: dict[str, Callable[[int], None]] = {}
        """What one.vm.action does, by the name of the action; begun, as oned does it, and gone on with after
        the answer.
        """
        self.deploy: Callable[[int, int, int], None] = lambda vm, host, datastore: None
        """What one.vm.deploy does, begun as an action is."""
        self.documents: List[Tuple[int, str]] = []
        """(type, XML) of the documents that there are: type 100 are services of OneFlow."""
        self.notes: Dict[int, Tuple[int, Template]] = {}
        """(type, template) of the documents that were made by one.document.allocate, by id."""
        self.zones = "<ZONE><ID>0</ID><NAME>OpenNebula</NAME><SERVER_POOL/></ZONE>"
        """The zones, as XML: without servers there is one front-end."""
        self.group = 0
        """The group of who asks."""
        self.vm_groups: List[str] = []
        """VM groups, as XML."""
        self.hooks: List[str] = []
        """Hooks that are registered, as XML."""
        self.requests: List[Tuple[str, Tuple[Any, ...]]] = []
        rpc = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Without this a keep-alive client waits 40 ms for each answer.
            disable_nagle_algorithm = True
            timeout = 300

            def do_POST(self) -> None:  # noqa: N802 - name given by the base class
                size = int(self.headers.get("Content-Length", "0"))
                body = rpc.answer(self.rfile.read(size))
                self.send_response(200)
                self.send_header("Content-Type", "text/xml; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._handler = Handler
        self._servers: Dict[int, Tuple[ThreadingHTTPServer, threading.Thread]] = {}
        """By the first process of the machine where it listens, 0 for this one."""
        self.url = f"http://127.0.0.1:{self.serve(pid, port)}/RPC2"

    def serve(self, pid: Optional[int], port: int = 2633) -> int:
        """Listen on a machine's loopback too, unless it does; return the port."""
        if (pid or 0) not in self._servers:
            listener = listen(("127.0.0.1", port), pid)
            server = ThreadingHTTPServer(("127.0.0.1", port), self._handler, bind_and_activate=False)
            server.daemon_threads = True
            server.socket.close()
            server.socket = listener
            server.server_address = listener.getsockname()
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            self._servers[pid or 0] = server, thread
            thread.start()
        return int(self._servers[pid or 0][0].server_address[1])

    def leave(self, pid: int) -> None:
        """Stop listening on a machine: its network stays as long as a socket in it."""
        if pid in self._servers:
            server, thread = self._servers.pop(pid)
            server.shutdown()
            server.server_close()
            thread.join()

    def close(self) -> None:
        """Stop serving."""
        for pid in list(self._servers):
            self.leave(pid)

    def answer(self, request: bytes) -> bytes:
        """Answer one request body."""
        try:
            parameters, method = xmlrpc.client.loads(request)
        except Exception as error:  # noqa: BLE001 - whatever the parser finds
            return xmlrpc.client.dumps(xmlrpc.client.Fault(-503, str(error)), methodresponse=True).encode()
        self.requests.append((str(method), parameters))
        reply = self._reply(str(method), parameters)
        return xmlrpc.client.dumps((reply,), methodresponse=True).encode()

    def _reply(self, method: str, parameters: Tuple[Any, ...]) -> List[Any]:
        if not parameters or parameters[0] != self.core.settings.session:
            return [False, f"[{method}] User couldn't be authenticated, aborting call.", _NO_AUTH]
        core = self.core
        if method == "one.system.version":
            return [True, core.settings.version, 0]
        if method == "one.datastore.allocate":
            return [True, self.allocate_datastore(str(parameters[1])), 0]
        if method == "one.datastore.update":
            number, attributes, append = parameters[1:]
            if number not in core.datastores or append != 1:
                return [False, f"[{method}] Error getting datastore [{number}].", _NO_EXISTS]
            self.update_datastore(number, attributes)
            return [True, number, 0]
        if method in ("one.vm.update", "one.image.update"):
            return self._updated(method, *parameters[1:4])
        if method == "one.vm.action":
            action, number = parameters[1:]
            if action not in self.actions:
                return [False, f"[{method}] action {action} is not served by the simulated oned", _NO_METHOD]
            if number not in core.vms:
                return [False, f"[{method}] Error getting virtual machine [{number}].", _NO_EXISTS]
            try:
                self.actions[action](number)
            except Refused as e:
                return [False, f"[{method}] {e}", _NO_EXISTS]
            return [True, number, 0]
        if method == "one.vm.deploy":
            number, host, _enforce, datastore = parameters[1:]
            if number not in core.vms:
                return [False, f"[{method}] Error getting virtual machine [{number}].", _NO_EXISTS]
            try:
                self.deploy(number, host, datastore)
            except Refused as e:
                return [False, f"[{method}] {e}", _NO_EXISTS]
            return [True, number, 0]
        if method == "one.vmgrouppool.info":
            return [True, f"<VM_GROUP_POOL>{''.join(self.vm_groups)}</VM_GROUP_POOL>", 0]
        if method == "one.documentpool.info":
            found = "".join(text for kind, text in self.documents if kind == parameters[4])
            for number, (of_type, template) in self.notes.items():
                if of_type == parameters[4]:
                    head = f"<ID>{number}</ID><UID>0</UID><GID>0</GID><NAME>{template['NAME']}</NAME><TYPE>{of_type}</TYPE>"  # noqa: E501
                    rest = render({name: value for name, value in template.items() if name != "NAME"})
                    found += f"<DOCUMENT>{head}<TEMPLATE>{rest}</TEMPLATE></DOCUMENT>"
            return [True, f"<DOCUMENT_POOL>{found}</DOCUMENT_POOL>", 0]
        if method == "one.document.allocate":
            with core.data:
                number = len(self.notes)
                self.notes[number] = (int(parameters[2]), parse(str(parameters[1])))
            return [True, number, 0]
        if method == "one.document.update":
            number, attributes, append = parameters[1:]
            if number not in self.notes or append != 1:
                return [False, f"[{method}] Error getting document [{number}].", _NO_EXISTS]
            merge(self.notes[number][1], parse(str(attributes)))
            return [True, number, 0]
        if method == "one.zonepool.info":
            return [True, f"<ZONE_POOL>{self.zones}</ZONE_POOL>", 0]
        if method == "one.hookpool.info":
            return [True, f"<HOOK_POOL>{''.join(self.hooks)}</HOOK_POOL>", 0]
        if method == "one.cluster.info":
            number = parameters[1]
            if number not in core.clusters:
                return [False, f"[{method}] Error getting cluster [{number}].", _NO_EXISTS]
            rest = render(core.clusters[number])
            name = "default" if number == 0 else f"cluster-{number}"
            text = f"<CLUSTER><ID>{number}</ID><NAME>{name}</NAME><TEMPLATE>{rest}</TEMPLATE></CLUSTER>"
            return [True, text, 0]
        pools: dict[str, tuple[str, Callable[[], Any]]] = {
            "one.vm.info": ("virtual machine", lambda: core.vms),
            "one.image.info": ("image", lambda: core.images),
            "one.datastore.info": ("datastore", lambda: core.datastores),
            "one.host.info": ("host", lambda: core.hosts),
        }
        with core.data:
            if method in pools:
                name, pool = pools[method]
                item = pool().get(parameters[1]) if len(parameters) > 1 else None
                if item is None:
                    which = parameters[1] if len(parameters) > 1 else "?"
                    return [False, f"[{method}] Error getting {name} [{which}].", _NO_EXISTS]
                return [True, item.to_xml(), 0]
            if method == "one.user.info":
                return [True, f"<USER><ID>0</ID><GID>{self.group}</GID><NAME>oneadmin</NAME></USER>", 0]
            if method == "one.vmpool.info":
                first, _, state = (*parameters[2:5], -1, -1, -1)[:3]
                found_vms = [
                    vm for vm in core.vms.values() if vm.id >= first and (state == -2 or vm.state != 6)
                ]
                return [
                    True,
                    f"<VM_POOL>{''.join(vm.to_xml(only_last=True) for vm in found_vms)}</VM_POOL>",
                    0,
                ]
            if method == "one.vmpool.infoset":
                # Extended: the body of its database, which has the last record alone (VirtualMachine.h).
                ids, extended = {int(word) for word in parameters[1].split(",") if word}, parameters[2]
                assert extended, "the short one has no user template"
                inner = "".join(vm.to_xml(only_last=True) for vm in core.vms.values() if vm.id in ids)
                return [True, f"<VM_POOL>{inner}</VM_POOL>", 0]
            if method in ("one.datastorepool.info", "one.hostpool.info", "one.imagepool.info"):
                kind = method.split(".")[1][: -len("pool")]
                pool_of = {"datastore": core.datastores, "host": core.hosts, "image": core.images}[kind]
                inner = "".join(item.to_xml() for item in pool_of.values())  # type: ignore[attr-defined]
                return [True, f"<{kind.upper()}_POOL>{inner}</{kind.upper()}_POOL>", 0]
        return [False, f"[{method}] method not served by the simulated oned", _NO_METHOD]

    def _updated(self, method: str, number: int, text: str, how: int = 0) -> List[Any]:
        """Update a VM or an image: how 0 replaces the template, 1 merges into it."""
        update, ids, root = {
            "one.vm.update": (self.update_vm, list(self.core.vms), "USER_TEMPLATE"),
            "one.image.update": (self.update_image, list(self.core.images), "TEMPLATE"),
        }[method]
        if how not in (0, 1):
            return [False, f"[{method}] Wrong update type", _API]
        if number not in ids:
            return [False, f"[{method}] Error getting object [{number}].", _NO_EXISTS]
        try:
            update(number, parse_any(text, root), how == 1)
        except ValueError as e:
            return [False, f"[{method}] Cannot update template. Parse error: {e}", _INTERNAL]
        return [True, number, 0]
