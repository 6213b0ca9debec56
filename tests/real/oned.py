# SPDX-License-Identifier: Apache-2.0
"""A real oned with the operations of the simulated one (lab/oned), so that the same tests run with both.

Each operation returns when what was asked for is there, and raises what the simulated one raises: Refused if
oned says no, ActionFailed if the VM comes to a failure state, or goes back to where it was with an error.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Optional, Tuple, Union
from xml.etree import ElementTree

from lab.oned.drivers import ActionFailed, Refused
from lab.oned.objects import Datastore, History, Host, Image, Vm
from lab.oned.states import FAILURE, STATE_NAMES, Img, Lcm
from lab.oned.states import Vm as State
from lab.oned.template import Template, parse, render, scalar, vectors
from real.api import Api, template_of

PATIENCE_S = 600.0
POLL_S = 0.2
BEGINS_S = 2.0
"""How long oned may take to begin what it was asked."""
CUT = "... see more details in VM log"
FAILED = set(FAILURE.values())
RECOVER = {"failure": 0, "success": 1, "retry": 2, "delete": 3, "recreate": 4}
HOW = {"save": 0, "live": 0, "poweroff": 1, "poweroff-hard": 2}
TemplateLike = Union[str, Template]


@dataclass
class RealVm(Vm):
    """A VM as oned has just said it."""

    xml: str = ""

    def to_xml(self, only_last: bool = False) -> str:
        """Return what oned said."""
        return self.xml

    @property
    def is_idle(self) -> bool:
        """Tell whether no driver works for it."""
        return self.state != State.ACTIVE or self.lcm in {Lcm.RUNNING, Lcm.UNKNOWN, *FAILED}

    @property
    def error(self) -> str:
        """Return USER_TEMPLATE/ERROR with its date; empty when there is none."""
        return scalar(self.user_template, "ERROR")


def _text(element: ElementTree.Element, path: str, default: str = "") -> str:
    return element.findtext(path, default) or default


def _number(element: ElementTree.Element, path: str, default: int = 0) -> int:
    return int(_text(element, path) or default)


def _xml(template: TemplateLike) -> str:
    given = parse(template) if isinstance(template, str) else template
    return f"<TEMPLATE>{render(given)}</TEMPLATE>"


class RealOned:
    """What onevm, oneimage, onedatastore and onehost do, by XML-RPC."""

    rpc = None
    """Of the simulated one alone."""

    def __init__(self, api: Api, vm_mad: str) -> None:
        self.api, self.vm_mad = api, vm_mad

    # -- objects -----------------------------------------------------------------------------------

    def vm(self, vm_id: int) -> RealVm:
        """Find a VM."""
        said = self.api.call("vm.info", vm_id)
        vm = ElementTree.fromstring(said)
        history = [
            History(
                vm_id,
                _number(row, "SEQ"),
                Host(_number(row, "HID"), _text(row, "HOSTNAME"), _text(row, "VM_MAD")),
                _text(row, "TM_MAD"),
                _number(row, "DS_ID"),
                action=_number(row, "ACTION"),
            )
            for row in vm.findall("HISTORY_RECORDS/HISTORY")
        ]
        snapshots = {_number(row, "DISK_ID"): template_of(row) for row in vm.findall("SNAPSHOTS")}
        return RealVm(
            vm_id,
            _text(vm, "NAME"),
            template_of(vm.find("TEMPLATE")),
            template_of(vm.find("USER_TEMPLATE")),
            _number(vm, "STATE"),
            _number(vm, "LCM_STATE"),
            deploy_id=_text(vm, "DEPLOY_ID"),
            history=history,
            snapshots=snapshots,
            resched=_text(vm, "RESCHED") == "1",
            xml=said,
        )

    def image(self, image_id: int) -> Image:
        """Find an image."""
        return self._image(self.api.info("image", image_id))

    @staticmethod
    def _image(row: ElementTree.Element) -> Image:
        return Image(
            _number(row, "ID"),
            _text(row, "NAME"),
            _number(row, "TYPE"),
            _text(row, "PERSISTENT") == "1",
            _number(row, "DATASTORE_ID"),
            _text(row, "DATASTORE"),
            template_of(row.find("TEMPLATE")),
            path=_text(row, "PATH"),
            source=_text(row, "SOURCE"),
            format=_text(row, "FORMAT"),
            size=_number(row, "SIZE"),
            state=_number(row, "STATE"),
            vms=[int(one.text or 0) for one in row.findall("VMS/ID")],
            snapshots=template_of(row.find("SNAPSHOTS")),
        )

    @staticmethod
    def _datastore(row: ElementTree.Element) -> Datastore:
        return Datastore(
            _number(row, "ID"),
            _text(row, "NAME"),
            _number(row, "TYPE"),
            _text(row, "DS_MAD"),
            _text(row, "TM_MAD"),
            _text(row, "BASE_PATH"),
            template_of(row.find("TEMPLATE")),
            total_mb=_number(row, "TOTAL_MB"),
            free_mb=_number(row, "FREE_MB"),
        )

    def datastore(self, datastore_id: int) -> Datastore:
        """Find a datastore."""
        return self._datastore(self.api.info("datastore", datastore_id))

    def host(self, which: Union[int, str]) -> Host:
        """Find a host by id or name."""
        for row in self.api.pool("host"):
            if which in (_number(row, "ID"), _text(row, "NAME")):
                return Host(
                    _number(row, "ID"),
                    _text(row, "NAME"),
                    _text(row, "VM_MAD"),
                    template_of(row.find("TEMPLATE")),
                    _number(row, "STATE"),
                )
        raise Refused(f"Error getting host [{which}].")

    @property
    def vms(self) -> Dict[int, RealVm]:
        """All VMs that are not done."""
        ids = [_number(row, "ID") for row in self.api.pool("vm", -2, -1, -1, -1)]
        return {number: self.vm(number) for number in ids}

    @property
    def images(self) -> Dict[int, Image]:
        """All images."""
        return {image.id: image for image in map(self._image, self.api.pool("image", -2, -1, -1))}

    @property
    def datastores(self) -> Dict[int, Datastore]:
        """All datastores that are ours: those that oned makes by itself have other drivers."""
        found = map(self._datastore, self.api.pool("datastore"))
        return {one.id: one for one in found if one.tm_mad == "semishared"}

    def state(self, vm_id: int) -> Tuple[str, int]:
        """Return the name of STATE and the number of LCM_STATE."""
        vm = self.vm(vm_id)
        return STATE_NAMES.get(vm.state, str(vm.state)), vm.lcm

    def error(self, vm_id: int) -> str:
        """Return USER_TEMPLATE/ERROR without its date; empty when there is none."""
        return self.vm(vm_id).error.split(": ", 1)[-1]

    # -- datastores, hosts, images -----------------------------------------------------------------

    def host_create(self, name: str) -> int:
        """Add a host; it is on when its first monitoring message has come."""
        return int(self.api.call("host.allocate", name, self.vm_mad, self.vm_mad, 0))

    def datastore_create(self, template: TemplateLike, datastore_id: Optional[int] = None) -> int:
        """Create a datastore; an error if it does not get the id that was told."""
        made = int(self.api.call("datastore.allocate", _xml(template), 0))
        if datastore_id not in (None, made):
            raise RuntimeError(f"the datastore has id {made}, not {datastore_id}")
        return made

    def datastore_update(self, datastore_id: int, attributes: TemplateLike) -> None:
        """Add attributes to a datastore."""
        self.api.call("datastore.update", datastore_id, _xml(attributes), 1)

    def datastore_replace(self, datastore_id: int, attributes: TemplateLike) -> None:
        """Give a datastore another template."""
        self.api.call("datastore.update", datastore_id, _xml(attributes), 0)

    def datastore_delete(self, datastore_id: int) -> None:
        """Delete an empty datastore."""
        self.api.call("datastore.delete", datastore_id)

    def image_create(
        self,
        datastore_id: int,
        name: str,
        path: str = "",
        size: int = 0,
        type: str = "OS",  # noqa: A002 - the name of the option
        format: str = "",  # noqa: A002
        persistent: bool = False,
        prefix: str = "",
        attributes: TemplateLike = "",
        uid: int = 0,
        monitored: bool = True,
    ) -> int:
        """Create an image from a path or URL, or an empty one; return once it is READY."""
        given = dict(parse(attributes) if isinstance(attributes, str) else attributes)
        words = {"NAME": name, "TYPE": type, "PATH": path, "FORMAT": format, "DEV_PREFIX": prefix}
        given.update({key: word for key, word in words.items() if word})
        given["PERSISTENT"] = "YES" if persistent else "NO"
        if size:
            given["SIZE"] = str(size)
        try:
            return self._ready(int(self.api.call("image.allocate", _xml(given), datastore_id, False)))
        except Refused as refusal:
            if "Cannot parse image SIZE: " in str(refusal):  # what `stat` of the driver said
                raise ActionFailed(str(refusal)) from refusal
            raise

    def _ready(self, number: int) -> int:
        """Wait until an image is no longer worked on."""
        deadline = time.monotonic() + PATIENCE_S
        while (image := self.image(number)).state in (Img.INIT, Img.LOCKED):
            if time.monotonic() > deadline:
                raise TimeoutError(f"image {number} is still locked")
            time.sleep(POLL_S)
        if image.state == Img.ERROR:
            raise ActionFailed(scalar(image.template, "ERROR"))
        return number

    def image_clone(self, image_id: int, name: str, datastore_id: Optional[int] = None) -> int:
        """Clone an image into a datastore of the same driver."""
        where = -1 if datastore_id is None else datastore_id
        return self._ready(int(self.api.call("image.clone", image_id, name, where)))

    def image_delete(self, image_id: int) -> None:
        """Delete an image that no VM uses; it may be used for a moment by one that has just ended."""
        self._when_free(image_id)
        if self.image(image_id).source:
            self.api.call("image.delete", image_id)
        else:
            self.api.call("image.delete", image_id, True)  # nothing of it is anywhere
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                image = self.image(image_id)
            except Refused:
                return
            if image.state == Img.ERROR:
                raise ActionFailed(scalar(image.template, "ERROR"))
            time.sleep(POLL_S)
        raise TimeoutError(f"image {image_id} is still there")

    def _when_free(self, image_id: int) -> None:
        deadline = time.monotonic() + 30
        while self.image(image_id).state not in (Img.READY, Img.ERROR, Img.DISABLED):
            if time.monotonic() > deadline:
                return  # oned says itself what it is used by
            time.sleep(POLL_S)

    def image_persistent(self, image_id: int, persistent: bool) -> None:
        """Flip the persistence of an unused image."""
        self.api.call("image.persistent", image_id, persistent)

    def image_update(self, image_id: int, attributes: TemplateLike) -> None:
        """Add attributes to an image."""
        self.api.call("image.update", image_id, _xml(attributes), 1)

    def image_enable(self, image_id: int) -> None:
        """Take an image out of ERROR."""
        self.api.call("image.enable", image_id, True)

    # -- VMs -----------------------------------------------------------------------------------------

    def vm_create(self, template: TemplateLike, hold: bool = True, name: Optional[str] = None) -> int:
        """Create a VM and reserve its images; return its id."""
        given = dict(parse(template) if isinstance(template, str) else template)
        if name:
            given["NAME"] = name
        return int(self.api.call("vm.allocate", _xml(given), hold))

    def _until(
        self,
        vm_id: int,
        call: Callable[[], Any],
        goal: Callable[[RealVm], bool],
        patience: float = PATIENCE_S,
    ) -> Any:
        """Ask for something and wait until a VM is idle and has come there."""
        before = self.vm(vm_id)
        answer = call()
        began = time.monotonic()
        deadline = began + patience
        is_begun = False
        while True:
            vm = self.vm(vm_id)
            # oned answers before it begins: what is as it was may not have begun yet.
            is_begun = (
                is_begun or not vm.is_idle or vm.state != before.state or time.monotonic() > began + BEGINS_S
            )
            if vm.is_idle and is_begun:
                if (
                    vm.state == State.ACTIVE
                    and vm.lcm in FAILED
                    and (vm.lcm != before.lcm or vm.error != before.error)
                ):
                    raise ActionFailed(self._whole(vm_id, self._why(vm_id, before.error)))
                if goal(vm):
                    return answer
                if vm.error and vm.error != before.error:
                    raise ActionFailed(self._whole(vm_id, vm.error))
            if time.monotonic() > deadline:
                raise TimeoutError(f"VM {vm_id} is in {vm.state}/{vm.lcm} after {patience} s: {vm.error}")
            time.sleep(POLL_S)

    def _why(self, vm_id: int, before: str) -> str:
        """Return the error of a VM that has just failed: oned writes it after the state."""
        deadline = time.monotonic() + 5
        while not (error := self.vm(vm_id).error) or error == before:
            if time.monotonic() > deadline:
                return self.log(vm_id)
            time.sleep(POLL_S)
        return error

    def _whole(self, vm_id: int, error: str) -> str:
        """Return an error as the VM's log has it: of a longer one oned keeps the beginning."""
        begun = error.partition(": ")[2][: -len(CUT)]
        lines = [line for line in self.log(vm_id).splitlines() if error.endswith(CUT) and begun in line]
        return lines[-1] if lines else error

    def log(self, vm_id: int) -> str:
        """Return the end of a VM's log."""
        path = self.api.node.path(f"/var/log/one/{vm_id}.log")
        return path.read_text(errors="replace")[-1500:] if path.exists() else ""

    def _reach(self, vm_id: int, call: Callable[[], Any], state: int, lcm: int = 0) -> Any:
        return self._until(vm_id, call, lambda vm: (vm.state, vm.lcm) == (state, lcm))

    def _act(self, vm_id: int, action: str, state: int, lcm: int = 0) -> None:
        self._reach(vm_id, lambda: self.api.call("vm.action", action, vm_id), state, lcm)

    def vm_deploy(
        self, vm_id: int, host: Union[int, str], datastore_id: int, by_scheduler: bool = False
    ) -> None:
        """Bring a VM to RUNNING on a host."""
        where = self.host(host).id
        self._reach(
            vm_id,
            lambda: self.api.call("vm.deploy", vm_id, where, False, datastore_id, ""),
            State.ACTIVE,
            Lcm.RUNNING,
        )

    def vm_scheduled(self, vm_id: int, patience: float = 180.0) -> None:
        """Release a VM on hold and wait until the scheduler's choice runs."""
        self._until(
            vm_id,
            lambda: self.api.call("vm.action", "release", vm_id),
            lambda vm: (vm.state, vm.lcm) == (State.ACTIVE, Lcm.RUNNING),
            patience,
        )

    def vm_terminate(self, vm_id: int, hard: bool = False) -> None:
        """End a VM, saving its persistent disks."""
        self._act(vm_id, "terminate-hard" if hard else "terminate", State.DONE)

    def vm_poweroff(self, vm_id: int, hard: bool = False) -> None:
        """Switch a VM off, leaving its disks on the host."""
        self._act(vm_id, "poweroff-hard" if hard else "poweroff", State.POWEROFF)

    def vm_suspend(self, vm_id: int) -> None:
        """Save a VM's memory beside its disks."""
        self._act(vm_id, "suspend", State.SUSPENDED)

    def vm_stop(self, vm_id: int) -> None:
        """Save a VM and bring its files to the front-end."""
        self._act(vm_id, "stop", State.STOPPED)

    def vm_undeploy(self, vm_id: int, hard: bool = False) -> None:
        """Shut a VM down and bring its files to the front-end."""
        self._act(vm_id, "undeploy-hard" if hard else "undeploy", State.UNDEPLOYED)

    def vm_resume(self, vm_id: int) -> None:
        """Start a VM that is off or suspended; one that is stopped or undeployed waits for a host then."""
        if self.vm(vm_id).state in (State.STOPPED, State.UNDEPLOYED):
            self._act(vm_id, "resume", State.PENDING)
        else:
            self._act(vm_id, "resume", State.ACTIVE, Lcm.RUNNING)

    def vm_reboot(self, vm_id: int, hard: bool = False) -> None:
        """Reboot or reset a running VM."""
        self.api.call("vm.action", "reboot-hard" if hard else "reboot", vm_id)

    def vm_migrate(
        self, vm_id: int, host: Union[int, str], datastore_id: Optional[int] = None, how: str = "save"
    ) -> None:
        """Migrate: `save`, `poweroff`, `poweroff-hard` or `live`."""
        before, target = self.vm(vm_id), self.host(host).id
        words = (vm_id, target, how == "live", False, -1 if datastore_id is None else datastore_id, HOW[how])
        self._until(
            vm_id,
            lambda: self.api.call("vm.migrate", *words),
            lambda vm: (
                vm.state == before.state
                and vm.last.seq > before.last.seq
                and vm.last.host.id == target
                and vm.lcm not in FAILED
            ),
        )

    def vm_recover(self, vm_id: int, how: str) -> None:
        """Recover: `retry`, `success`, `failure`, `delete`, `recreate`; return when drivers are done."""
        seen = self.vm(vm_id)

        def over(vm: RealVm) -> bool:
            return (vm.state, vm.lcm) != (seen.state, seen.lcm) or vm.error != seen.error

        log = self.api.node.path("/var/log/one/oned.log")
        begun = log.stat().st_size
        self._until(vm_id, lambda: self.api.call("vm.recover", vm_id, RECOVER[how]), over)
        if how != "delete" or not seen.history:
            return
        # A VM that is deleted is DONE before its drivers are, or have begun.
        done = re.compile(rf"Message received: (CLEANUP|TRANSFER) \w+ {vm_id} ".encode())
        deadline = time.monotonic() + PATIENCE_S
        while not done.search(log.read_bytes()[begun:]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"VM {vm_id} is deleted, and its drivers have not ended")
            time.sleep(POLL_S)

    # -- disks -----------------------------------------------------------------------------------------

    def disk_attach(
        self, vm_id: int, image: Optional[int] = None, attributes: Optional[Dict[str, str]] = None
    ) -> int:
        """Attach an image, or with attributes TYPE and SIZE a volatile disk; return the disk id."""
        wanted: Dict[str, str] = dict(attributes or {})
        if image is not None:
            wanted["IMAGE_ID"] = str(image)
        known = {disk["DISK_ID"] for disk in self.vm(vm_id).disks}

        def attached(vm: RealVm) -> bool:
            return any(disk["DISK_ID"] not in known and "ATTACH" not in disk for disk in vm.disks)

        self._until(vm_id, lambda: self.api.call("vm.attach", vm_id, _xml({"DISK": wanted})), attached)
        return max(int(disk["DISK_ID"]) for disk in self.vm(vm_id).disks if disk["DISK_ID"] not in known)

    def disk_detach(self, vm_id: int, disk_id: int) -> None:
        """Detach a disk; when its epilog fails the disk stays in the VM."""
        self._until(
            vm_id, lambda: self.api.call("vm.detach", vm_id, disk_id), lambda vm: vm.disk(disk_id) is None
        )

    def disk_resize(self, vm_id: int, disk_id: int, size: int) -> None:
        """Grow a disk to a size in MB."""

        def grown(vm: RealVm) -> bool:
            disk = vm.disk(disk_id) or {}
            return disk.get("SIZE") == str(size) and "RESIZE" not in disk

        self._until(vm_id, lambda: self.api.call("vm.diskresize", vm_id, disk_id, str(size)), grown)

    def disk_saveas(self, vm_id: int, disk_id: int, name: str, snapshot: int = -1) -> int:
        """Copy a disk, or one of its snapshots, to a new image; return the image id."""
        image = int(self.api.call("vm.disksaveas", vm_id, disk_id, name, "", snapshot))
        return self._ready(image)

    def disk_snapshot_create(self, vm_id: int, disk_id: int, name: str) -> int:
        """Snapshot a disk; return the snapshot id."""
        made = 0

        def call() -> None:
            nonlocal made
            made = int(self.api.call("vm.disksnapshotcreate", vm_id, disk_id, name))

        def there(vm: RealVm) -> bool:
            return self._has(vm, disk_id, made) and "DISK_SNAPSHOT_ACTIVE" not in (vm.disk(disk_id) or {})

        self._until(vm_id, call, there)
        return made

    @staticmethod
    def _has(vm: RealVm, disk_id: int, number: int) -> bool:
        rows = vectors(vm.snapshots.get(disk_id, {}), "SNAPSHOT")
        return str(number) in [row["ID"] for row in rows]

    def disk_snapshot_revert(self, vm_id: int, disk_id: int, number: int) -> None:
        """Go back to a snapshot of a powered-off VM's disk."""
        state = self.vm(vm_id).state
        self._reach(vm_id, lambda: self.api.call("vm.disksnapshotrevert", vm_id, disk_id, number), state)

    def disk_snapshot_delete(self, vm_id: int, disk_id: int, number: int) -> None:
        """Delete a snapshot; a running VM too is served by the transfer driver."""
        self._until(
            vm_id,
            lambda: self.api.call("vm.disksnapshotdelete", vm_id, disk_id, number),
            lambda vm: not self._has(vm, disk_id, number),
        )
