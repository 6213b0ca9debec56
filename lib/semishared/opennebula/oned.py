# SPDX-License-Identifier: Apache-2.0
"""The few questions we ask oned (`one.vm.info` and its like)."""

from __future__ import annotations

import os

from ..errors import GoneFromOned, OnedUnavailable
from .rpc import Endpoint, RpcFailed, address_of
from .xml import Datastore, Host, Image, View, Vm, parse

TIMEOUT_S = 30
NO_EXISTS = 0x0400
"""oned's code for an object that it does not have (include/Request.h)."""


class Oned:
    """oned, as the driver's user sees it: session from ONE_AUTH, endpoint from ONE_XMLRPC, as the CLI
    does.
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
        """The key of front-ends (tools/key.py): beside one_auth, which OpenNebula's guide has on each
        front-end of an HA group.
        """
        self._session = _first_line(auth)
        if not self._session:
            raise OnedUnavailable(f"no OpenNebula session in {auth}")
        try:
            self._server = Endpoint(self.endpoint, TIMEOUT_S)
        except RpcFailed as e:
            raise OnedUnavailable(f"endpoint {self.endpoint}: {e}") from None

    def vm(self, vm_id: int) -> Vm:
        """Return VM `vm_id`; raise OnedUnavailable."""
        return Vm.parse(self._ask("one.vm.info", vm_id))

    def image(self, image_id: int) -> Image:
        """Return image `image_id`; raise OnedUnavailable."""
        return Image.parse(self._ask("one.image.info", image_id))

    def datastore(self, datastore_id: int) -> Datastore:
        """Return datastore `datastore_id`; raise OnedUnavailable."""
        return Datastore.parse(self._ask("one.datastore.info", datastore_id))

    def datastore_with_secrets(self, datastore_id: int) -> Datastore:
        """Return datastore `datastore_id`, its passwords decrypted, as OpenNebula's own drivers get it."""
        return Datastore.parse(self._call("one.datastore.info", datastore_id, True))

    def require_admin(self) -> None:
        """Raise OnedUnavailable unless this user sees everybody's VMs and images (group oneadmin)."""
        user = View(parse(self._call("one.user.info", -1), "USER"))
        if user.number("GID") != 0:
            raise OnedUnavailable(
                f"user {user.text('NAME')} is not of group oneadmin and does not see all VMs"
            )

    def vms(self) -> list[Vm]:
        """Return all VMs that are not DONE; raise OnedUnavailable."""
        pool = parse(self._call("one.vmpool.info", -2, -1, -1, -1), "VM_POOL")
        return [Vm(element) for element in pool.findall("VM")]

    def newest_vm(self, from_id: int) -> int:
        """Return the highest id that any VM has had, DONE or not, -1 if none from `from_id` on is remembered;
        raise OnedUnavailable.
        """
        pool = parse(self._call("one.vmpool.info", -2, max(from_id, 0), -1, -2), "VM_POOL")
        return max((View(element).number("ID") for element in pool.findall("VM")), default=-1)

    def images(self) -> list[Image]:
        """Return all images; raise OnedUnavailable."""
        return [
            Image(e)
            for e in parse(self._call("one.imagepool.info", -2, -1, -1), "IMAGE_POOL").findall("IMAGE")
        ]

    def datastores(self) -> list[Datastore]:
        """Return all datastores; raise OnedUnavailable."""
        return [
            Datastore(e)
            for e in parse(self._call("one.datastorepool.info"), "DATASTORE_POOL").findall("DATASTORE")
        ]

    def hosts(self) -> list[Host]:
        """Return all hosts; raise OnedUnavailable."""
        return [Host(e) for e in parse(self._call("one.hostpool.info"), "HOST_POOL").findall("HOST")]

    def create_datastore(self, template: str) -> int:
        """Make a datastore from its template and return its id; raise OnedUnavailable with oned's reason."""
        return int(self._answer("one.datastore.allocate", template, -1))

    def update_datastore(self, datastore_id: int, attributes: str) -> None:
        """Add attributes to a datastore's template; raise OnedUnavailable with oned's reason."""
        self._answer("one.datastore.update", datastore_id, attributes, 1)

    def reschedule(self, vm_id: int) -> None:
        """Have the scheduler find another host for a VM; raise OnedUnavailable with oned's reason."""
        self.act(vm_id, "resched")

    def act(self, vm_id: int, action: str) -> None:
        """Have oned begin an action on a VM (one.vm.action: "resume", "release"); raise OnedUnavailable with
        oned's reason.
        """
        self._answer("one.vm.action", action, vm_id)

    def vm_groups(self) -> list[View]:
        """Return all VM groups; raise OnedUnavailable."""
        return [
            View(e)
            for e in parse(self._call("one.vmgrouppool.info", -2, -1, -1), "VM_GROUP_POOL").findall(
                "VM_GROUP"
            )
        ]

    def documents(self, type: int) -> list[View]:  # noqa: A002 - OpenNebula's word
        """Return all documents of a type (100: services of OneFlow); raise OnedUnavailable."""
        return [
            View(e)
            for e in parse(self._call("one.documentpool.info", -2, -1, -1, type), "DOCUMENT_POOL").findall(
                "DOCUMENT"
            )
        ]

    def create_document(self, template: str, type: int) -> int:  # noqa: A002 - OpenNebula's word
        """Make a document and return its id; raise OnedUnavailable with oned's reason."""
        return int(self._answer("one.document.allocate", template, type))

    def update_document(self, document_id: int, attributes: str) -> None:
        """Set attributes of a document, the others stay; raise OnedUnavailable with oned's reason."""
        self._answer("one.document.update", document_id, attributes, 1)

    def front_ends(self) -> list[list[str]]:
        """Return the addresses of the front-ends of each zone, none of one without HA; raise
        OnedUnavailable.
        """
        zones = parse(self._call("one.zonepool.info"), "ZONE_POOL").findall("ZONE")
        urls = [
            [View(server).text("ENDPOINT") for server in zone.findall("SERVER_POOL/SERVER")] for zone in zones
        ]
        return [[found for found in map(address_of, zone) if found] for zone in urls]

    def hooks(self) -> list[View]:
        """Return all hooks; raise OnedUnavailable."""
        return [
            View(e) for e in parse(self._call("one.hookpool.info", -2, -1, -1), "HOOK_POOL").findall("HOOK")
        ]

    def version(self) -> str:
        """Return the version of oned; raise OnedUnavailable."""
        return str(self._answer("one.system.version"))

    def _ask(self, method: str, object_id: int) -> bytes:
        return self._call(method, object_id)

    def _call(self, method: str, *arguments: int) -> bytes:
        answer = self._answer(method, *arguments)
        if not isinstance(answer, str):
            raise OnedUnavailable(f"{method}: answer not understood")
        return answer.encode("utf-8", "surrogatepass")

    def _answer(self, method: str, *arguments: int | str) -> int | str:
        what = " ".join([method, *(str(word) for word in arguments if isinstance(word, int))])
        try:
            answer = self._server.ask(method, self._session, *arguments)
        except (OSError, RpcFailed) as e:
            raise OnedUnavailable(f"{what} at {self.endpoint}: {type(e).__name__}: {e}") from None
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
