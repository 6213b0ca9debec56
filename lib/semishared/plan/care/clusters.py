# SPDX-License-Identifier: Apache-2.0
"""Sets of VMs that are one cluster: which VMs OpenNebula lists for it, and what each needs to run.

oned is asked by its documented XML-RPC: LABELS of a VM's user template, ROLES of a VM group, and the document
(type 100) that OneFlow keeps of a service, whose body names the VMs of each role.
"""

from __future__ import annotations

import json
from typing import Iterable, List, Mapping, Sequence, Tuple

from ... import NAME
from ...errors import BadArguments, BadAttribute
from ...model.disk import names as disk_names
from ...model.disk.place import Place
from ...named import NamedTuple
from ...opennebula.states import LcmState, VmState
from ...opennebula.xml import Datastore, Disk, Image, View, Vm
from ..image import placement

AT_REST = (VmState.STOPPED, VmState.SUSPENDED, VmState.POWEROFF, VmState.UNDEPLOYED)
SERVICE = 100
"""Type of the documents in which OneFlow keeps services."""


def named(vms: Sequence[Vm], text: str) -> List[Vm]:
    """Return the VMs of a list of ids and names; raise BadArguments for an unknown one."""
    found = []
    for word in dict.fromkeys(word.strip() for word in text.split(",")):
        known = [vm for vm in vms if word and word in (str(vm.id), vm.name)]
        known = [vm for vm in known if word == str(vm.id)] or known
        if len(known) != 1:
            what = f"{len(known)} VMs are called" if known else "no VM"
            raise BadArguments(f"{what} {word!r} in OpenNebula{': name one by its id' if known else ''}")
        found += known
    return list({vm.id: vm for vm in found}.values())


def labelled(vms: Sequence[Vm], label: str) -> List[Vm]:
    """Return the VMs that have a label; raise BadArguments if there are none."""
    wanted = label.strip()
    found = [
        vm
        for vm in vms
        if wanted and wanted in (word.strip() for word in vm.text("USER_TEMPLATE/LABELS").split(","))
    ]
    if not found:
        raise BadArguments(f"no VM has the label {label!r}")
    return found


def one_of(pool: Sequence[View], word: str, kind: str) -> View:
    """Return the object of that id or name; raise BadArguments if there is none, or several have the name."""
    found = [item for item in pool if word in (item.text("ID"), item.text("NAME"))]
    found = [item for item in found if item.text("ID") == word] or found
    if len(found) != 1:
        what = f"{len(found)} {kind}s are called" if found else f"no {kind}"
        raise BadArguments(f"{what} {word!r} in OpenNebula{': name one by its id' if found else ''}")
    return found[0]


def of_group(group: View) -> List[int]:
    """Return the VMs of all roles of a VM group."""
    lists = [View(role).text("VMS") for role in group.element.findall("ROLES/ROLE")]
    return [
        int(word) for text in lists for word in map(str.strip, text.split(",")) if disk_names.is_number(word)
    ]


def of_service(document: View) -> List[int]:
    """Return the VMs of all roles of a OneFlow service; raise BadArguments if its document is not one."""
    name = document.text("NAME")
    try:
        roles = json.loads(document.text("TEMPLATE/BODY"))["roles"]
        return [int(node["deploy_id"]) for role in roles for node in role.get("nodes", ())]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise BadArguments(
            f"document {document.text('ID')} ({name}) is no service as OneFlow keeps them"
        ) from None


def owned(vms: Sequence[Vm], document: View) -> List[Vm]:
    """Return the VMs of a document's owner: the owner may write any VM into it, and controls only these."""
    return [vm for vm in vms if vm.number("UID") == document.number("UID")]


def members(vms: Sequence[Vm], ids: Iterable[int], what: str) -> List[Vm]:
    """Return those VMs that still exist; raise BadArguments if none does."""
    wanted = set(ids)
    found = [vm for vm in vms if vm.id in wanted]
    if not found:
        raise BadArguments(f"{what} has no VM")
    return found


def is_ours(vm: Vm) -> bool:
    """Tell whether this driver has any disk of a VM."""
    return any(disk.driver == NAME or disk.text("TM_MAD_SYSTEM") == NAME for disk in vm.disks)


class Start(NamedTuple):
    """The action that gets a VM to run."""

    action: str
    """Of one.vm.action; '' if none is needed."""
    why: str = ""
    """Why no action does."""


def start(vm: Vm) -> Start:
    """Return the action that gets a VM to run from its present state."""
    if vm.state in AT_REST or (vm.is_active and vm.lcm_state == LcmState.UNKNOWN):
        return Start("resume")
    if vm.state == VmState.HOLD:
        return Start("release")
    if vm.has_failed:
        return Start("", f"it failed (LCM state {vm.lcm_state}): onevm recover {vm.id}")
    if vm.is_active or vm.state == VmState.PENDING:
        return Start("")
    return Start("", f"it is in state {vm.state}, in which nothing starts it")


def why_failed(vm: Vm, was_active: bool) -> str:
    """Return why a started VM does not come up, '' while it may."""
    said = vm.text("USER_TEMPLATE/ERROR")
    if vm.has_failed:
        return f"it failed (LCM state {vm.lcm_state}): {said or f'see the log of VM {vm.id}'}"
    if vm.state in AT_REST and was_active:
        return f"it is off again: {said or f'see the log of VM {vm.id}'}"
    return ""


def bases(
    vm: Vm, images: Mapping[int, Image], datastores: Mapping[int, Datastore]
) -> List[Tuple[Image, Datastore]]:
    """Return the images of whose bases a VM's disks are made."""
    found = []
    for disk in vm.disks:
        image = images.get(disk.image_id)
        datastore = datastores.get(image.store_id) if image else None
        if image is not None and datastore is not None and datastore.driver == NAME and image.is_disk:
            place = _place(image, datastore, disk)
            if place is not None and place.leases:
                found.append((image, datastore))
    return found


def _place(image: Image, datastore: Datastore, disk: Disk) -> Place | None:
    try:
        if image.is_persistent or disk.is_readonly:
            return placement.attached(image, datastore, disk)
        return placement.place(image, datastore)
    except BadAttribute:
        return None  # its clone says what is wrong with it
