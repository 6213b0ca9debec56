# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared gc` that looks into the pools of datastores on Ceph, through their bridges
(plan/gc_pools.py).
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

from ..config import Config
from ..errors import SemisharedError
from ..model import steps as s
from ..model import steps_image, stores
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore
from ..plan import gc_pools
from ..plan.gc import Finding, Known
from ..wire.session import Session
from . import gc_known

Failed = Callable[[str, SemisharedError], None]
"""What is told of a machine that could not be asked."""


def _ask(host: str, step: s.Step, config: Config) -> Any:
    with Session(host, "gc", config) as session:
        (answer,) = session.run([step])
    return answer


def listed(datastores: Iterable[Datastore], config: Config, failed: Failed) -> list[gc_pools.Pool]:
    """Return the pools of image datastores of ours, with the names in them; to be asked before oned is."""
    found = []
    for datastore in datastores:
        bridge = ""
        try:
            access = stores.access(datastore)
            if datastore.type == 1 or not access.can.has_bridge:
                continue
            bridge, pool = stores.bridge(datastore, 0), stores.pool(datastore)
            names = _ask(bridge, steps_image.ListPool(access, pool), config)
            found.append(gc_pools.Pool(bridge, datastore.id, pool, access, tuple(names)))
        except SemisharedError as e:
            failed(bridge or f"datastore {datastore.id}", e)
    return found


def is_wanted(item: Finding) -> bool:
    """Tell whether a VM has come to want a snapshot that nobody read: of its image, which oned says first."""
    return (
        item.kind == "lent" and item.image is not None and not gc_known.is_idle(Oned().image(item.image.id))
    )


def left(
    pools: Iterable[gc_pools.Pool], known: Known, older_than: int, config: Config, failed: Failed
) -> list[Finding]:
    """Return what is left over in the pools."""
    found: list[Finding] = []
    for pool in pools:
        names, others = gc_pools.suspicious(pool, known), gc_pools.with_snapshots(pool)
        if not names and not others:
            continue
        try:
            looks = _ask(pool.machine, steps_image.LookAtImages(pool.access, pool.name, tuple(names)), config)
            snapshots = _ask(
                pool.machine, steps_image.FindSnapshots(pool.access, pool.name, tuple(others)), config
            )
        except SemisharedError as e:
            failed(pool.machine, e)
            continue
        found += gc_pools.find(pool, looks, older_than, known)
        found += gc_pools.snapshots(pool, snapshots, looks, older_than, known)
    return found
