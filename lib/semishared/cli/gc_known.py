# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared gc` that asks oned what there is, after the machines have been asked (plan/gc.py
says why then).
"""

from __future__ import annotations

import os
from typing import Iterator, Optional, Sequence

from ..errors import OnedUnavailable
from ..model import layout_pool, stores
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Image, Vm
from ..plan import gc, gc_places, gc_pools
from ..tools.this_machine import is_here


def known(
    oned: Oned,
    datastores: Sequence[Datastore],
    machines: Sequence[gc.Machine],
    pools: Sequence[gc_pools.Pool],
) -> gc.Known:
    """Return what oned knows of what the machines and pools hold; raise OnedUnavailable."""
    images = oned.images()
    hosts = {vm.id: vm.host for vm in oned.vms()}
    items = [(machine.name, item) for machine in machines for item in machine.facts["vms"]]
    places = {vm: place(oned, vm) for vm in sorted(gc_places.in_question(items, hosts))}
    return gc.Known(
        hosts,
        frozenset((image.number("DATASTORE_ID"), image.id) for image in images),
        frozenset(absolute(image.source, "SOURCE") for image in images if stores.is_path(image.source)),
        frozenset(image.source for image in images if not stores.is_path(image.source)),
        frozenset(image.source for image in images if not stores.is_path(image.source) and is_idle(image)),
        min({store.attribute("SEMISHARED_CLOUD") for store in datastores} - {""}, default=""),
        max(oned.newest_vm(max(hosts, default=0)), max(hosts, default=-1)),
        frozenset(
            row
            for vm in sorted(set(_strangers(machines, pools)) - set(hosts))
            for row in _disks(_past(oned, vm))
        ),
        {vm: found for vm, found in places.items() if found},
        {image.id: image.number("REGTIME") for image in images},
    )


def is_idle(image: Image) -> bool:
    """Tell whether no VM has an image."""
    return image.number("RUNNING_VMS") == 0


def place(oned: Oned, vm: int) -> Optional[gc_places.Place]:
    """Return where the files of a VM are, None if that is not certain."""
    try:
        return gc_places.place_of(oned.vm(vm), os.uname().nodename, is_here)
    except OnedUnavailable:
        return None


def _strangers(machines: Sequence[gc.Machine], pools: Sequence[gc_pools.Pool]) -> Iterator[int]:
    """Yield the VMs of clones that do not say whose they are."""
    for machine in machines:
        for store in machine.facts["stores"]:
            for side in store.get("sides", ()):
                yield from (clone["vm"] for clone in side["clones"] if not clone["cloud"])
    for pool in pools:
        yield from (said.vm for said in map(layout_pool.named, pool.images) if said and said.vm is not None)


def _past(oned: Oned, vm: int) -> Optional[Vm]:
    try:
        return oned.vm(vm)
    except OnedUnavailable:
        return None  # never there, or purged


def _disks(vm: Optional[Vm]) -> Iterator[tuple[int, int, str]]:
    for disk in vm.disks if vm else ():
        source = disk.source
        yield vm.id, disk.id, absolute(source, "SOURCE") if stores.is_path(source) else source  # type: ignore[union-attr]
