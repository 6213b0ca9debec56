# SPDX-License-Identifier: Apache-2.0
"""Steps on the keys of shares (model/steps_share.py): each with its share held, so none is given for one that is being removed."""

from __future__ import annotations

from ..model.shares import Tree
from . import ceph_clients, life
from .ceph_clients import Key


def give(tree: Tree, number: int, vm: int, readonly: bool) -> dict[str, str]:
    """Have a key for a share that is ready; return it, and what else a client has to know."""
    clients = ceph_clients.of(tree)
    life.checked(tree)
    with life.alone(tree, number):
        life.ready(tree, number)
        return clients.give(Key(number, vm, readonly))


def take(tree: Tree, number: int, vm: int) -> dict[str, int]:
    """Take back what a VM has; return how many keys that were."""
    clients = ceph_clients.of(tree)
    life.checked(tree)
    keys = [key for key in ceph_clients.listed(tree.root) if key.vm == vm and number in (-1, key.image)]
    for key in keys:
        with life.alone(tree, key.image):
            clients.take(key)
    return {"taken": len(keys)}


def listed(tree: Tree) -> dict[str, list[dict[str, object]]]:
    """Return who has keys."""
    life.checked(tree)
    return {"keys": [{**key._asdict(), "user": key.user(tree)} for key in ceph_clients.listed(tree.root)]}
