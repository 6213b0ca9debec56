# SPDX-License-Identifier: Apache-2.0
"""Disks of a VM: attach, detach, resize, save as."""

from __future__ import annotations

import base64
from typing import List, Mapping, Optional

from .drivers import ActionFailed, Refused
from .objects import Image, Vm
from .snapshots import SnapshotOps
from .states import Act, Img, Lcm
from .states import Vm as State
from .template import Template, Vector, scalar
from .transfer import is_directory, is_volatile


class DiskOps(SnapshotOps):
    """Operations on single disks."""

    def disk_attach(
        self, vm_id: int, image: Optional[int] = None, attributes: Optional[Mapping[str, str]] = None
    ) -> int:
        """Attach an image, or with attributes TYPE and SIZE a volatile disk; return the disk id."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE, State.POWEROFF)
            running = vm.state == State.ACTIVE
            wanted: Vector = dict(attributes or {})
            if image is not None:
                wanted["IMAGE_ID"] = str(image)
            with self.data:
                disk = self._new_disk(vm, wanted, self._next_disk(vm))
                if is_directory(disk):
                    self._release(vm, disk)
                    raise Refused("Can not attach disks FILESYSTEM")
                self._complete_hot(vm, disk)
                self._close_history(vm, Act.DISK_ATTACH)
                vm.disks.append(disk)
                self._enter(vm, Lcm.HOTPLUG if running else Lcm.ATTACH_POWEROFF)
            try:
                if running:
                    self._attach_running(vm, disk)
                else:
                    self._transfer(vm, "prolog_attach", [self._lines(vm).prolog_disk(disk)])
            except ActionFailed:
                self._drop(vm, disk)
                raise
            finally:
                disk.pop("ATTACH", None)
                self._enter_idle(vm, running)
            return int(disk["DISK_ID"])

    def disk_detach(self, vm_id: int, disk_id: int) -> None:
        """Detach a disk; when its epilog fails the disk stays in the VM."""
        with self._operate(vm_id) as vm:
            self._need(vm, State.ACTIVE, State.POWEROFF)
            running = vm.state == State.ACTIVE
            disk = self._disk(vm, disk_id)
            if is_directory(disk):
                raise Refused("FILESYSTEM disks can not be detached")
            with self.data:
                disk["ATTACH"] = "YES"
                self._close_history(vm, Act.DISK_DETACH)
                self._enter(vm, Lcm.HOTPLUG if running else Lcm.DETACH_POWEROFF)
            line = self._lines(vm).epilog_disk(disk)
            try:
                if running:
                    path = self._path(vm, disk)
                    message = self._message(vm, command=line, target=path)
                    argv = [vm.deploy_id, path, disk["TARGET"], str(_index(disk["TARGET"]))]
                    try:
                        self.drivers.vmm(vm.last.host.name, "detach_disk", argv, vm.id, message)
                        self.drivers.tm(line.split(), any_driver=True)
                    except ActionFailed as failure:
                        self._fail(vm, "DETACHDISK", failure)
                        raise
                else:
                    self._transfer(vm, "epilog_detach", [line])
                self._drop(vm, disk)
            finally:
                disk.pop("ATTACH", None)
                self._enter_idle(vm, running)

    def disk_resize(self, vm_id: int, disk_id: int, size: int) -> None:
        """Grow a disk to a size in MB."""
        with self._operate(vm_id) as vm:
            if vm.state != State.UNDEPLOYED:
                self._need(vm, State.ACTIVE, State.POWEROFF)
            running, back = vm.state == State.ACTIVE, vm.state
            disk = self._disk(vm, disk_id)
            if is_directory(disk):
                raise Refused("FILESYSTEM disks can not be resized")
            if size <= int(disk["SIZE"]):
                raise Refused("New disk size has to be greater than current one")
            old = disk["SIZE"]
            with self.data:
                disk.update(RESIZE="YES", SIZE_PREV=old, SIZE=str(size))
                self._close_history(vm, Act.RESIZE)
                lcm = Lcm.RESIZE_UNDEPLOYED if back == State.UNDEPLOYED else Lcm.RESIZE_POWEROFF
                self._enter(vm, Lcm.RESIZE if running else lcm)
            line = self._lines(vm).disk_action("RESIZE", disk, str(size))
            try:
                if running:
                    self._resize_running(vm, disk, line)
                else:
                    self._transfer(vm, "disk_resize", [line])
                image = self._persistent_image(disk)
                if image is not None:
                    image.size = size
            except ActionFailed:
                disk["SIZE"] = old
                raise
            finally:
                disk.pop("RESIZE", None)
                disk.pop("SIZE_PREV", None)
                self._enter(vm, Lcm.RUNNING if running else Lcm.INIT, back)

    def disk_saveas(self, vm_id: int, disk_id: int, name: str, snapshot: int = -1) -> int:
        """Copy a disk, or one of its snapshots, to a new image; return the image id."""
        with self._operate(vm_id) as vm:
            steps = {
                State.ACTIVE: Lcm.SAVEAS,
                State.POWEROFF: Lcm.SAVEAS_POWEROFF,
                State.SUSPENDED: Lcm.SAVEAS_SUSPENDED,
                State.UNDEPLOYED: Lcm.SAVEAS_UNDEPLOYED,
                State.STOPPED: Lcm.SAVEAS_STOPPED,
            }
            self._need(vm, *steps)
            disk = self._disk(vm, disk_id)
            if "IMAGE_ID" not in disk:
                raise Refused("Cannot use DISK. DISK does not have a valid IMAGE_ID.")
            back = (vm.lcm, vm.state)
            image = self._reserve(vm, disk, name)
            marks = {
                "HOTPLUG_SAVE_AS": str(image.id),
                "HOTPLUG_SAVE_AS_ACTIVE": "YES",
                "HOTPLUG_SAVE_AS_SNAPSHOT_ID": str(snapshot),
                "HOTPLUG_SAVE_AS_SOURCE": image.source,
            }
            with self.data:
                disk.update(marks)
                self._enter(vm, steps[vm.state])
            home = back[1] in (State.UNDEPLOYED, State.STOPPED)
            try:
                self._transfer(
                    vm, "disk_saveas", [self._lines(vm).save_as(disk, image.source, snapshot, home)]
                )
            except ActionFailed:
                image.set_state(Img.ERROR)
                raise
            finally:
                with self.data:
                    for mark in marks:
                        disk.pop(mark, None)
                    image.template.pop("SAVE_AS_HOT", None)
                    self._enter(vm, *back)
            with self.data:
                image.set_state(Img.READY)
            return image.id

    # -- parts ----------------------------------------------------------------------------------

    def _path(self, vm: Vm, disk: Vector) -> str:
        return f"{self._lines(vm).directory(vm.last)}/disk.{disk['DISK_ID']}"

    def _enter_idle(self, vm: Vm, running: bool) -> None:
        self._enter(vm, Lcm.RUNNING if running else Lcm.INIT, State.ACTIVE if running else State.POWEROFF)

    @staticmethod
    def _next_disk(vm: Vm) -> int:
        numbers = [int(disk["DISK_ID"]) for disk in vm.disks]
        context = vm.template.get("CONTEXT")
        if isinstance(context, dict):
            numbers.append(int(context["DISK_ID"]))
        return max(numbers, default=-1) + 1

    def _complete_hot(self, vm: Vm, disk: Vector) -> None:
        # The VM was stamped at deploy, so a disk plugged in later carries the suffix, even of its own driver.
        disk["ATTACH"] = "YES"
        system = scalar(vm.template, "TM_MAD_SYSTEM")
        if system:
            disk["TM_MAD_SYSTEM"] = system
        if is_volatile(disk):
            format_ = disk.get("FORMAT") or "raw"
            disk.update(self._system_attributes(self.datastore(vm.last.ds_id), format_))

    def _attach_running(self, vm: Vm, disk: Vector) -> None:
        lines, path = self._lines(vm), self._path(vm, disk)
        command, rollback = lines.prolog_disk(disk), lines.epilog_disk(disk)
        message = self._message(vm, command=command, rollback=rollback, target=path)
        argv = [vm.deploy_id, path, disk["TARGET"], str(_index(disk["TARGET"])), encode(message)]
        try:
            self.drivers.tm(command.split(), any_driver=True)
            try:
                self.drivers.vmm(vm.last.host.name, "attach_disk", argv, vm.id, message)
            except ActionFailed:
                self._quietly(rollback)
                raise
        except ActionFailed as failure:
            self._fail(vm, "ATTACHDISK", failure)
            raise

    def _quietly(self, line: str) -> None:
        try:
            self.drivers.tm(line.split(), any_driver=True)
        except ActionFailed:
            pass  # as in one_vmm_exec: the first failure is the one reported

    def _drop(self, vm: Vm, disk: Vector) -> None:
        with self.data:
            rows: List[Vector] = [row for row in vm.disks if row is not disk]
            vm.template["DISK"] = rows
            self._release(vm, disk)
            vm.snapshots.pop(int(disk["DISK_ID"]), None)

    def _resize_running(self, vm: Vm, disk: Vector, line: str) -> None:
        message = self._message(vm, command=line, target=self._path(vm, disk))
        host = vm.last.host.name
        argv = [vm.deploy_id, disk["DISK_ID"], disk["SIZE"], encode(message), host]
        try:
            self.drivers.tm(line.split(), any_driver=True)
            self.drivers.vmm(host, "resize_disk", argv, vm.id, message)
        except ActionFailed as failure:
            self._fail(vm, "RESIZEDISK", failure)
            raise

    def _reserve(self, vm: Vm, disk: Vector, name: str) -> Image:
        """Let mkfs name a place for a saved disk; nothing is created there yet."""
        original = self.image(int(disk["IMAGE_ID"]))
        ds = self.datastore(original.datastore_id)
        template: Template = {
            "DEV_PREFIX": disk["DEV_PREFIX"],
            "SAVED_DISK_ID": disk["DISK_ID"],
            "SAVED_IMAGE_ID": disk["IMAGE_ID"],
            "SAVED_VM_ID": str(vm.id),
            "SAVE_AS_HOT": "YES",
        }
        image = self._new_image(ds, name, original.type, False, template, int(disk["SIZE"]))
        image.format = "save_as"
        try:
            source = self._ds_action(ds, "mkfs", str(image.id), image).strip()
        except ActionFailed as failure:
            self._image_error(image, "Error creating image in the datastore", failure)
            raise
        self._finish(image, source, disk["FORMAT"])
        image.set_state(Img.LOCKED)
        return image


def encode(message: str) -> str:
    """Encode a driver message as oned sends it."""
    return base64.b64encode(message.encode()).decode()


def _index(target: str) -> int:
    return ord(target.lower()[-1]) - 97
