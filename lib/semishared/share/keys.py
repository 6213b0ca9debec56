# SPDX-License-Identifier: Apache-2.0
"""Steps on the keys of shares (model/share/steps.py).

Each holds its share's lock, so no key is created for a share that is being removed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from ..errors import BadRecord, MissingImage, SemisharedError, ShareRefused
from ..model.refs import Refusal
from ..model.share.share import Tree
from ..model.share.steps import GivenKey, HeldKey, HeldKeys, TakenKeys
from . import ceph_clients, life
from .ceph_clients import Clients, Key

LIMIT_S = 60.0
"""Seconds to wait for a share's lock: its holder may wait for a manager that does not answer, and all VMs
with the share would wait for that.
"""


def give(tree: Tree, number: int, source: str, vm: int, readonly: bool, seq: int = -1) -> GivenKey:
    """Create a key for a ready share; return it with what a client needs.

    Raise ShareRefused if the share is not at `source`: an oned with a restored database reuses ids.
    """
    with _held(tree, number, source) as clients:
        return clients.give(Key(number, vm, readonly, seq))


def shown(tree: Tree, number: int, source: str, vm: int) -> GivenKey:
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
            says = f"its record in {tree.root} says {known.source}"
            raise ShareRefused(f"image {number} is {source}, but {says}")
        yield clients


def take(tree: Tree, number: int, vm: int, seq: int = -1) -> TakenKeys:
    """Remove a VM's keys of SEQs up to `seq`; return how many. The first error is raised after all tries."""
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
    return TakenKeys(taken)


def listed(tree: Tree) -> HeldKeys:
    """Return all keys with their holders, and what is `wrong` with a key's note."""
    life.checked(tree)
    return HeldKeys([_held_key(key, tree) for key in ceph_clients.listed(tree.root)])


def _held_key(key: Key, tree: Tree) -> HeldKey:
    wrong = Refusal(BadRecord.id, key.wrong) if key.wrong else None
    return HeldKey(key.image, key.vm, key.readonly, key.seq, key.user(tree), wrong)
