# SPDX-License-Identifier: Apache-2.0
"""Which moves `semishared pool drain` and `rebalance` can make, in which order, and their output.

Bases come first: a disk that is moved while its guest runs then opens the base in its new place.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Sequence

from ...errors import BadArguments
from ...model.base import names as base_names
from ...model.device.names import BASES, LAYERS
from ...model.device.steps import HeldItem, MoveBase, MoveLayers, PoolDevice
from ...model.disk import names as disk_names
from ...model.refs import DiskRef
from ...named import NamedTuple
from ...opennebula.states import VmState
from ...opennebula.xml import Vm
from ..disk.disks import running_domain
from . import choose
from .balance import Item, Move

Row = Dict[str, Any]
"""{"what", "vm", "disk" (-1 of a base), "from", "to", "bytes", "how": moved|would move|stays|failed, "why",
"id", "seconds"}.
"""


class Held(NamedTuple):
    """A host's word of what lies on a device."""

    item: Item
    said: HeldItem

    @property
    def is_kept(self) -> bool:
        """Whether it is a diff that was kept when its VM was deleted."""
        own = disk_names.beside_named(self.said.vm_dir.rpartition("/")[2])
        return own is not None and own.kind == "kept"

    @property
    def what(self) -> str:
        if self.item.part == BASES:
            return f"base {self.item.name}"
        return f"VM {self.said.vm} disk {self.said.disk}{' (kept)' if self.is_kept else ''}"


def held(items: Iterable[HeldItem]) -> List[Held]:
    """Return a host's answer to ListHeld."""
    return [Held(item(said), said) for said in items]


def item(said: HeldItem) -> Item:
    """Return what one of them is to a plan."""
    key = base_names.prefix_of(said.name) if said.part == BASES else f"{said.vm}-{said.disk}"
    return Item(said.part, said.name, said.device, said.bytes, key, said.classes)


def devices(found: Iterable[PoolDevice]) -> List[choose.Device]:
    """Return the devices of a ListHeld that are there and can be written to."""
    return [
        choose.Device(device.uuid, device.total, device.free, device.weight, device.class_)
        for device in found
        if not device.state and device.total
    ]


def named(found: Sequence[PoolDevice], word: str, host: str) -> str:
    """Return the UUID of the device of that path (of several the one that is well) or UUID.

    Raise BadArguments if there is none.
    """
    for device in sorted(found, key=lambda device: bool(device.state)):
        if word.rstrip("/") in (device.path, device.uuid):
            return device.uuid
    raise BadArguments(
        f"{word} is no device of the pool of {host}: "
        f"{', '.join(device.path for device in found) or 'it has none'}"
    )


def why_not(vm: Optional[Vm], host: str) -> str:
    """Return why a disk of a VM, as oned has it now, stays where it is; '' if it can move, even running."""
    if vm is None:
        return "OpenNebula has no such VM: semishared gc"
    if vm.host != host:
        return f"its VM is on {vm.host or 'no host'}: semishared gc"
    if vm.is_running or vm.state in (VmState.POWEROFF, VmState.SUSPENDED):
        return ""
    if vm.is_active:
        return f"something is under way in its VM (LCM state {vm.lcm_state})"
    return f"its VM neither runs nor is powered off or suspended (state {vm.state})"


def staying(
    found: Sequence[Held], vms: Mapping[int, Optional[Vm]], host: str, memory: Collection[str] = ()
) -> Dict[Item, str]:
    """Return why items stay where they are, for those that cannot move now; `memory`: devices in memory."""
    why = {}
    for held in found:
        own = disk_names.beside_named(held.said.vm_dir.rpartition("/")[2])
        if held.item.part == LAYERS and own and not held.is_kept:
            why[held.item] = f"a move or a removal of its VM is not ended ({own.kind}): semishared gc"
        elif held.item.part == LAYERS and not own:
            vm = vms.get(held.said.vm)
            why[held.item] = why_not(vm, host)
            if vm is not None and vm.is_active:
                why[held.item] = why[held.item] or _why_not_live(held, vm, memory)
    return {item: text for item, text in why.items() if text}


def _why_not_live(held: Held, vm: Vm, memory: Collection[str]) -> str:
    """Return why a disk stays where it is while its guest runs."""
    if held.item.device in memory:
        return "it is in memory, and its VM runs: it moves while that is off"
    if any(disk.luks_secret for disk in vm.disks if disk.id == held.said.disk):
        return (
            "it is encrypted (LUKS_SECRET), and QEMU, while its VM runs, would write it decrypted: it "
            "moves while that is off"
        )
    return ""


def no_room(held: Held) -> str:
    """Return why no device takes what is held."""
    of_class = (
        f" of class {' or '.join(held.item.tried or held.item.classes)} (SEMISHARED_CLASS)"
        if held.item.classes
        else ""
    )
    return f"no other device{of_class} has room for it"


def step(held: Held, move: Move, root: str, vm: Optional[Vm], rate: int) -> MoveBase | MoveLayers:
    """Return the step that makes a move."""
    if held.item.part == BASES:
        return MoveBase(root, held.item.name, move.target, rate)
    # Also of a VM that is off for oned: its host sees whether it runs.
    domain = running_domain(vm) if vm is not None and not held.is_kept else ""
    disk = DiskRef(held.said.vm, held.said.disk, held.said.vm_dir)
    return MoveLayers(disk, domain, held.item.name, move.target, rate)


def in_order(moves: Sequence[Move]) -> List[Move]:
    """Return moves in the order in which they are made."""
    return sorted(moves, key=lambda move: move.item.part != BASES)


def row(held: Held, target: str, path: Callable[[str], str], **more: object) -> Row:
    """Return the row of one thing; `path`: of a device, by its UUID."""
    where = {"from": path(held.item.device), "to": path(target) if target else ""}
    return {
        "what": held.what,
        "vm": held.said.vm,
        "disk": held.said.disk,
        **where,
        "bytes": held.item.size,
        "why": "",
        "id": "",
        "seconds": 0.0,
        **more,
    }


def reading_on(
    found: Sequence[Held], uuid: str, vms: Mapping[int, Optional[Vm]], rows: Sequence[Row]
) -> List[int]:
    """Return the running VMs over bases of a device: QEMU keeps those open until it opens them again.

    It has done so for disks that went to another device after their base, as `rows` say.
    """
    names = [
        name
        for held in found
        if held.item.part == BASES and held.item.device == uuid
        for name in held.said.leases
    ]
    again = {(row["vm"], row["disk"]) for row in rows if row["how"] == "moved"}
    numbers = sorted(
        {leased[0] for leased in map(base_names.leased_to, names) if leased and leased not in again}
    )
    running = [(number, vms.get(number)) for number in numbers]
    return [number for number, vm in running if vm is not None and vm.is_active]
