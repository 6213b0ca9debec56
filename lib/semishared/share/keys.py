# SPDX-License-Identifier: Apache-2.0
"""Steps on the keys of shares (model/steps_share.py): each with its share held, so none is given for one that is being removed."""

from __future__ import annotations

from ..errors import SemisharedError, ShareRefused
from ..model.shares import Tree
from . import ceph_clients, life
from .ceph_clients import Key

LIMIT_S = 60.0
"""Limit of waiting for a share: whoever holds it waits for a manager that may not answer, and all VMs that have the share would for him."""


def give(tree: Tree, number: int, source: str, vm: int, readonly: bool, seq: int = -1) -> dict[str, str]:
    """Have a key for a share that is ready; return it, and what else a client has to know.

    Raise ShareRefused if `source` is not where it is: an oned whose database was restored gives ids anew.
    """
    clients = ceph_clients.of(tree)
    life.checked(tree)
    with life.alone(tree, number, LIMIT_S):
        known = life.ready(tree, number)
        if known.source != source:
            raise ShareRefused(f"image {number} is {source}, but its record in {tree.root} says {known.source}")
        return clients.give(Key(number, vm, readonly, seq))


def take(tree: Tree, number: int, vm: int, seq: int = -1) -> dict[str, int]:
    """Take back what a VM has had till this SEQ; return how many keys that were. All are tried; the first error is raised then."""
    clients = ceph_clients.of(tree)
    life.checked(tree)
    taken, failed = 0, list[SemisharedError]()
    for key in (key for key in ceph_clients.listed(tree.root) if key.vm == vm and number in (-1, key.image)):
        try:
            with life.alone(tree, key.image, LIMIT_S):
                taken += clients.take_until(key, seq)
        except SemisharedError as e:
            failed.append(e)
    if failed:
        raise failed[0]
    return {"taken": taken}


def listed(tree: Tree) -> dict[str, list[dict[str, object]]]:
    """Return who has keys."""
    life.checked(tree)
    return {"keys": [{**key._asdict(), "user": key.user(tree)} for key in ceph_clients.listed(tree.root)]}
