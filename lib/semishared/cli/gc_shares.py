# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared gc` that asks the machines that make directories for guests (plan/gc_shares.py)."""

from __future__ import annotations

from typing import Any, Callable, Iterable

from ..config import Config
from ..errors import SemisharedError
from ..model import shares, stores
from ..model.steps_share import ListKeys, ListShares
from ..opennebula.xml import Datastore
from ..plan import gc_shares
from ..wire.session import Session


def listed(
    datastores: Iterable[Datastore], config: Config, failed: Callable[[str, SemisharedError], None]
) -> list[gc_shares.Shares]:
    """Return the shares of datastores of ours that have a root; to be asked before oned is."""
    found = []
    for datastore in datastores:
        if not stores.is_shares(datastore) or not datastore.attribute("SEMISHARED_STORE"):
            continue
        machine = f"datastore {datastore.id}"
        try:
            tree, machine = shares.tree(datastore), shares.bridge(datastore)
            with Session(machine, "gc", config) as session:
                answers: Any = session.run([ListShares(tree), ListKeys(tree)])
            rows, keys, cloud = answers[0]["shares"], answers[1]["keys"], answers[0].get("cloud", "")
            found.append(gc_shares.Shares(machine, datastore.id, tree, tuple(rows), tuple(keys), cloud))
        except SemisharedError as e:
            failed(machine, e)
    return found
