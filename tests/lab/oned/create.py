# SPDX-License-Identifier: Apache-2.0
"""Turn a VM template into a VM: disks, targets, context, automatic attributes."""

from __future__ import annotations

import string
import uuid
from typing import List, Mapping, Optional

from . import requirements
from .core import Core, TemplateLike, as_template
from .drivers import Refused
from .objects import DISK_TYPES, Datastore, Image, Vm
from .states import Img
from .states import Vm as State
from .template import Template, Vector, scalar, vectors
from .transfer import is_directory, is_volatile

_TO_VM = {
    "NAME",
    "CPU",
    "VCPU",
    "MEMORY",
    "DISK",
    "CONTEXT",
    "OS",
    "FEATURES",
    "CPU_MODEL",
    "TPM",
    "RAW",
    "GRAPHICS",
    "TM_MAD_SYSTEM",
    "SUBMIT_ON_HOLD",
    "NIC",
}


class CreateOps(Core):
    """What onevm create does."""

    def vm_create(self, template: TemplateLike, hold: bool = True, name: Optional[str] = None) -> int:
        """Create a VM and reserve its images; return its id."""
        given = as_template(template)
        with self.data:
            number = self.next_vm
            body: Template = {key: value for key, value in given.items() if key in _TO_VM and key != "NAME"}
            user: Template = {key: value for key, value in given.items() if key not in _TO_VM}
            vm = Vm(
                number,
                name or scalar(given, "NAME") or f"one-{number}",
                body,
                user,
                State.HOLD if hold else State.PENDING,
            )
            wanted = [dict(disk) for disk in vectors(given, "DISK")]
            body["DISK"] = []
            q35 = (vectors(body, "OS") or [{}])[0].get("MACHINE", "").startswith(("q35", "pc-q35"))
            for disk in wanted:
                vm.disks.append(self._new_disk(vm, disk, len(vm.disks)))
            if isinstance(body.get("CONTEXT"), dict):
                context = dict(body["CONTEXT"])  # type: ignore[arg-type]
                context["DISK_ID"] = str(len(vm.disks))
                context.setdefault("TARGET", self._target(vm, "sd" if q35 else "hd"))
                body["CONTEXT"] = context
            body["OS"] = {**(vectors(body, "OS") or [{}])[0], "UUID": str(uuid.uuid4())}
            body["VMID"] = str(number)
            body["AUTOMATIC_REQUIREMENTS"] = "(CLUSTER_ID = 0) & !(PIN_POLICY = PINNED)"
            body["AUTOMATIC_NIC_REQUIREMENTS"] = '("CLUSTERS/ID" @> 0)'
            if scalar(body, "TM_MAD_SYSTEM"):
                self._set_mode(vm, scalar(body, "TM_MAD_SYSTEM"))
            self._require_system(vm)
            if hold:
                body["SUBMIT_ON_HOLD"] = "YES"
            self.next_vm += 1
            self.vms[number] = vm
            return number

    def _require_system(self, vm: Vm) -> None:
        """Write anew which system datastores the VM may use: what datastores say later changes nothing."""
        with self.data:
            vm.template["AUTOMATIC_DS_REQUIREMENTS"] = requirements.of_system(vm, self.datastores)

    def _set_mode(self, vm: Vm, system: str) -> None:
        """Give all disks the mode the user chose in the template: unlike the one found at deploy it replaces
        TYPE too.
        """
        for disk in vm.disks:
            disk["TM_MAD_SYSTEM"] = system
            if is_volatile(disk) or is_directory(disk):
                continue
            template = self.datastore(int(disk["DATASTORE_ID"])).template
            for name in ("CLONE_TARGET", "LN_TARGET", "DISK_TYPE"):
                disk[name] = scalar(template, f"{name}_{system.upper()}") or disk[name]
            disk["TYPE"] = disk["DISK_TYPE"]

    def _new_disk(self, vm: Vm, given: Vector, number: int) -> Vector:
        """Complete one DISK vector; an image disk takes its image."""
        disk = {key.upper(): value for key, value in given.items()}
        disk["DISK_ID"] = str(number)
        if "IMAGE_ID" not in disk and "IMAGE" not in disk:
            if not is_volatile(disk) or "SIZE" not in disk:
                raise Refused("A volatile disk needs TYPE=fs or swap and SIZE")
            if disk["TYPE"].lower() == "fs":
                disk.setdefault("FORMAT", "raw")
        else:
            self._take_image(vm, disk)
        if is_directory(disk):
            self._check_directory(vm, disk)
            return disk
        prefix = disk.setdefault("DEV_PREFIX", self.settings.device_prefix)
        if "TARGET" not in disk:
            disk["TARGET"] = self._target(vm, prefix)
        return disk

    def _take_image(self, vm: Vm, disk: Vector) -> None:
        if "IMAGE_ID" in disk:
            image = self.image(int(disk["IMAGE_ID"]))
        else:
            found = [item for item in self.images.values() if item.name == disk["IMAGE"]]
            if len(found) != 1:
                raise Refused(f"Error getting image '{disk['IMAGE']}'.")
            image = found[0]
        if image.state not in ((Img.READY,) if image.persistent else (Img.READY, Img.USED)):
            raise Refused(f"Cannot acquire image {image.id}, state {image.state}")
        ds, own = self.datastore(image.datastore_id), disk.get("READONLY", "")
        image.vms.append(vm.id)
        image.set_state(Img.USED_PERS if image.persistent else Img.USED)
        if image.snapshots.get("SNAPSHOT"):
            vm.snapshots[int(disk["DISK_ID"])] = dict(image.snapshots)
        for key, value in _image_attributes(image, ds).items():
            disk[key] = value
        if disk["READONLY"] != "YES":
            # Only what no VM may write to does oned decide itself (Image::disk_attribute); else DISK comes
            # before the image.
            disk["READONLY"] = own or ("YES" if scalar(image.template, "READONLY").upper() == "YES" else "NO")
        prefix = scalar(image.template, "DEV_PREFIX")
        if prefix:
            disk.setdefault("DEV_PREFIX", prefix)
        for names, source in (
            (self.settings.inherit_image, image.template),
            (self.settings.inherit_datastore, ds.template),
        ):
            for name in names:
                value = scalar(source, name)
                if value:
                    disk.setdefault(name, value)
        total = sum(int(row["SIZE"]) for row in vectors(image.snapshots, "SNAPSHOT"))
        disk["DISK_SNAPSHOT_TOTAL_SIZE"] = str(total)

    @staticmethod
    def _check_directory(vm: Vm, disk: Vector) -> None:
        """Do what Image::disk_attribute and VirtualMachineDisks::get_images do for it: a tag of its own, and
        no target.
        """
        disk.setdefault("MOUNT_POINT", f"/mnt/one-fs-{disk['IMAGE_ID']}")
        disk.setdefault("MOUNT_TAG", f"one-tag-{disk['IMAGE_ID']}")
        others = [other for other in vm.disks if is_directory(other)]
        if any(other["IMAGE_ID"] == disk["IMAGE_ID"] for other in others):
            raise Refused("File system image can only be added once to the same VM")
        if any(other["MOUNT_TAG"] == disk["MOUNT_TAG"] for other in others):
            raise Refused(f"MOUNT_TAG '{disk['MOUNT_TAG']}' is duplicated across disks")

    @staticmethod
    def _target(vm: Vm, prefix: str) -> str:
        used = {disk.get("TARGET", "") for disk in vm.disks}
        context = vm.template.get("CONTEXT")
        if isinstance(context, dict):
            used.add(context.get("TARGET", ""))
        names: List[str] = [*string.ascii_lowercase, *(a + b for a in "abc" for b in string.ascii_lowercase)]
        return next(prefix + name for name in names if prefix + name not in used)


def _image_attributes(image: Image, ds: Datastore) -> Mapping[str, str]:
    cdrom = image.type == 1
    kind = scalar(image.template, "PERSISTENT_TYPE")
    immutable = kind == "IMMUTABLE"
    clone = not (image.persistent or cdrom or immutable)
    values = {
        "CLONE": "YES" if clone else "NO",
        "SAVE": "YES" if image.persistent and not immutable and not cdrom else "NO",
        "READONLY": "YES" if cdrom or immutable else "NO",
        "CLUSTER_ID": "0",
        "DATASTORE": ds.name,
        "DATASTORE_ID": str(ds.id),
        "DRIVER": image.format,
        "FORMAT": image.format,
        "IMAGE": image.name,
        "IMAGE_ID": str(image.id),
        "IMAGE_STATE": str(image.state),
        "ORIGINAL_SIZE": str(image.size),
        "SIZE": str(image.size),
        "SOURCE": image.source,
        "TM_MAD": ds.tm_mad,
        "TYPE": DISK_TYPES[image.disk_type],
        "CLONE_TARGET": scalar(ds.template, "CLONE_TARGET", "SYSTEM"),
        "LN_TARGET": scalar(ds.template, "LN_TARGET", "NONE"),
    }
    if image.persistent:
        values["PERSISTENT"] = "YES"
        if kind == "SHAREABLE" and image.format in ("raw", "dir"):
            values["SHAREABLE"] = "YES"
    return values
