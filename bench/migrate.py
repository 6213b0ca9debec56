# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM with a disk of its own: what crosses to the target, how long it takes, how long the guest waits.

Between two hosts of a lab, forth and back in turns: the VM as our drivers move it (an overlay, whose base both hosts have),
the same VM with the same writes and all disks in place, and the first VM by `virsh migrate --copy-storage-all`, into an empty
overlay that was made before. An image of 2 GiB, of which the guest has written 64 MiB as a whole, or 4 KiB here and there.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from typing import Dict, List, Tuple

import block
from figures import Figure, rounds_within

from lab import Node
from lab.cloud import STORE, Cloud
from lab.guest import Guest

SIZE_MIB, BASE_MIB = 2048, 256
OWN_KIB = 64 << 10
SCATTERED, STRIDE_KIB = 512, 512
"""Blocks of 4 KiB, and from one to the next."""
VIRSH = ["virsh", "-q", "-c", "qemu:///system"]
UNIT = 64 << 10
"""Bytes that libvirt mirrors for a write, however small."""

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
        system = cloud.os_image(f"os-{name}", persistent=True)
        path = cloud.upload_file(f"{name}.img")
        block.fill(path, BASE_MIB << 20)
        with open(path, "r+b") as file:
            file.truncate(SIZE_MIB << 20)
        cloud.give(path)
        data = cloud.oned.image_create(STORE, name, path=f"/var/tmp/{path.name}", type="DATABLOCK", persistent=persistent, prefix="vd")
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

    def move(self, name: str, writing: bool) -> Dict[str, float]:
        """Move a VM by our drivers; return what that took."""
        guest, target = self.guest(name), self.other(name)
        # Where nothing of its own is: what it writes meanwhile is counted by itself.
        guest.loop("vdb", "loop", (SIZE_MIB - 64) << 10, 32 << 10, 50 if writing else 5)
        time.sleep(1)
        before, started = _received(target), time.monotonic()
        self.cloud.oned.vm_migrate(self.vms[name], target.name, how="live")
        seconds, size = time.monotonic() - started, _received(target) - before
        counts = self.guest(name).loop_stop("vdb")
        if counts["errors"] or counts["mismatches"]:
            raise RuntimeError(f"{name}: {counts}")
        return {"bytes": size, "seconds": seconds, "gap": counts["maxgap_ms"], "writes": counts["writes"]}

    def stock(self) -> Dict[str, float]:
        """Move the domain of `own` with all that its disk shows, as libvirt does it; that is its end."""
        here, there, name = self.host("own"), self.other("own"), f"one-{self.vms['own']}"
        lines = here.run([*VIRSH, "domblklist", name]).stdout.decode().splitlines()
        path = next(line.split()[1] for line in lines if line.split()[:1] == ["vdb"])
        directory = self.cloud.vm_dir(self.vms["own"])
        tar = f"tar -C / --exclude='*.snap/*' -cf - {directory[1:]} | ssh {there.name} 'tar -C / -xf -'"
        here.run(["bash", "-c", tar])
        # Over the base, which is there; what the guest sees is copied all the same.
        chain = here.run(["qemu-img", "info", "-U", "--output=json", "-f", "qcow2", path]).stdout
        lease = str(json.loads(chain)["backing-filename"])
        there.run(["ln", "-f", f"{os.path.dirname(os.path.dirname(lease))}/image", lease])
        there.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", lease, "-F", "raw", path])
        guest = self.guest("own")
        guest.loop("vdb", "loop", (SIZE_MIB - 64) << 10, 32 << 10, 5)
        before, started = _received(there), time.monotonic()
        words = ["--live", "--unsafe", "--copy-storage-all", "--migrate-disks", "vdb", name, f"qemu+ssh://{there.name}/system"]
        here.run([*VIRSH, "migrate", *words], timeout=600)
        found = {"bytes": _received(there) - before, "seconds": time.monotonic() - started}
        guest.moved(there)
        guest.wait_up(60)
        found["gap"] = guest.loop_stop("vdb")["maxgap_ms"]
        there.run([*VIRSH, "destroy", name])
        there.run(["rm", "-rf", directory])
        return found


def migrate(quick: bool) -> List[Figure]:
    """Measure; `quick`: once each."""
    samples: Samples = defaultdict(list)
    with Cloud.up(hosts=2) as cloud:
        rig = Rig(cloud)
        for name in rig.vms:
            guest = rig.guest(name)
            guest.write("vdb", "own", (BASE_MIB + 16) << 10, OWN_KIB)
            guest.sync()
            rig.move(name, writing=False)  # both hosts have the base from now on
        for _ in rounds_within(240, 1 if quick else 6):
            for writing in (False, True):
                for name in rig.vms:
                    allocated = rig.allocated()
                    for key, value in rig.move(name, writing).items():
                        samples[f"{name}{', writing' if writing else ''}", key].append(value)
                    if name == "own":
                        samples["own", f"allocated{writing}"].append(allocated)
        guest = rig.guest("own")
        for number in range(SCATTERED):
            guest.write("vdb", "scattered", ((BASE_MIB + 128) << 10) + number * STRIDE_KIB, 4)
        guest.sync()
        for name in rig.vms:
            samples["scattered", f"{name} allocated"].append(rig.allocated())
            samples["scattered", name].append(rig.move(name, writing=False)["bytes"])
        for key, value in rig.stock().items():
            samples["stock", key].append(value)
    return _figures(samples)


def _figures(samples: Samples) -> List[Figure]:
    found = []
    for words, what in (("", "guest almost idle"), (", writing", "guest writes 50 blocks a second")):
        own, shared = f"own{words}", f"shared{words}"
        more = [mine - theirs for mine, theirs in zip(samples[own, "bytes"], samples[shared, "bytes"])]
        allowed = [
            size + UNIT * writes / 1.1
            for size, writes in zip(samples["own", f"allocated{bool(words)}"], samples[own, "writes"])
        ]
        found += [
            Figure(
                f"migrate/bytes{words.replace(', ', '-')}", f"what crosses for the VM's own disk, {what}", "bytes", more,
                "what its overlay occupies, and 64 KiB for each block written meanwhile", allowed, expected=1.03,
                because="files cross without holes; only the delta in units of 64 KiB", budget=("ratio", "<=", 1.1),
                budget_from="bytes",
            ),
            Figure(
                f"migrate/seconds{words.replace(', ', '-')}", f"a live migration, {what}", "s", samples[own, "seconds"],
                "of the same VM with all disks in place", samples[shared, "seconds"], expected=1.8,
                because="64 MiB more, two more messages, a merge",
            ),
            Figure(
                f"migrate/gap{words.replace(', ', '-')}", f"longest wait of a write, {what}", "ms", samples[own, "gap"],
                "of the same VM with all disks in place", samples[shared, "gap"], expected=1.2,
                because="the merge stops the guest once, for the moment of the switch",
            ),
        ]  # fmt: skip
    more = [samples["scattered", "own"][0] - samples["scattered", "shared"][0]]
    return [
        *found,
        Figure(
            "migrate/scattered", f"what crosses when {SCATTERED} more blocks of 4 KiB lie apart", "bytes", more,
            "what the overlay occupies", [samples["scattered", "own allocated"][0]], expected=1.03,
            because="subclusters of 4 KiB, as a file", budget=("ratio", "<=", 1.1), budget_from="bytes",
        ),
        Figure(
            "migrate/stock", "the same by --copy-storage-all", "bytes", samples["stock", "bytes"],
            "by our drivers, almost idle", [sum(samples["own", "bytes"]) / len(samples["own", "bytes"])], expected=3.5,
            because="all that the disk shows that is not zero: 320 MiB",
        ),
    ]  # fmt: skip
