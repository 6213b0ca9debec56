# SPDX-License-Identifier: Apache-2.0
"""The paper on Share for hosts (V:Drive) with what Linux has by now: LVM's extents where Share puts them,
`pvmove` while they are used.

Its figures 2 to 5 are what Bonnie found on 1 to 8 disks of 17 and 35 GB, with extents of 1 MB, in three
cases: D, the driver has the map; T, it is given the map first; C, each extent is allocated when it is first
written. So here, on disks of 64 and 128 MiB that QEMU throttles, in a kernel host: this kernel has no device
mapper. A reproduction; the product has no extents (docs/how-to/pool.md).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Tuple

from figures import Figure, rounds_within

from lab import caches
from lab.kernel_host import KernelHost
from semishared.plan.device import choose

MiB = 1 << 20
SMALL, LARGE = 64, 128
SIZES = (LARGE, SMALL, LARGE, SMALL, LARGE, SMALL, LARGE, SMALL)
"""MiB, in the order in which devices join; a bit more than that for LVM's own. The last disk is none of them:
the plain one.
"""
BPS, IOPS = 16 * MiB, 400
"""Of each disk, whatever its size."""
COUNTS = (1, 2, 4, 8)
FILE, CHARACTERS, CLEAN = 32, 16, 6
"""MiB that are written and read, and that are written by the character; extents of case C, which costs a
command for each.
"""
ROUNDS, ROUNDS_S, GROWS = 4, 50.0, 2
SPARE = 160
"""MiB of the volume that is larger than any device, while it grows."""
EXPECTED = {
    "character": {1: 1.0},
    "write": {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.5},
    "read": {1: 1.0, 2: 1.2, 4: 1.3, 8: 1.4},
    "seek": {1: 1.0, 2: 1.6, 4: 2.5, 8: 4.0},
}
LATER = {"character": (0.8, 0.4), "write": (0.7, 0.1)}
"""Of what is expected of case D, in T and in C."""
WHY = {
    "character": "what costs is the processor; a map is asked for each block, once it is there",
    "write": "the page cache takes all at once and writes to all disks; a throttled disk has no head that "
    "extents could move",
    "read": "what is read ahead is less than an extent: as a rule one disk is read at a time",
    "seek": "three threads; a throttled disk has no latency, but they can wait for the same one",
}
UNITS = {"character": "MiB/s", "write": "MiB/s", "read": "MiB/s", "seek": "1/s"}


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
    return [choose.share(f"extent/{extent}", shares)[0] for extent in range(extents)]


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
    """Take the paper's figures; then let a device come while the volume is written to, some times over."""
    rates: Dict[str, List[float]] = defaultdict(list)
    program = str(caches.build([Path(__file__).resolve().parent / "characters.c"], ["-static"]))
    with Disks() as disks:
        disks.ask("group", disks.names)
        maps = laid_out(
            {f"v{count}": by_share(dict(zip(disks.names[:count], SIZES)), FILE) for count in COUNTS}
        )
        disks.ask("volumes", maps)
        for number in rounds_within(ROUNDS_S, 1 if quick else ROUNDS):
            _round(disks, rates, number, program)
        grown = [_grown(disks, number) for number in range(1 if quick else GROWS)]
    return [*_figures(rates), *_figures_grown(grown, rates)]


def _round(disks: Disks, rates: Dict[str, List[float]], number: int, program: str) -> None:
    draw = random.Random(number)
    for count in draw.sample(COUNTS, len(COUNTS)):
        rates[f"T/write/{count}"].append(disks.ask("transferred", f"v{count}", FILE))
    rates["T/character/1"].append(disks.ask("transferred", "v1", CHARACTERS, program))
    names = {"plain": disks.plain, **{str(count): f"v{count}" for count in COUNTS}}
    for key in draw.sample(list(names), len(names)):
        rates[f"D/write/{key}"].append(disks.ask("write", names[key], FILE))
        rates[f"D/read/{key}"].append(disks.ask("read", names[key], FILE))
        rates[f"D/seek/{key}"].append(disks.ask("seek", names[key], FILE, 1.0))
        if key in ("plain", "1"):
            rates[f"D/character/{key}"].append(disks.ask("characters", names[key], CHARACTERS, program))
    for count in (COUNTS[0], COUNTS[-1]):
        devices = by_share(dict(zip(disks.names[:count], SIZES)), CLEAN)
        # What is free for certain: the end of a device.
        where = [(device, SIZES[disks.names.index(device)] - 1 - at) for at, device in enumerate(devices)]
        rates[f"C/write/{count}"].append(disks.ask("clean", where))
        if count == 1:
            rates["C/character/1"].append(disks.ask("clean", where, program))


def _figures(rates: Dict[str, List[float]]) -> List[Figure]:
    found = []
    for key, values in rates.items():
        case, what, count = key.split("/")
        if count == "plain":
            continue
        expected = EXPECTED[what][int(count)]
        later = dict(zip("TC", LATER.get(what, ())))
        found.append(
            Figure(
                f"extents/{key}",
                f"{what}, case {case}, {count} devices",
                UNITS[what],
                values,
                "the plain disk",
                rates[f"D/{what}/plain"],
                expected=round(expected * later.get(case, 1.0), 2),
                because=WHY[what] if case == "D" else "commands of LVM are emulated",
            )
        )
    return found


def _grown(disks: Disks, number: int) -> Dict[str, float]:
    """Let a disk join three, extents go where Share wants them now, and somebody write and read all the time;
    take it away again.
    """
    three = dict(zip(disks.names[:3], SIZES))
    four = {**three, disks.plain: LARGE}
    before, wanted = by_share(three, SPARE), by_share(four, SPARE)
    lies = laid_out({"large": before})
    disks.ask("volumes", lies)
    disks.ask("activate", "large")
    found = {what: disks.ask(what, "large", SPARE) for what in ("write", "read")}
    found["seek"] = disks.ask("seek", "large", SPARE, 1.0)
    moves: Dict[Tuple[str, str], List[int]] = defaultdict(list)
    for (device, extent), target in zip(lies["large"], wanted):
        if device != target:
            moves[device, target].append(extent)
    # The new one first: it makes room on the others.
    order = sorted(moves, key=lambda pair: (pair[1] != disks.plain, pair))
    found.update(
        disks.ask(
            "move", "large", SPARE, disks.plain, [[pair[0], moves[pair], pair[1]] for pair in order], number
        )
    )
    if disks.ask("lies", "large") != wanted:
        raise RuntimeError("extents do not lie where they were to be moved to")
    disks.ask("shrink", "large", disks.plain)
    whole = sum(four.values())
    fullest = max(wanted.count(device) * whole / mib for device, mib in four.items()) / SPARE
    return {
        **found,
        "moved": sum(map(len, moves.values())),
        "least": wanted.count(disks.plain),
        "fullest": fullest,
    }


def _figures_grown(grown: List[Dict[str, float]], rates: Dict[str, List[float]]) -> List[Figure]:
    got = {key: [one[key] for one in grown] for key in grown[0]}
    return [
        Figure(
            "extents/size",
            "a volume, by the largest of its devices",
            "times",
            [SPARE / LARGE],
            expected=1.25,
            because="one disk larger than a device is what files cannot have",
        ),
        *(
            Figure(
                f"extents/large-{what}",
                f"{what}, case D, that volume on 3 devices",
                UNITS[what],
                got[what],
                "the plain disk",
                rates[f"D/{what}/plain"],
                paired=False,
                expected=2.2,
                because="between what 2 and 4 devices give",
            )
            for what in ("write", "read", "seek")
        ),
        Figure(
            "extents/moved",
            "extents of it that go elsewhere when a disk comes, by Share as published",
            "extents",
            got["moved"],
            "what the new disk takes",
            got["least"],
            expected=1.3,
            because="every interval changes when a disk comes",
        ),
        Figure(
            "extents/fair",
            "the fullest device after it, by its share",
            "times",
            got["fullest"],
            expected=1.15,
            because="160 extents, by chance",
        ),
        Figure(
            "extents/seconds",
            "time for that",
            "s",
            got["seconds"],
            expected=40.0,
            because="an emulated LVM, and throttled disks",
        ),
        Figure(
            "extents/wrong",
            "blocks that were read wrongly meanwhile or afterwards",
            "blocks",
            got["wrong"],
            expected=0.0,
            because="pvmove writes to both until it is done",
            budget=("worst value", "<=", 0),
            budget_from="moved online, consistently",
            if_missed="pvmove has lost what was written while it moved",
        ),
        Figure(
            "extents/ios",
            "blocks of 64 KiB that were written and read meanwhile",
            "blocks",
            got["ios"],
            expected=2000.0,
            because="as many as the disks give",
        ),
        Figure(
            "extents/wait",
            "longest wait of one of them",
            "s",
            got["wait"],
            expected=1.0,
            because="a map is exchanged in between",
        ),
    ]
