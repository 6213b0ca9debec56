# SPDX-License-Identifier: Apache-2.0
"""What is expected of a virtual cluster, and what its samples say (cluster.py takes them)."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import rates
from figures import Figure, median

HOSTS = 2
COUNTS = (1, 2, 4, 8)
FITTED, FURTHER = (1, 2, 4), 16
PHASES = ("boot", "detach", "commit", "end")
DATA_MIB, WORKING_SET_MIB = 256, 16
PER_SECOND = 50
"""Blocks of 64 KiB that a guest writes while it is detached."""

Samples = Dict[Tuple[str, str], List[float]]


def all_of(samples: Samples) -> List[Figure]:
    """Return all figures of which there are samples."""
    return [
        *_phases(samples, [count for count in COUNTS if samples["boot", f"{count} s"]]),
        *_rates(samples),
        *_gap(samples),
    ]


def line(points: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
    """Return a and b of a + b * x, fitted by least squares."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


EXPECTED_S = {"boot": (4.0, 3.0), "detach": (8.0, 0.8), "commit": (4.0, 1.0), "end": (2.0, 0.5)}
"""Seconds of one VM, and of each that is added; said before the first measurement: an emulated boot takes 2.5
s of one of two cores.
"""
EXPECTED_MIB = {
    "boot": (0.0, WORKING_SET_MIB),
    "detach": (DATA_MIB, 0.0),
    "commit": (0.0, 0.0),
    "end": (0.0, 0.0),
}
"""MiB read from the pool, likewise: what the guests read; the image once, whatever the number of hosts;
nothing.
"""
WITHIN = 1.15


def said(count: int) -> str:
    return f"{count} VMs" if count > 1 else "one VM"


def busiest(count: int) -> int:
    """Return how many of so many VMs are on the host that has most."""
    return -(-count // HOSTS)


def predicted(seconds: Dict[int, float], count: int) -> float:
    """Return what a line through the seconds of FITTED says of another number of VMs."""
    first, slope = line([(busiest(fitted), seconds[fitted]) for fitted in FITTED])
    return first + slope * busiest(count)


def _phases(samples: Samples, counts: Sequence[int]) -> List[Figure]:
    found = []
    for name, (one, more) in EXPECTED_S.items():
        for count in counts:
            first, each = EXPECTED_MIB[name]
            found += [
                Figure(
                    f"cluster/{name}/{count}",
                    f"{name} of {said(count)} at once",
                    "s",
                    samples[name, f"{count} s"],
                    expected=one + more * (count - 1),
                    because="two cores emulate all guests",
                ),
                Figure(
                    f"cluster/{name}-read/{count}",
                    f"read from the pool by {name} of {said(count)}",
                    "MiB",
                    samples[name, f"{count} MiB"],
                    expected=first + each * count,
                    because="a guest reads what it needs, and a detach the image once",
                ),
            ]
        last = COUNTS[-1]
        if last not in counts:
            continue
        fitted = {count: median(samples[name, f"{count} s"]) for count in FITTED}
        foretold = predicted(fitted, last)
        found.append(
            Figure(
                f"cluster/{name}-model",
                f"{name} of {last} VMs",
                "s",
                samples[name, f"{last} s"],
                f"of the line through {', '.join(map(str, FITTED))} by VMs of the busiest host",
                [foretold],
                paired=False,
                expected=1.0,
                because="each VM costs its host the same",
                budget=("ratio", "within", WITHIN),
                budget_from="a model that may be drawn further",
                if_missed="all VMs, their hosts and the store share two cores: from some number of VMs on "
                "one more costs all of them",
            )
        )
        if found[-1].holds() and foretold >= fitted[FITTED[0]]:  # a line that falls says nothing of more VMs
            what = f"{name} of {FURTHER} VMs, not measured: by that line"
            found.append(Figure(f"cluster/{name}-drawn/{FURTHER}", what, "s", [predicted(fitted, FURTHER)]))
    return found


UNKNOWN = (
    "where this comes from was not found out: the layer is made as the other overlay's, and lies over "
    "a base of the same content"
)
WAYS = ("raw", "overlay", "in place", "remote-first", "detached")


def _rates(samples: Samples) -> List[Figure]:
    found = []
    for workload in rates.WORKLOADS:
        for way in WAYS[1:]:
            after = way == "detached"
            against = "overlay" if after else "raw"
            found.append(
                Figure(
                    f"cluster/rate/{workload}/{way}",
                    f"{workload}, {way}",
                    "MiB/s",
                    samples[way, workload],
                    against,
                    samples[against, workload],
                    expected=1.0 if after else None,
                    because="it is an overlay like any other" if after else "",
                    budget=("ratio", ">=", 0.97) if after else None,
                    budget_from="after detach" if after else "",
                    if_missed=UNKNOWN if after else "",
                )
            )
    return found


def _gap(samples: Samples) -> List[Figure]:
    return [
        Figure(
            "cluster/gap",
            f"longest wait of one of {PER_SECOND} writes per second while a guest is detached",
            "ms",
            samples["gap", "switch"],
            "while nothing happens to it",
            samples["gap", "control"],
            expected=3.0,
            because="it rests for the moment of the switch, until QEMU has flushed",
        )
    ]
