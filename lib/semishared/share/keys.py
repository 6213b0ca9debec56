# SPDX-License-Identifier: Apache-2.0
"""Steps on the keys of shares (model/share/steps.py).

Each holds its share's lock, so no key is given for a share that is being removed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from ..errors import BadRecord, MissingImage, SemisharedError, ShareRefused
from ..model.share.share import Tree
from . import ceph_clients, life
from .ceph_clients import Clients, Key

LIMIT_S = 60.0
"""Limit of waiting for a share: whoever holds it waits for a manager that may not answer, and all VMs that
have the share would for him.
"""


def give(tree: Tree, number: int, source: str, vm: int, readonly: bool, seq: int = -1) -> dict[str, str]:
    """Have a key for a share that is ready; return it, and what else a client has to know.

    Raise ShareRefused if `source` is not where it is: an oned whose database was restored gives ids anew.
    """
    with _held(tree, number, source) as clients:
        return clients.give(Key(number, vm, readonly, seq))


def shown(tree: Tree, number: int, source: str, vm: int) -> dict[str, str]:
    """Return the key that a VM has, as `give`; raise MissingImage if it has none."""
    with _held(tree, number, source) as clients:
        known = [key for key in ceph_clients.listed(tree.root) if (key.image, key.vm) == (number, vm)]
        if not known:
            raise MissingImage(
                f"VM {vm} has no key for image {number}: it gets one when it boots "
                f"(SEMISHARED_SHARE_ACCESS = client)"
            )
        latest = max(known, key=lambda key: (not key.wrong, key.seq))
        if latest.wrong:
            raise BadRecord(latest.wrong)
        return clients.told(latest)


@contextmanager
def _held(tree: Tree, number: int, source: str) -> Iterator[Clients]:
    clients = ceph_clients.of(tree)
    life.checked(tree)
    with life.alone(tree, number, LIMIT_S):
        known = life.made(tree, number)
        if known.source != source:
            raise ShareRefused(
                f"image {number} is {source}, but its record in {tree.root} says {known.source}"
            )
        yield clients


def take(tree: Tree, number: int, vm: int, seq: int = -1) -> dict[str, int]:
    """Take back what a VM has had till this SEQ; return how many keys that were. All are tried; the first
    error is raised then.
    """
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
    """Return who has keys, and of whom what is `wrong`."""
    life.checked(tree)
    return {"keys": [_row(key, tree) for key in ceph_clients.listed(tree.root)]}


def _row(key: Key, tree: Tree) -> dict[str, object]:
    row = {**key._asdict(), "user": key.user(tree)}
    wrong = row.pop("wrong")
    return {**row, "wrong": {"id": BadRecord.id, "detail": wrong}} if wrong else row
