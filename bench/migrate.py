# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM with a disk of its own: what crosses to the target, how long it takes, what the
guest notices.

Between two hosts of a lab, forth and back in turns: the VM as our drivers move it (an overlay, whose base
both hosts have), the same VM with the same writes and all disks in place, and the first VM by `virsh migrate
--copy-storage-all`, into an empty overlay that was made before. An image of 2 GiB, of which the guest has
written 64 MiB as a whole, or 4 KiB here and there; meanwhile it is almost idle, writes 50 blocks of 64 KiB a
second, or as many as it can.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List, Tuple

import block
from figures import Figure, rounds_within

from lab import Node
from lab.cloud import STORE, Cloud
from lab.guest import LINUX, Guest

SIZE_MIB, BASE_MIB = 2048, 256
OWN_KIB = 64 << 10
SCATTERED, STRIDE_KIB = 512, 512
"""Blocks of 4 KiB, and from one to the next."""
VIRSH = ["virsh", "-q", "-c", "qemu:///system"]
UNIT = 64 << 10
"""Bytes that libvirt mirrors for a write, however small."""

LOADS = {"idle": 5, "writing": 50, "busy": 2000}
"""Blocks of 64 KiB that the guest writes per second while it moves; the last is more than it can."""
BEFORE_S = 4.0
"""How long it writes before it moves: what it wrote per second then is what it keeps some part of."""

Samples = Dict[Tuple[str, str], List[float]]


def _received(node: Node) -> int:
    return int(node.path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


class Rig:
    """The VMs: `own` with an overlay, `shared` with the same image in place."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.vms = {name: self._vm(name, persistent=name == "shared") for name in ("own", "shared")}

    def _vm(self, name: str, persistent: bool) -> int:
        cloud = self.cloud
        system = cloud.os_image(f"os-{name}", system=LINUX, persistent=True)
        path = cloud.upload_file(f"{name}.img")
        block.fill(path, BASE_MIB << 20)
        with open(path, "r+b") as file:
            file.truncate(SIZE_MIB << 20)
        cloud.give(path)
        data = cloud.oned.image_create(
            STORE, name, path=f"/var/tmp/{path.name}", type="DATABLOCK", persistent=persistent, prefix="vd"
        )
        path.unlink()
        return cloud.deploy(name, [{"IMAGE_ID": str(image)} for image in (system, data)])

    def guest(self, name: str) -> Guest:
        return self.cloud.guest(self.vms[name])

    def host(self, name: str) -> Node:
        return self.cloud.lab.node(self.cloud.oned.vm(self.vms[name]).last.host.name)

    def other(self, name: str) -> Node:
        return next(host for host in self.cloud.lab.hosts if host is not self.host(name))

    def allocated(self) -> int:
        """Return the bytes of the overlay's own files."""
        found = self.host("own").run(["du", "-B1", "-s", f"{self.cloud.vm_dir(self.vms['own'])}/disk.1.snap"])
        return int(found.stdout.split()[0])

    @contextmanager
    def _watched(
        self, guest: Guest, target: Node, load: str, after: Callable[[], Guest]
    ) -> Iterator[Dict[str, float]]:
        """Measure a move to `target`, done within the block; `after` returns the guest there."""
        found: Dict[str, float] = {}
        # Where nothing of its own is: what it writes meanwhile is counted by itself.
        guest.loop("vdb", "loop", (SIZE_MIB - 64) << 10, 32 << 10, LOADS[load])
        time.sleep(BEFORE_S)
        written, size, started = guest.loop_stat("vdb")["writes"], _received(target), time.monotonic()
        yield found
        found["seconds"], found["bytes"] = time.monotonic() - started, _received(target) - size
        now = after()
        meanwhile, seconds = now.loop_stat("vdb")["writes"] - written, time.monotonic() - started
        counts = now.loop_stop("vdb")
        if counts["errors"] or counts["mismatches"]:
            raise RuntimeError(f"{load}: {counts}")
        found.update(
            gap=counts["maxgap_ms"],
            writes=counts["writes"],
            kept=(meanwhile / seconds) / (written / BEFORE_S),
        )

    def move(self, name: str, load: str) -> Dict[str, float]:
        """Move a VM by our drivers; return what that took."""
        target = self.other(name)
        with self._watched(self.guest(name), target, load, lambda: self.guest(name)) as found:
            self.cloud.oned.vm_migrate(self.vms[name], target.name, how="live")
        still = re.search(r"stood still for (\d+) ms", self.cloud.said("migrate")[-1])
        found["downtime"] = float(still.group(1)) if still else float("nan")
        return found

    def stock(self, guest: Guest, here: Node, there: Node, load: str) -> Dict[str, float]:
        """Move the domain of `own`, wherever oned believes it, with all that its disk shows, as libvirt does
        it; `guest` goes along.
        """
        name = f"one-{self.vms['own']}"
        self._make_ready(here, there, name)

        def after() -> Guest:
            guest.moved(there)
            return guest.wait_up(60)

        words = [
            "--live",
            "--unsafe",
            "--copy-storage-all",
            "--migrate-disks",
            "vdb",
            name,
            f"qemu+ssh://{there.name}/system",
        ]
        with self._watched(guest, there, load, after) as found:
            here.run([*VIRSH, "migrate", *words], timeout=600)
        job = there.run([*VIRSH, "domjobinfo", "--completed", name]).stdout.decode()
        still = re.search(r"Total downtime: *(\d+)", job)
        found["downtime"] = float(still.group(1)) if still else float("nan")
        return found

    def _make_ready(self, here: Node, there: Node, name: str) -> None:
        """Have at `there` what libvirt expects, and an empty overlay over the base: what the guest sees is
        copied all the same.
        """
        lines = here.run([*VIRSH, "domblklist", name]).stdout.decode().splitlines()
        path = next(line.split()[1] for line in lines if line.split()[:1] == ["vdb"])
        directory = self.cloud.vm_dir(self.vms["own"])
        tar = f"tar -C / --exclude='*.snap/*' -cf - {directory[1:]} | ssh {there.name} 'tar -C / -xf -'"
        here.run(["bash", "-c", tar])
        chain = here.run(["qemu-img", "info", "-U", "--output=json", "-f", "qcow2", path]).stdout
        lease = str(json.loads(chain)["backing-filename"])
        there.run(["ln", "-f", f"{os.path.dirname(os.path.dirname(lease))}/image", lease])
        there.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", lease, "-F", "raw", path])

    def end(self) -> None:
        """Remove what libvirt has moved behind oned's back."""
        for host in self.cloud.lab.hosts:
            host.run([*VIRSH, "destroy", f"one-{self.vms['own']}"], check=False)
            host.run(["rm", "-rf", self.cloud.vm_dir(self.vms["own"])])


def migrate(quick: bool) -> List[Figure]:
    """Measure; `quick`: once each."""
    samples: Samples = defaultdict(list)
    with Cloud.up(hosts=2) as cloud:
        rig = Rig(cloud)
        for name in rig.vms:
            guest = rig.guest(name)
            guest.write("vdb", "own", (BASE_MIB + 16) << 10, OWN_KIB)
            guest.sync()
            rig.move(name, "idle")  # both hosts have the base from now on
        for _ in rounds_within(105, 1 if quick else 6):
            for load in LOADS:
                for name in rig.vms:
                    samples[f"{name}, {load}", "allocated"].append(rig.allocated())
                    for key, value in rig.move(name, load).items():
                        samples[f"{name}, {load}", key].append(value)
        guest = rig.guest("own")
        for number in range(SCATTERED):
            guest.write("vdb", "scattered", ((BASE_MIB + 128) << 10) + number * STRIDE_KIB, 4)
        guest.sync()
        for name in rig.vms:
            samples["scattered", f"{name} allocated"].append(rig.allocated())
            samples["scattered", name].append(rig.move(name, "idle")["bytes"])
        guest, here, there = rig.guest("own"), rig.host("own"), rig.other("own")
        for _ in rounds_within(40, 1 if quick else 2):
            for load in LOADS:
                for key, value in rig.stock(guest, here, there, load).items():
                    samples[f"stock, {load}", key].append(value)
                here, there = there, here
        rig.end()
    return _figures(samples)


EXPECTED = {
    # figure: of ours to all disks in place, and of stock to ours, by load (idle, writing, busy); said before
    # the first measurement
    "seconds": (
        (1.8, 1.8, 1.8),
        (2.0, 2.0, 2.0),
        "s",
        "64 MiB more, two more messages, a merge; stock copies 320 MiB",
    ),
    "downtime": (
        (1.1, 1.1, 1.3),
        (1.0, 1.0, 1.0),
        "ms",
        "libvirt ends the mirrors while the guest stands still",
    ),
    "gap": (
        (1.2, 1.2, 1.5),
        (0.8, 0.8, 0.8),
        "ms",
        "the merge stops the guest once more, for the moment of the switch",
    ),
    "kept": (
        (1.0, 1.0, 0.8),
        (1.0, 1.0, 0.8),
        "of before",
        "files are read, writes are mirrored; stock reads and mirrors all of the disk",
    ),
}
WHAT = {
    "seconds": "a live migration",
    "downtime": "libvirt lets the guest stand still",
    "gap": "longest wait of a write",
    "kept": "writes per second that the guest keeps",
}


def _figures(samples: Samples) -> List[Figure]:
    found = []
    for number, load in enumerate(LOADS):
        own, shared, stock = (f"{name}, {load}" for name in ("own", "shared", "stock"))
        more = [mine - theirs for mine, theirs in zip(samples[own, "bytes"], samples[shared, "bytes"])]
        allowed = [
            size + UNIT * writes / 1.1
            for size, writes in zip(samples[own, "allocated"], samples[own, "writes"])
        ]
        if load != "busy":
            # That one writes the same blocks again and again: they do not cross as often.
            found.append(
                Figure(
                    f"migrate/bytes/{load}",
                    f"what crosses for the VM's own disk, guest {load}",
                    "bytes",
                    more,
                    "what its overlay occupies, and 64 KiB for each block written meanwhile",
                    allowed,
                    expected=1.03,
                    because="files cross without holes; only the delta in units of 64 KiB",
                    budget=("ratio", "<=", 1.1),
                    budget_from="bytes",
                    is_exact=True,
                )
            )
        for way in ("own", "shared", "stock"):
            found.append(
                Figure(
                    f"migrate/all-bytes/{way}/{load}",
                    f"all that crosses: {way}",
                    "bytes",
                    samples[f"{way}, {load}", "bytes"],
                )
            )
        for key, (to_shared, to_own, unit, because) in EXPECTED.items():
            found += [
                Figure(
                    f"migrate/{key}/{load}",
                    f"{WHAT[key]}, guest {load}",
                    unit,
                    samples[own, key],
                    "of the same VM with all disks in place",
                    samples[shared, key],
                    expected=to_shared[number],
                    because=because,
                ),
                Figure(
                    f"migrate/stock-{key}/{load}",
                    f"{WHAT[key]}, guest {load}, by --copy-storage-all",
                    unit,
                    samples[stock, key],
                    "by our drivers",
                    samples[own, key],
                    paired=False,
                    expected=to_own[number],
                    because=because,
                ),
            ]
    more = [samples["scattered", "own"][0] - samples["scattered", "shared"][0]]
    return [
        *found,
        Figure(
            "migrate/scattered",
            f"what crosses when {SCATTERED} more blocks of 4 KiB lie apart",
            "bytes",
            more,
            "what the overlay occupies",
            [samples["scattered", "own allocated"][0]],
            expected=1.03,
            because="subclusters of 4 KiB, as a file",
            budget=("ratio", "<=", 1.1),
            budget_from="bytes",
            is_exact=True,
        ),
        Figure(
            "migrate/stock",
            "the same by --copy-storage-all",
            "bytes",
            samples["stock, idle", "bytes"],
            "by our drivers, almost idle",
            samples["own, idle", "bytes"],
            paired=False,
            expected=3.5,
            because="all that the disk shows that is not zero: 320 MiB",
        ),
    ]
