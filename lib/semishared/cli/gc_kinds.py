# SPDX-License-Identifier: Apache-2.0
"""The kinds of things that `semishared gc` looks for: what oned knows, shares, pools, stray directories.

oned is asked after the machines (plan/care/gc.py says why).
"""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Iterator, Optional, Sequence

from ..config import Config
from ..errors import OnedUnavailable, SemisharedError
from ..model import steps as s
from ..model.attributes import CLOUD, STORE
from ..model.disk import commit_steps as c
from ..model.share import share
from ..model.share.steps import ListKeys, ListShares
from ..model.store import access, image_steps, rbd_names, template
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Image, Vm
from ..plan.care import gc, gc_places, gc_stores
from ..plan.care.gc import Finding, Known
from ..plan.disk.disks import running_domain
from ..tools.this_machine import is_here
from ..wire.session import Session


def known(
    oned: Oned,
    datastores: Sequence[Datastore],
    machines: Sequence[gc.Machine],
    pools: Sequence[gc_stores.Pool],
) -> gc.Known:
    """Return what oned knows of what the machines and pools hold; raise OnedUnavailable."""
    images = oned.images()
    hosts = {vm.id: vm.host for vm in oned.vms()}
    items = [(machine.name, item) for machine in machines for item in machine.facts["vms"]]
    places = {vm: place_now(oned, vm) for vm in sorted(gc_places.in_question(items, hosts))}
    return gc.Known(
        hosts,
        frozenset((image.number("DATASTORE_ID"), image.id) for image in images),
        frozenset(absolute(image.source, "SOURCE") for image in images if access.is_path(image.source)),
        frozenset(image.source for image in images if not access.is_path(image.source)),
        frozenset(image.source for image in images if not access.is_path(image.source) and is_idle(image)),
        min({CLOUD.text(store) for store in datastores} - {""}, default=""),
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


def place_now(oned: Oned, vm: int) -> Optional[gc_places.Place]:
    """Return where the files of a VM are, None if that is not certain."""
    try:
        return gc_places.place_of(oned.vm(vm), os.uname().nodename, is_here)
    except OnedUnavailable:
        return None


def _strangers(machines: Sequence[gc.Machine], pools: Sequence[gc_stores.Pool]) -> Iterator[int]:
    """Yield the VMs of clones that do not say whose they are."""
    for machine in machines:
        for store in machine.facts["stores"]:
            for side in store.get("sides", ()):
                yield from (clone["vm"] for clone in side["clones"] if not clone["cloud"])
    for pool in pools:
        yield from (said.vm for said in map(rbd_names.named, pool.images) if said and said.vm is not None)


def _past(oned: Oned, vm: int) -> Optional[Vm]:
    try:
        return oned.vm(vm)
    except OnedUnavailable:
        return None  # never there, or purged


def _disks(vm: Optional[Vm]) -> Iterator[tuple[int, int, str]]:
    for disk in vm.disks if vm else ():
        source = disk.source
        yield vm.id, disk.id, absolute(source, "SOURCE") if access.is_path(source) else source  # type: ignore[union-attr]


def shares_listed(
    datastores: Iterable[Datastore], config: Config, failed: Callable[[str, SemisharedError], None]
) -> list[gc_stores.Shares]:
    """Return the shares of datastores of ours that have a root; to be asked before oned is."""
    found = []
    for datastore in datastores:
        if not template.is_shares(datastore) or not STORE.text(datastore):
            continue
        machine = f"datastore {datastore.id}"
        try:
            tree, machine = share.tree(datastore), share.bridge(datastore)
            with Session(machine, "gc", config) as session:
                answers: Any = session.run([ListShares(tree), ListKeys(tree)])
            rows, keys, cloud = answers[0]["shares"], answers[1]["keys"], answers[0].get("cloud", "")
            found.append(gc_stores.Shares(machine, datastore.id, tree, tuple(rows), tuple(keys), cloud))
        except SemisharedError as e:
            failed(machine, e)
    return found


Failed = Callable[[str, SemisharedError], None]
"""What is told of a machine that could not be asked."""


def _ask(host: str, step: s.Step, config: Config) -> Any:
    with Session(host, "gc", config) as session:
        (answer,) = session.run([step])
    return answer


def pools_listed(datastores: Iterable[Datastore], config: Config, failed: Failed) -> list[gc_stores.Pool]:
    """Return the pools of image datastores of ours, with the names in them; to be asked before oned is."""
    found = []
    for datastore in datastores:
        bridge = ""
        try:
            access = template.access(datastore)
            if datastore.is_system or not access.can.has_bridge:
                continue
            bridge, pool = template.bridge(datastore, 0), template.pool(datastore)
            names = _ask(bridge, image_steps.ListPool(access, pool), config)
            found.append(gc_stores.Pool(bridge, datastore.id, pool, access, tuple(names)))
        except SemisharedError as e:
            failed(bridge or f"datastore {datastore.id}", e)
    return found


def is_pool_wanted(item: Finding) -> bool:
    """Tell whether a VM has come to want a snapshot that nobody read: of its image, which oned says first."""
    return item.kind == "lent" and item.image is not None and not is_idle(Oned().image(item.image.id))


def left_in_pools(
    pools: Iterable[gc_stores.Pool], known: Known, older_than: int, config: Config, failed: Failed
) -> list[Finding]:
    """Return what is left over in the pools.

    Each pool is looked into through its datastore's bridge (plan/care/gc_stores.py).
    """
    found: list[Finding] = []
    for pool in pools:
        names, others = gc_stores.suspicious(pool, known), gc_stores.with_snapshots(pool)
        if not names and not others:
            continue
        try:
            looks = _ask(pool.machine, image_steps.LookAtImages(pool.access, pool.name, tuple(names)), config)
            snapshots = _ask(
                pool.machine, image_steps.FindSnapshots(pool.access, pool.name, tuple(others)), config
            )
        except SemisharedError as e:
            failed(pool.machine, e)
            continue
        found += gc_stores.find_in_pool(pool, looks, older_than, known)
        found += gc_stores.snapshots(pool, snapshots, looks, older_than, known)
    return found


def remove_strays(
    session: Session, item: gc.Finding, place: gc_places.Place, config: Config, failed: Failed
) -> str:
    """Remove a stray directory on the machine of `session`; return why it is kept, '' if it is gone.

    Looked at once more: whether it is another directory than the one where the VM belongs, whether that is
    whole, and whether oned still has the VM there and is not at work on it. The removal itself looks for the
    domain and for changes. If the machine where the VM belongs cannot be asked any more, `failed` is told so.
    """
    location = item.path.rsplit("/", 2)[0]
    home = f"{location}/{place.system}/{item.vm}"
    (found,) = session.run([s.MarkVm(item.vm, item.path)])
    assert isinstance(found, dict)
    token, seen = str(found["token"]), str(found["seen"])
    try:
        with Session(place.machine, "gc", config) as other:
            (looked,) = other.run([s.LookForVm(item.vm, home, token, seen)])
    except SemisharedError as e:
        failed(place.machine, e)
        return f"{place.machine}, where VM {item.vm} belongs, cannot be asked: {e.detail}"
    finally:
        session.run([s.UnmarkVm(item.vm, item.path, token)])
    assert isinstance(looked, dict)
    if looked["same"]:
        return (
            f"it is the directory of {place.machine}: the system datastore is shared, which none of "
            f"ours may be"
        )
    if not looked["whole"] or (found["disks"] and not looked["disks"]):
        return f"there is no whole directory of VM {item.vm} on {place.machine}"
    if found["seq"] > looked["seq"]:
        return f"it is of SEQ {found['seq']} of the VM's history, what is on {place.machine} is older"
    oned = Oned()
    now = place_now(oned, item.vm)
    if now is None or (now.machine, now.system) != (place.machine, place.system):
        return "oned is at work on the VM"
    domain = running_domain(oned.vm(item.vm)) if item.libvirt else ""
    (stale,) = session.run([c.KeepStale(item.vm, item.path, seen)])
    assert isinstance(stale, dict)
    (done,) = session.run([s.ReleaseVm(item.vm, item.path, domain, str(stale["seen"]))])
    return str(done.get("kept", "")) if isinstance(done, dict) else ""
