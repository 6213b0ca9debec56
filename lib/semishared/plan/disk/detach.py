# SPDX-License-Identifier: Apache-2.0
"""Which remote-first disks get bases on their hosts, and what becomes of each.

Hosts say what a disk is now. The bases come first, one session for each image to all hosts that need it
(front/detach.py). Then each host detaches one VM after the other: a oned action that ends one of them ends no
other.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from ...errors import SemisharedError
from ...model.attributes import DETACH
from ...model.base.steps import DetachVm
from ...model.disk.record import Record, described
from ...model.exchange import Part, ask
from ...model.refs import ImageRef
from ...model.vm.move_steps import DescribedVm
from ...named import NamedTuple
from ...opennebula.states import VmState
from ...opennebula.xml import Datastore, Image, Vm
from .disks import running_domain

NOTHING = "no disk of it reads from a store"
Row = Dict[str, Any]
"""{"vm", "host", "disk", "image", "how": detached|failed|skipped, "why", "id", "seconds"}; `disk` and `image`
are -1 for all of a VM.
"""


class Wanted(NamedTuple):
    """A VM whose disks are to be detached."""

    vm: int
    host: str
    vm_dir: str
    domain: str
    """'' of a VM that is off."""
    disks: Optional[Tuple[int, ...]] = None
    """None for all of the VM."""


class Found(NamedTuple):
    """A host's answer about the VM."""

    wanted: Wanted
    remote: Tuple[Record, ...]
    """The disks that read from the store."""


def why_not(vm: Vm) -> str:
    """Return why the disks of a VM cannot be detached now, '' if they can."""
    if vm.is_running or vm.state == VmState.POWEROFF:
        return ""
    if vm.is_active:
        return f"something is under way in it (LCM state {vm.lcm_state})"
    return f"it is neither running nor powered off (state {vm.state})"


def wanted(vm: Vm, location: str, disks: Optional[Collection[int]] = None) -> Wanted:
    """Return a VM to detach below its host's DATASTORE_LOCATION; raise BadArguments for a bad deploy id."""
    vm_dir = f"{location}/{vm.system_datastores[-1] if vm.system_datastores else -1}/{vm.id}"
    domain = running_domain(vm) if vm.is_active else ""
    return Wanted(vm.id, vm.host, vm_dir, domain, None if disks is None else tuple(sorted(disks)))


def due(vm: Vm, images: Mapping[int, Image], datastores: Mapping[int, Datastore]) -> Tuple[int, ...]:
    """Return a running VM's disks whose images want them detached without request; raise BadAttribute."""
    found = []
    for disk in vm.disks:
        image = images.get(disk.image_id)
        datastore = datastores.get(image.store_id) if image else None
        if image is None or datastore is None or image.is_persistent or not vm.is_active:
            continue
        if DETACH.value(image, datastore) == "after-boot":
            found.append(disk.id)
    return tuple(found)


def found(asked: Wanted, answer: DescribedVm) -> Found:
    """Return a VM by its host's answer to DescribeVm; raise BadRecord."""
    records = [record for record in described(answer) if record.place.is_remote]
    return Found(
        asked, tuple(record for record in records if asked.disks is None or record.disk in asked.disks)
    )


def images(vms: Sequence[Found]) -> Dict[ImageRef, List[str]]:
    """Return the images that need bases, with the hosts."""
    needed: Dict[ImageRef, List[str]] = {}
    for vm in vms:
        for record in vm.remote:
            hosts = needed.setdefault(record.of_image, [])
            if vm.wanted.host not in hosts:
                hosts.append(vm.wanted.host)
    return needed


class Staged(NamedTuple):
    """What became of the base of an image on a host."""

    generation: str
    why: str = ""
    """Why the base is not there."""


def on_host(
    vms: Sequence[Found], staged: Mapping[Tuple[ImageRef, str], Staged], rate: int
) -> Part[List[Row]]:
    """Detach the disks of VMs on one host, one VM after the other; return a row for each disk."""
    rows: List[Row] = []
    for vm in vms:
        rows += yield from _one(vm, staged, rate)
    return rows


def _one(vm: Found, staged: Mapping[Tuple[ImageRef, str], Staged], rate: int) -> Part[List[Row]]:
    asked = vm.wanted
    if not vm.remote:
        return [row(asked, how="skipped", why=NOTHING)]
    bases = [staged[record.of_image, asked.host] for record in vm.remote]
    lacking = next((base.why for base in bases if base.why), "")
    if lacking:
        return [row(asked, record, how="failed", why=lacking) for record in vm.remote]
    numbers = tuple(record.disk for record in vm.remote)
    step = DetachVm(
        asked.vm, asked.vm_dir, asked.domain, numbers, tuple(base.generation for base in bases), rate
    )
    try:
        answer = yield from ask(asked.host, step)
    except SemisharedError as e:
        return [row(asked, record, how="failed", why=e.line(), id=e.id) for record in vm.remote]
    how = "failed" if answer.error else "detached"
    return [
        row(asked, record, how=how, why=answer.error, id=answer.id, seconds=answer.seconds)
        for record in vm.remote
    ]


def row(asked: Wanted, record: Optional[Record] = None, **more: object) -> Row:
    """Return the row of a disk, or of a whole VM."""
    disk, image = (record.disk, record.of_image.id) if record else (-1, -1)
    return {
        "vm": asked.vm,
        "host": asked.host,
        "disk": disk,
        "image": image,
        "why": "",
        "id": "",
        "seconds": 0.0,
        **more,
    }
