# SPDX-License-Identifier: Apache-2.0
"""How even a pool is after `semishared pool rebalance`, and how many bytes that takes: by the planner itself,
nothing is copied.

50 files of unequal size, none above 5 % of a device, in the ways in which they come to lie unevenly.
"""

from __future__ import annotations

import random
from typing import Dict, List, NamedTuple, Sequence

from figures import Figure
from orders import GiB, shares

from semishared.plan.device import balance, choose
from semishared.plan.device.balance import LIMIT, Item
from semishared.plan.device.choose import BOUND, Device

FILES = 50
LARGEST = 0.05
"""Of the smallest device."""
MEDIAN = 1 / 60
POOLS: Dict[str, Sequence[int]] = {
    "1, 2, 4": (1, 2, 4),
    "4 alike": (1, 1, 1, 1),
    "4 of 17 and 4 of 35": (17,) * 4 + (35,) * 4,
    "16, of 1 to 4": tuple(1 + number % 4 for number in range(16)),
}
STARTS = {
    "anyhow": "each on a device that was drawn, whatever it holds",
    "one has come": "placed as they were made, on all devices but the last",
    "have grown": "placed as they were made, all of them expected to become as large as the median",
}
MORE = {"16, of 1 to 4": 400}
"""Of a pool in which 50 files are 3 for a device, and no choice of them is even: measured, without a budget,
and with so many files.
"""


class Run(NamedTuple):
    """Fullest device by the mean, before and after; bytes moved, bytes above the mean."""

    before: float
    after: float
    moved: int
    excess: float


def rebalance(quick: bool) -> List[Figure]:
    """Rebalance many pools."""
    runs = 4 if quick else 60
    return [
        figure
        for name, sizes in POOLS.items()
        for files in (FILES, *((MORE[name],) if name in MORE else ()))
        for start in STARTS
        for figure in _figures(name, files, start, [_one(sizes, start, files, run) for run in range(runs)])
    ]


def _one(sizes: Sequence[int], start: str, files: int, run: int) -> Run:
    draw = random.Random(f"{start}/{run}")
    capacity = {uuid: int(share) for uuid, share in shares(sizes).items()}
    free, items, least = dict(capacity), [], min(capacity.values())
    for number in range(files):
        size = int(min(draw.lognormvariate(0, 0.8) * MEDIAN, LARGEST) * least)
        there = [Device(uuid, capacity[uuid], free[uuid]) for uuid in capacity]
        if start == "one has come":
            there.pop()
        key = f"{run}/{number}"
        uuid = (
            draw.choice(there).uuid if start == "anyhow" else choose.choose(there, key, int(least * MEDIAN))
        )
        free[uuid] -= size
        items.append(Item("layers", key, uuid, size, key))
    before = [Device(uuid, capacity[uuid], free[uuid]) for uuid in capacity]
    mean = sum(device.used for device in before) / sum(device.share for device in before)
    moves = balance.rebalance(before, items)
    for move in moves:
        free[move.item.device] += move.item.size
        free[move.target] -= move.item.size
    after = [Device(uuid, capacity[uuid], free[uuid]) for uuid in capacity]
    excess = sum(max(device.used - mean * device.share, 0) for device in before)
    return Run(
        balance.unevenness(before),
        balance.unevenness(after),
        sum(move.item.size for move in moves),
        excess,
    )


def _figures(name: str, files: int, start: str, runs: List[Run]) -> List[Figure]:
    of, what = f"rebalance/{name}/{files}/{start}", f"{files} files on {name}, {start}"
    has_budget = not (name in MORE and files == FILES)
    return [
        Figure(f"{of}/before", f"{what}: the same before", "times", [run.before for run in runs]),
        Figure(
            f"{of}/even",
            f"{what}: the fullest device, by the mean, after a rebalance",
            "times",
            [run.after for run in runs],
            expected=balance.AIM if has_budget else 1.5,
            because="what it aims at" if has_budget else "3 files for each device",
            budget=("worst value", "<=", BOUND) if has_budget else None,
            budget_from="max/mean of bytes",
            if_missed="never is more moved than 1.1 of what lies above the mean, and in one draw or two of "
            "60 that does not do",
        ),
        Figure(
            f"{of}/moved",
            f"{what}: moved",
            "GiB",
            [run.moved / GiB for run in runs],
            "what lay above the mean",
            [run.excess / GiB for run in runs],
            expected=0.9,
            because="what lies between the mean and the aim stays",
            budget=("worst ratio", "<=", LIMIT),
            budget_from="moved, of the excess above the mean",
            is_exact=True,
        ),
    ]
