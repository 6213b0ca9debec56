# SPDX-License-Identifier: Apache-2.0
"""Backups of a running VM in increments, against full ones of another VM of the same kind: what is read and
left for the backup store, how long it takes, and how long the guest waits for its disk.

In a lab, a disk of 512 MiB that is full, of which the guest has changed 1 % or 10 % since the backup before,
in pieces of 256 KiB. It writes all the time, and rests for the moment that is kept (FS_FREEZE = SUSPEND).
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from typing import Dict, List, NamedTuple, Tuple

from figures import Figure, rounds_within

from lab.cloud import RBD_STORE, STORE, SYSTEM, Cloud

MiB = 1 << 20
SIZE_MIB, PIECE_KIB = 512, 256
LOOP_KIB, LOOP_RATE, LOOP_S = 1024, 50, 2
"""Where and how often per second the guest writes 64 KiB, and for how long before and after a backup."""
CHANGES = (1, 10)
"""Per cent."""
SECONDS = 600


class Kind(NamedTuple):
    """A kind of disk."""

    said: str
    store: int
    attributes: Dict[str, str]
    format: str = "raw"
    persistent: bool = False


KINDS = {
    "bitmap": Kind("a local copy in qcow2, by a bitmap", STORE, {"SEMISHARED_LOCAL": "copy"}, "qcow2"),
    "raw": Kind("a raw local copy", STORE, {"SEMISHARED_LOCAL": "copy"}),
    "rbd": Kind("a disk in place on Ceph", RBD_STORE, {}, persistent=True),
}
Samples = Dict[Tuple[str, int, str], List[float]]


class Backed:
    """A VM whose second disk is backed up: in a chain of increments, or in full each time."""

    def __init__(self, cloud: Cloud, name: str, kind: Kind, data: bytes, is_chain: bool) -> None:
        self.cloud, self.is_chain, self._stored, self._seed = cloud, is_chain, -1, 0
        image = cloud.data_image(
            name,
            data,
            SIZE_MIB,
            persistent=kind.persistent,
            format=kind.format,
            store=kind.store,
            **kind.attributes,
        )
        disks = [{"IMAGE_ID": str(number)} for number in (cloud.os_image(f"{name}-os"), image)]
        self.vm = cloud.deploy(name, disks, context=False)
        self.record = cloud.oned.vm(self.vm)
        self.host = cloud.lab.node(self.record.last.host.name)
        pid = self.host.path(f"/run/libvirt/qemu/one-{self.vm}.pid").read_text().strip()
        self._io = ["cat", f"/proc/{pid}/io"]
        self.back_up()

    def _xml(self) -> bytes:
        mode = "<MODE>FULL</MODE>"
        if self.is_chain:
            image = 900 if self._stored >= 0 else -1
            mode = f"<MODE>INCREMENT</MODE><LAST_INCREMENT_ID>{self._stored}</LAST_INCREMENT_ID>"
            mode += f"<INCREMENTAL_BACKUP_ID>{image}</INCREMENTAL_BACKUP_ID>"
        said = f"<BACKUPS><BACKUP_CONFIG><FS_FREEZE>SUSPEND</FS_FREEZE>{mode}</BACKUP_CONFIG></BACKUPS></VM>"
        return self.record.to_xml().replace("</VM>", said).encode()

    def _call(self, action: str) -> None:
        place = f"{self.host.name}:{self.cloud.vm_dir(self.vm)}"
        script = f"/var/lib/one/remotes/tm/semishared/{action}"
        words = [script, place, "1", self.record.deploy_id, "-", str(self.vm), str(SYSTEM)]
        self.cloud.lab.fe.run(words, user="oneadmin", input=self._xml(), timeout=SECONDS)

    def _read(self) -> int:
        """Return how many bytes QEMU has read, from wherever."""
        found = re.search(rb"rchar: (\d+)", self.host.run(self._io, user="root").stdout)
        assert found
        return int(found.group(1))

    def change(self, percent: int) -> None:
        """Have the guest write to so much of its disk, evenly spread."""
        self._seed += 1
        guest = self.cloud.guest(self.vm)
        count = SIZE_MIB * 1024 * percent // 100 // PIECE_KIB
        step = (SIZE_MIB - 16) * 1024 // count // PIECE_KIB * PIECE_KIB
        for number in range(count):
            guest.write("vdb", f"change-{self._seed}", number * step, PIECE_KIB)

    def back_up(self) -> Dict[str, float]:
        """Make a backup, which its store takes; return seconds, bytes left for it, and bytes read."""
        read, began = self._read(), time.monotonic()
        self._call("prebackup_live")
        found = {"seconds": time.monotonic() - began, "read": float(self._read() - read)}
        copies = self.host.path(f"{self.cloud.vm_dir(self.vm)}/backup").glob("disk.*")
        found["left"] = float(sum(path.stat().st_blocks * 512 for path in copies))
        self._call("postbackup_live")
        self._stored += 1
        return found

    def watched(self) -> Dict[str, float]:
        """Make a backup while the guest writes; return also the longest that it waited, in ms."""
        guest = self.cloud.guest(self.vm)
        guest.loop("vdb", "loop", (SIZE_MIB - 8) << 10, LOOP_KIB, LOOP_RATE)
        time.sleep(LOOP_S)
        found = self.back_up()
        time.sleep(LOOP_S)
        counts = guest.loop_stop("vdb")
        if counts["errors"] or counts["mismatches"]:
            raise RuntimeError(f"{counts}")
        return {**found, "gap": float(counts["maxgap_ms"])}


def backup(quick: bool) -> List[Figure]:
    """Measure; `quick`: once."""
    samples: Samples = defaultdict(list)
    piece = os.urandom(MiB)
    data = b"".join(number.to_bytes(8, "little") + piece[8:] for number in range(SIZE_MIB))
    with Cloud.up(hosts=1, ceph=1) as cloud:
        for name, kind in KINDS.items():
            chain = Backed(cloud, f"{name}-chain", kind, data, is_chain=True)
            full = Backed(cloud, f"{name}-full", kind, data, is_chain=False)
            for _ in rounds_within(SECONDS, 1 if quick else 5):
                for percent in CHANGES:
                    for how, vm in (("chain", chain), ("full", full)):
                        vm.change(percent)
                        for what, value in vm.watched().items():
                            samples[name, percent, f"{how} {what}"].append(value)
            for vm in (chain, full):
                cloud.terminate(vm.vm)
    return [figure for name in KINDS for percent in CHANGES for figure in _figures(name, percent, samples)]


UNITS = {"left": ("bytes", "left for the store"), "read": ("bytes", "read by QEMU"), "seconds": ("s", "time")}
EXPECTED = {"bitmap": {"left": 1.1, "read": 1.1, "seconds": 1.5}, "raw": {}, "rbd": {"left": 1.1}}
"""Of the part that was changed; of a raw disk nothing less is expected than of a full backup."""


def _figures(name: str, percent: int, samples: Samples) -> List[Figure]:
    said = f"{KINDS[name].said}, {percent} % changed"
    found = [
        Figure(
            f"backup/{what}/{name}/{percent}",
            f"increment of {said}: {about}",
            unit,
            samples[name, percent, f"chain {what}"],
            "a full backup",
            samples[name, percent, f"full {what}"],
            expected=EXPECTED[name][what] * percent / 100 if what in EXPECTED[name] else 1.0,
            because="what changed, and the guest's own writes" if name == "bitmap" else "",
            budget=("ratio", "<=", 1.3 * percent / 100 + 0.01)
            if (what, name) == ("left", "bitmap")
            else None,
            budget_from="BACKUPS",
            is_exact=what != "seconds",
        )
        for what, (unit, about) in UNITS.items()
        if (what, name) != ("read", "rbd")  # librbd reads by its own connections, which are not counted so
    ]
    found.append(
        Figure(
            f"backup/gap/{name}/{percent}",
            f"increment of {said}: the longest that the guest waited for a write",
            "ms",
            samples[name, percent, "chain gap"],
            "of a full backup",
            samples[name, percent, "full gap"],
            expected=0.7,
            because="it rests as long, and less is copied before its own writes",
        )
    )
    return found
