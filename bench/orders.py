# SPDX-License-Identifier: Apache-2.0
"""Where a pool of unequal devices puts things, by the function that the drivers ask: no device takes part,
nothing is timed.

Extents, of equal size and many, show an order alone: how evenly it spreads them, and what moves when a device
comes or goes. Files, of unequal size and few, show what is chosen by order and fill: how full the pool is
when its first device has no room left.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

from figures import Figure  # noqa: E402

from semishared.plan.device import choose  # noqa: E402

GiB = 1 << 30
POOLS: Dict[str, Sequence[int]] = {
    "1, 2, 4": (1, 2, 4),
    "4 of 17 and 4 of 35": (17,) * 4 + (35,) * 4,
    "16, of 1 to 4": tuple(1 + number % 4 for number in range(16)),
}
"""Capacities; the second is the pool of the paper that describes Share for hosts."""
MOVED = {"share": 1.6, "rendezvous": 1.0}
WHY = {
    "share": "each device that comes or goes changes the lengths of all intervals",
    "rendezvous": "what one device draws does not depend on the others",
}
HASH = "hash"
"""In the place of an order: by rendezvous alone, whatever the fill."""


def orders(quick: bool) -> List[Figure]:
    """Compare the orders side by side."""
    samples, extents, runs = (2, 1000, 4) if quick else (4, 4000, 40)
    found = []
    for name, sizes in POOLS.items():
        for order in choose.ORDERS:
            found += _extents(name, sizes, order, samples, extents)
        for way in (HASH, *choose.ORDERS):
            found.append(_files(name, sizes, way, runs))
    return found


def shares(sizes: Sequence[int]) -> Dict[str, float]:
    """Return bytes by the names of devices."""
    return {f"{number}-{size}": float(size * 100 * GiB) for number, size in enumerate(sizes)}


def _extents(name: str, sizes: Sequence[int], order: str, samples: int, extents: int) -> List[Figure]:
    """Place extents, add the largest device once more, take the last one out; of each sample the names are
    others.
    """
    before = shares(sizes)
    more = {**before, "new": max(before.values())}
    gone = list(before)[-1]
    fewer = {uuid: share for uuid, share in before.items() if uuid != gone}
    fair, added, due, removed, left = [], [], [], [], []
    for sample in range(samples):
        keys = [f"{sample}/{number}" for number in range(extents)]
        was, now, then = (
            [choose.ORDERS[order](key, shares)[0] for key in keys] for shares in (before, more, fewer)
        )
        whole = sum(before.values())
        fair.append(max(was.count(uuid) * whole / share for uuid, share in before.items()) / extents)
        added.append(sum(a != b for a, b in zip(was, now)) / extents)
        due.append(now.count("new") / extents)
        removed.append(sum(a != b for a, b in zip(was, then)) / extents)
        left.append(was.count(gone) / extents)
    budget = ("ratio", "<=", 1.05) if order == choose.DEFAULT else None
    moved: Dict[str, Any] = {
        "expected": MOVED[order],
        "because": WHY[order],
        "budget": budget,
        "budget_from": "moved, of the least possible",
        "is_exact": True,
    }
    of = f"orders/{name}/{order}"
    return [
        Figure(
            f"{of}/fair",
            f"{name}, {order}: the fullest device, of its share",
            "times",
            fair,
            expected=1.03,
            because=f"chance alone, with {extents} extents",
        ),
        Figure(
            f"{of}/added",
            f"{name}, {order}: moved when a device comes",
            "of all",
            added,
            "what the new one takes",
            due,
            **moved,
        ),
        Figure(
            f"{of}/removed",
            f"{name}, {order}: moved when a device goes",
            "of all",
            removed,
            "what that one had",
            left,
            **moved,
        ),
    ]


def _files(name: str, sizes: Sequence[int], way: str, runs: int) -> Figure:
    """Place overlays, of which nobody knows how large they will be, until the first device would overflow."""
    found = []
    for run in range(runs):
        draw = random.Random(f"{name}/{run}")
        free = dict(shares(sizes))
        whole, number = sum(free.values()), 0
        # Of median size, a twelfth of the smallest device.
        unit = min(free.values()) / 12
        while min(free.values()) >= 0:
            size, number = draw.lognormvariate(0, 0.8) * unit, number + 1
            devices = [
                choose.Device(uuid, int(share), int(free[uuid])) for uuid, share in shares(sizes).items()
            ]
            if way == HASH:
                uuid = choose.rendezvous(f"{run}/{number}", shares(sizes))[0]
            else:
                uuid = choose.choose(devices, f"{run}/{number}", int(unit), order=way)
            free[uuid] -= size
        found.append(1 - sum(max(left, 0) for left in free.values()) / whole)
    what = "by the hash alone" if way == HASH else f"{way} and fill"
    return Figure(
        f"orders/{name}/{way}/full",
        f"{name}, {what}: how full the pool is when the first device overflows",
        "of all",
        found,
        expected=0.6 if way == HASH else 0.85,
        because="a hash spreads numbers of files, and not their bytes"
        if way == HASH
        else "what is not known is only how large the last files become",
    )
