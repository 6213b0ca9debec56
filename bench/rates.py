# SPDX-License-Identifier: Apache-2.0
"""Rates of a disk on each way from an image on Ceph to the host, on the very files that our drivers made
(`cluster`).

Raw on the host, an overlay over a base of the host, the image itself on the network, remote-first, and what
was remote-first before it was detached: each exported by qemu-storage-daemon on the host, fio its only user,
in turns within one run.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import block
from block import Disk, KiB, MiB
from figures import rounds_within

from lab import Node
from lab.ceph import POOL, REMOTE, USER

FOLDER = Path("/var/tmp/rates")
DATA_MIB = 512
WORKLOADS = {
    "read": ("read", 1 * MiB, 24, DATA_MIB // 2 * MiB),
    "random read": ("randread", 4 * KiB, 2048, (DATA_MIB // 2 + 24) * MiB),
    "write": ("write", 1 * MiB, 24, 0),
    "random write": ("randwrite", 4 * KiB, 2048, 24 * MiB),
}
"""Kind, size, number, and where they begin: one after the other as in figure 4a of the paper, anywhere as in
figure 4b.
"""
ROUND, MOST = 32 * MiB, 8
"""What a round uses, so that no block is written twice and none is read that was written; the image's data
lasts for so many.
"""
Samples = Dict[Tuple[str, str], List[float]]


def rbd(image: str, snapshot: str = "", user: str = USER) -> Dict[str, object]:
    """Return an image of the pool in QEMU's words."""
    found: Dict[str, object] = {
        "driver": "rbd",
        "pool": POOL,
        "image": image,
        "user": user,
        "conf": "/etc/ceph/ceph.conf",
    }
    return {**found, "snapshot": snapshot} if snapshot else found


def only_layer(host: Node, path: str) -> str:
    """Return the layer of a disk that our drivers have left at `path`, which has but one."""
    (layer,) = [found.name for found in host.path(f"{path}.snap").iterdir() if found.name.isdigit()]
    return f"{path}.snap/{layer}"


def layers(host: Node, name: str, path: str) -> Disk:
    """Return such a disk, over a base or over a snapshot in the pool."""
    inside = only_layer(host, path)
    told = json.loads(
        host.run(["qemu-img", "info", "--output=json", "-f", "qcow2", inside], user="root").stdout
    )
    below = str(told.get("backing-filename", ""))
    if not below.startswith("json:"):
        return Disk(name, Path(inside), base=str(Path(inside).parent / below))
    node = json.loads(below[len("json:") :])
    found = node.get("file", node)
    return Disk(name, Path(inside), network=rbd(found["image"], found["snapshot"], REMOTE))


def measure(host: Node, disks: Sequence[Disk], rounds: int) -> Samples:
    """Measure each workload on each disk, in an order of its own for every round."""
    samples: Samples = defaultdict(list)
    host.path(FOLDER).mkdir(exist_ok=True)
    with block.exported(FOLDER, disks, host) as address:
        for number in rounds_within(70, min(rounds, MOST)):
            order = [disk.name for disk in disks]
            random.Random(number).shuffle(order)
            for workload, (rw, size, count, at) in WORKLOADS.items():
                for name in order:
                    flush = 0 if "read" in rw else count // 4
                    rate = block.fio(
                        address[name],
                        rw,
                        size,
                        count=count,
                        seed=1,
                        flush=flush,
                        window=count * size,
                        at=at + number * ROUND,
                    )
                    samples[name, workload].append(rate * size / MiB)
    return samples
