# SPDX-License-Identifier: Apache-2.0
"""What `shares` finds, as figures: each way to a file system over the paper's baseline, the order of the
ways, and what daemons cost.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from figures import Figure

Samples = Mapping[str, Sequence[float]]
"""WAY/WHAT: what the two clients got together, by round; cpu/DAEMON/WAY/WHAT: its seconds for each GiB;
crc/host, crc/guest: MiB/s.
"""
BASE = "virtual"
WAYS = {
    "virtual": "a virtual server",
    "client": "client in the guest",
    "directory": "directory into the guest",
    "native": "native",
}
KINDS = {
    "write": ("written", "MiB/s"),
    "read": ("read", "MiB/s"),
    "create": ("files made", "1/s"),
    "stat": ("files looked up", "1/s"),
    "unlink": ("files removed", "1/s"),
}
EXPECTED: Dict[str, Dict[str, float]] = {
    "write": {"client": 1.5, "directory": 2.2, "native": 6.0},
    "read": {"client": 1.5, "directory": 2.2, "native": 8.0},
    "create": {"client": 3.0, "directory": 3.0, "native": 15.0},
    "stat": {"client": 0.8, "directory": 0.8, "native": 3.0},
    "unlink": {"client": 3.0, "directory": 3.0, "native": 12.0},
}
BECAUSE = {
    "write": "all that is done in an emulated guest costs several times as much; a virtual server is "
    "one guest more",
    "read": "as for writing; the paper's distances were smaller, its servers and disks being what "
    "limits reading",
    "create": "an exported file has to be on the disk before the server answers, CephFS's is in the memory "
    "of its metadata server",
    "stat": "a way through two kernels each, of which the virtual server's needs no cluster",
    "unlink": "as for making them",
}


class Pair(NamedTuple):
    """Two ways of which the paper found the first to be quicker."""

    what: str
    first: str
    second: str
    expected: float
    because: str


ORDER = (
    Pair(
        "write",
        "directory",
        "client",
        1.4,
        "the guest has no network and no protocol of Ceph's to go through",
    ),
    Pair("write", "client", "virtual", 1.5, "no second guest is on the way"),
    Pair("write", "directory", "virtual", 2.2, "both"),
    Pair(
        "write",
        "native",
        "directory",
        3.0,
        "no guest is on the way: were it slower, its guests would have seen a cache of theirs",
    ),
    Pair("read", "directory", "client", 1.4, "as for writing"),
    Pair("read", "directory", "virtual", 2.2, "as for writing"),
    Pair("read", "native", "directory", 4.0, "as for writing"),
)
"""Client over virtual is not among them for reading: the paper has them alike."""


def aggregate(amount: float, seconds: Sequence[float]) -> float:
    """Return what all clients got together in a second, `amount` each: they began at once, the slowest says
    when all of it was done.
    """
    return amount * len(seconds) / max(seconds)


def over_base(samples: Samples) -> List[Figure]:
    """Return each way's rates over those of the virtual server in the same round, as the paper's figure 4 has
    them.
    """
    found = []
    for what, (words, unit) in KINDS.items():
        base = samples[f"{BASE}/{what}"]
        found.append(Figure(f"shares/{what}/{BASE}", f"{words}, {WAYS[BASE]}", unit, base))
        for way in list(WAYS)[1:]:
            found.append(
                Figure(
                    f"shares/{what}/{way}",
                    f"{words}, {WAYS[way]}",
                    unit,
                    samples[f"{way}/{what}"],
                    WAYS[BASE],
                    base,
                    expected=EXPECTED[what][way],
                    because=BECAUSE[what],
                )
            )
    return found


def order(samples: Samples) -> List[Figure]:
    """Return for each pair of ORDER whether the first is the quicker one."""
    return [
        Figure(
            f"shares/order/{pair.what}/{pair.first}-{pair.second}",
            f"{KINDS[pair.what][0]}, {WAYS[pair.first]}",
            "MiB/s",
            samples[f"{pair.first}/{pair.what}"],
            WAYS[pair.second],
            samples[f"{pair.second}/{pair.what}"],
            expected=pair.expected,
            because=pair.because,
            budget=("ratio", ">=", 1.0),
            budget_from="the order of the paper's figure 4",
        )
        for pair in ORDER
    ]


def costs(samples: Samples) -> List[Figure]:
    """Return what the daemons on the hosts cost for each GiB, and how slow an emulated processor is."""
    found = []
    rows: Tuple[Tuple[str, str, float, str], ...] = (
        ("virtiofsd", "write", 0.4, "it copies once from the guest's memory, and nothing crosses a network"),
        ("virtiofsd", "read", 0.4, "it copies once into the guest's memory"),
        ("ceph-fuse", "write", 1.0, "the same requests come to it, from another process"),
        ("ceph-fuse", "read", 1.0, "the same requests come to it, from another process"),
    )
    for daemon, what, expected, because in rows:
        found.append(
            Figure(
                f"shares/cpu/{daemon}/{what}",
                f"processor of {daemon} for each GiB {KINDS[what][0]}, directory into the guest",
                "s/GiB",
                samples[f"cpu/{daemon}/directory/{what}"],
                "of ceph-fuse, native",
                samples[f"cpu/ceph-fuse/native/{what}"],
                expected=expected,
                because=because,
            )
        )
    found.append(
        Figure(
            "shares/processor",
            "CRC-32 of memory by a guest's processor",
            "MiB/s",
            samples["crc/guest"],
            "by the host's",
            samples["crc/host"],
            expected=0.1,
            because="each instruction is translated",
        )
    )
    return found


def all_of(samples: Samples) -> List[Figure]:
    """Return all figures."""
    return [*over_base(samples), *order(samples), *costs(samples)]
