# SPDX-License-Identifier: Apache-2.0
"""Run driver actions as oned does and measure each: a runner for the simulated oned.

Four of five calls of an action find, first in their PATH, recorders of the programs that drivers start. A
recorder notes how long the driver had been on a CPU by then. They cost time of their own, so the other calls
are measured without.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from lab import Lab, Node, cgroups
from lab.oned import Done, LabRunner

HERE = Path(__file__).resolve().parent
FOLDER = "/var/tmp/bench"
REPORT, FIRST, RECORDERS = f"{FOLDER}/report", f"{FOLDER}/first", f"{FOLDER}/bin"
PROGRAMS = ("ssh", "setpriv", "genisoimage", "mkisofs", "xorriso", "qemu-img")
"""What drivers start on a front-end (through setpriv, where programs must die with the driver)."""
RECORDER = """#!/bin/sh
# $PPID is whoever started this: the driver. Only the first of them counts, -C leaves it in place.
read -r ran rest < /proc/$PPID/schedstat
set -C
{{ echo "$ran" > {first}; }} 2> /dev/null
exec {program} "$@"
"""


@dataclass(frozen=True)
class Sample:
    """What one call cost: seconds; `own` of the action's process alone, `host_cpu` of all hosts of the lab
    during the call.
    """

    wall: float
    cpu: float
    own: float
    host_cpu: float
    first_cpu: Optional[float] = None


def cpu_of(lab: Lab, hosts: Sequence[Node]) -> float:
    """Return the CPU seconds that hosts of a lab have used so far, by their control groups."""
    total = 0.0
    for top in cgroups.leftovers(lab.folder.name):
        for host in hosts:
            usage, stat = top / host.name / "cpuacct.usage", top / host.name / "cpu.stat"
            if usage.exists():
                total += int(usage.read_text()) / 1e9
            elif stat.exists() and "usage_usec" in stat.read_text():
                total += int(stat.read_text().split("usage_usec")[1].split()[0]) / 1e6
    return total


class Meter(LabRunner):
    """Measures what it runs on the front-end; `samples` by kind/action."""

    def __init__(self, lab: Lab, environment: Mapping[str, str], record: bool = True) -> None:
        super().__init__(lab.fe, environment)
        self.lab = lab
        self.record = record
        self.samples: Dict[str, List[Sample]] = defaultdict(list)
        folder = lab.fe.path(FOLDER)
        (folder / "bin").mkdir(parents=True)
        shutil.copy(HERE / "inside.py", folder / "inside.py")
        for name in PROGRAMS:
            program = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
            if program:
                (folder / "bin" / name).write_text(RECORDER.format(first=FIRST, program=program))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, lab.uid, lab.gid)
            path.chmod(0o755)

    def local(self, argv: Sequence[str], stdin: Optional[str], environment: Dict[str, str]) -> Done:
        """Run a driver action and keep what it cost."""
        name = self._name(argv)
        recorded = self.record and len(self.samples[name]) % 5 != 0
        done, sample = self.measure(argv, stdin, environment, recorded)
        self.samples[name].append(sample)
        return done

    def measure(
        self,
        argv: Sequence[str],
        stdin: Optional[str],
        environment: Mapping[str, str],
        recorded: bool = False,
    ) -> "tuple[Done, Sample]":
        """Run a program on the front-end in the environment of a driver."""
        report, first = self.lab.fe.path(REPORT), self.lab.fe.path(FIRST)
        for old in (report, first):
            old.unlink(missing_ok=True)
        full = dict(environment)
        if recorded:
            full["PATH"] = f"{RECORDERS}:{full['PATH']}"
        before = cpu_of(self.lab, self.lab.hosts)
        done = super().local(["/usr/bin/python3", "-I", f"{FOLDER}/inside.py", REPORT, *argv], stdin, full)
        host_cpu = cpu_of(self.lab, self.lab.hosts) - before
        found: Dict[str, Any] = json.loads(report.read_text())
        first_cpu = None
        if recorded:
            # An action that starts nothing: all of it counts.
            first_cpu = int(first.read_text()) / 1e9 if first.exists() else found["cpu"]
        return done, Sample(found["wall"], found["cpu"], found["own"], host_cpu, first_cpu)

    def _name(self, argv: Sequence[str]) -> str:
        kind, _, action = argv[0].split("/")[-3:]
        if action in ("delete", "mv"):
            last = argv[1].rsplit("/", 1)[-1]
            action += " (disk)" if last.startswith("disk.") else " (directory)"
        return f"{kind}/{action}"
