# SPDX-License-Identifier: Apache-2.0
"""The paper on Share for hosts (V:Drive) with what Linux has by now: LVM's extents where Share puts them, `pvmove` while they are used.

Its figures 3 to 5 are what Bonnie found on 1 to 8 disks of 17 and 35 GB, with extents of 1 MB, in three cases: D, the driver has the map;
T, it is given the map first; C, each extent is allocated when it is first written. So here, on disks of 64 and 128 MiB that QEMU throttles,
in a kernel host: this kernel has no device mapper. A reproduction; the product has no extents (docs/how-to/pool.md).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

from figures import Figure, rounds_within

from lab.kernel_host import KernelHost
from semishared.plan import pool

MiB = 1 << 20
SMALL, LARGE = 64, 128
SIZES = (LARGE, SMALL, LARGE, SMALL, LARGE, SMALL, LARGE, SMALL)
"""MiB, in the order in which devices join; a bit more than that for LVM's own. The last disk is none of them: the plain one."""
BPS, IOPS = 16 * MiB, 400
"""Of each disk, whatever its size."""
COUNTS = (1, 2, 4, 8)
FILE, CLEAN = 32, 6
"""MiB that are written and read; extents of case C, which costs some commands for each."""
SPARE = 160
"""MiB of the volume that is larger than any device, while it grows."""
EXPECTED = {"write": {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.5}, "read": {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.4}, "seek": {1: 1.0, 2: 1.6, 4: 2.5, 8: 4.0}}
WHY = {
    "write": "the page cache takes all at once and writes to all disks; a throttled disk has no head that extents could move",
    "read": "what is read ahead is less than an extent: as a rule one disk is read at a time",
    "seek": "three threads; a throttled disk has no latency, but they can wait for the same one",
}  # fmt: skip
UNITS = {"write": "MiB/s", "read": "MiB/s", "seek": "1/s"}


class Disks:
    """A kernel host with these disks, and somebody there who does what is asked (lvm_inside.py)."""

    def __init__(self) -> None:
        self._top = Path(tempfile.mkdtemp(prefix="bench-extents-", dir="/var/tmp"))
        argv: List[str] = []
        for number, mib in enumerate((*SIZES, LARGE)):
            path = self._top / f"disk{number}"
            path.touch()
            os.truncate(path, (mib + 2) * MiB)
            limits = f"throttling.bps-total={BPS},throttling.iops-total={IOPS}"
            argv += ["-drive", f"file={path},format=raw,if=none,id=e{number},cache=unsafe,{limits}"]
            argv += ["-device", f"virtio-blk-pci,drive=e{number}"]
        self._host = KernelHost("extents", memory_mib=768, qemu_arguments=argv)
        self.names = [f"/dev/vd{chr(ord('a') + number)}" for number in range(len(SIZES))]
        self.plain = f"/dev/vd{chr(ord('a') + len(SIZES))}"
        self._asked = 0

    def __enter__(self) -> Disks:
        self._host.start()
        inside = Path(__file__).resolve().parent / "lvm_inside.py"
        self._program = self._host.start_program(["/usr/bin/python3", "-I", str(inside)])
        return self

    def __exit__(self, *_: object) -> None:
        self._host.end()
        shutil.rmtree(self._top)

    def ask(self, *words: Any, timeout: float = 240) -> Any:
        """Have something done there; return the answer."""
        self._program.write(json.dumps(words).encode() + b"\n")
        end = f"== {self._asked}\n"
        self._asked += 1
        return json.loads(self._program.wait_for(end, timeout).split(end)[0].splitlines()[-1])


def by_share(devices: Dict[str, int], extents: int) -> List[str]:
    """Return the device of each extent of a volume."""
    shares = {device: float(mib) for device, mib in devices.items()}
    return [pool.share(f"extent/{extent}", shares)[0] for extent in range(extents)]


def laid_out(volumes: Dict[str, List[str]]) -> Dict[str, List[Tuple[str, int]]]:
    """Return where on its device each extent lies: the next that is free, as their metadata server had it."""
    free: Dict[str, int] = defaultdict(int)
    found: Dict[str, List[Tuple[str, int]]] = {}
    for name, devices in volumes.items():
        found[name] = []
        for device in devices:
            found[name].append((device, free[device]))
            free[device] += 1
    return found


def extents(quick: bool) -> List[Figure]:
    """Take the paper's figures; then let a device come while the volume is written to."""
    rates: Dict[str, List[float]] = defaultdict(list)
    with Disks() as disks:
        disks.ask("group", disks.names)
        maps = laid_out({f"v{count}": by_share(dict(zip(disks.names[:count], SIZES)), FILE) for count in COUNTS})
        disks.ask("volumes", maps)
        for number in rounds_within(150, 1 if quick else 3):
            _round(disks, rates, number == 0)
        grown = _grown(disks)
    return [*_figures(rates), *grown]


def _round(disks: Disks, rates: Dict[str, List[float]], is_first: bool) -> None:
    for count in COUNTS:
        rates[f"T/write/{count}"].append(disks.ask("transferred", f"v{count}", FILE))
    names = {"plain": disks.plain, **{str(count): f"v{count}" for count in COUNTS}}
    for key, name in names.items():
        rates[f"D/write/{key}"].append(disks.ask("write", name, FILE))
        rates[f"D/read/{key}"].append(disks.ask("read", name, FILE))
        rates[f"D/seek/{key}"].append(disks.ask("seek", name, FILE, 1.0))
    if is_first:
        for count in (COUNTS[0], COUNTS[-1]):
            devices = by_share(dict(zip(disks.names[:count], SIZES)), CLEAN)
            # What is free for certain: the end of a device.
            where = [(device, SIZES[disks.names.index(device)] - 1 - at) for at, device in enumerate(devices)]
            rates[f"C/write/{count}"].append(disks.ask("clean", where))


def _figures(rates: Dict[str, List[float]]) -> List[Figure]:
    found = []
    for key, values in rates.items():
        case, what, count = key.split("/")
        if count == "plain":
            continue
        against = rates[f"D/{what}/plain"]
        expected = EXPECTED[what][int(count)]
        found.append(Figure(
            f"extents/{key}", f"{what}, case {case}, {count} devices", UNITS[what], values, "the plain disk", against[: len(values)],
            expected={"D": expected, "T": 0.7 * expected, "C": 0.1}[case],
            because=WHY[what] if case == "D" else "commands of LVM are emulated",
        ))  # fmt: skip
    return found


def _grown(disks: Disks) -> List[Figure]:
    """Let a disk join three, extents go where Share wants them now, and somebody write and read all the time."""
    three = dict(zip(disks.names[:3], SIZES))
    four = {**three, disks.plain: LARGE}
    before, wanted = by_share(three, SPARE), by_share(four, SPARE)
    disks.ask("volumes", laid_out({"large": before}))
    disks.ask("activate", "large")
    moves: Dict[Tuple[str, str], List[int]] = defaultdict(list)
    for (device, extent), target in zip(laid_out({"large": before})["large"], wanted):
        if device != target:
            moves[device, target].append(extent)
    # The new one first: it makes room on the others.
    order = sorted(moves, key=lambda pair: (pair[1] != disks.plain, pair))
    done = disks.ask("move", "large", SPARE, disks.plain, [[source, moves[source, target], target] for source, target in order])
    if disks.ask("lies", "large") != wanted:
        raise RuntimeError("extents do not lie where they were to be moved to")
    moved, least, whole = sum(map(len, moves.values())), wanted.count(disks.plain), sum(four.values())
    fullest = max(wanted.count(device) * whole / mib for device, mib in four.items()) / SPARE
    return [
        Figure("extents/size", "a volume, by the largest of its devices", "times", [SPARE / max(three.values())], expected=1.25,
               because="one disk larger than a device is what files cannot have"),
        Figure("extents/moved", "extents of it that go elsewhere when a disk comes, by Share as published", "extents", [moved],
               "what the new disk takes", [least], expected=1.3, because="every interval changes when a disk comes"),
        Figure("extents/fair", "the fullest device after it, by its share", "times", [fullest], expected=1.15,
               because="160 extents, by chance"),
        Figure("extents/seconds", "time for that", "s", [done["seconds"]], expected=40.0, because="an emulated LVM, and throttled disks"),
        Figure("extents/wrong", "blocks that were read wrongly meanwhile or afterwards", "blocks", [done["wrong"]], expected=0.0,
               because="pvmove writes to both until it is done", budget=("value", "<=", 0), budget_from="moved online, consistently"),
        Figure("extents/ios", "blocks of 64 KiB that were written and read meanwhile", "blocks", [done["ios"]], expected=2000.0,
               because="as many as the disks give"),
        Figure("extents/wait", "longest wait of one of them", "s", [done["wait"]], expected=1.0, because="a map is exchanged in between"),
    ]  # fmt: skip
