# SPDX-License-Identifier: Apache-2.0
"""What every action costs now, against the version before the house was built anew, and the prolog of a disk
against the first release: two labs side by side, in turn.
"""

from __future__ import annotations

import os
import subprocess
from typing import Dict, List

import actions
import block
import clone
from block import GiB, MiB
from figures import Figure, rounds_within
from meter import Meter, Sample

from lab.caches import CHECKOUT
from lab.cloud import DATASTORES, STORE, Cloud
from lab.hosts import REMOTES
from upgrade import versions

WARM = 1
"""Rounds that nobody counts, of each version: byte code is compiled, caches are filled."""


def _look_for(commit: str) -> None:
    """Fail before two labs are up where this clone lacks the older version."""
    argv = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        str(CHECKOUT),
        "cat-file",
        "-e",
        f"{commit}^{{tree}}",
    ]
    if subprocess.run(argv, stderr=subprocess.DEVNULL, check=False).returncode:
        raise RuntimeError(f"{commit} is not in this clone: git fetch --unshallow brings it")


def releases(quick: bool) -> List[Figure]:
    """Measure CPU until the first command, and all of it, of every action of an ordinary operation, by
    version.
    """
    _look_for(versions.KILLED)
    rounds = 2 if quick else 10
    with Cloud.up(hosts=2) as now, Cloud.up(hosts=2) as before:
        _older(before, versions.KILLED)
        meters = [Meter(cloud.lab, cloud.oned.settings.environment) for cloud in (now, before)]
        for number in rounds_within(600, rounds + WARM):
            for cloud, meter in zip((now, before), meters):
                cloud.oned.runner = cloud.oned.drivers.runner = meter
                actions.round_of_operations(cloud, meter, number)
                if number < WARM:
                    meter.samples.clear()
    both = sorted(set(meters[0].samples) & set(meters[1].samples) - {"python"})
    return [
        figure for name in both for figure in _figures(name, meters[0].samples[name], meters[1].samples[name])
    ]


def prolog(quick: bool) -> List[Figure]:
    """Measure what one_tm waits for before it says that a disk of 2 GiB is there whose base the host has, by
    version, in turns.
    """
    _look_for(versions.OLDER)
    rounds = 3 if quick else 20
    samples: Dict[str, List[List[float]]] = {}
    with Cloud.up(hosts=1) as now, Cloud.up(hosts=1) as before:
        _older(before, versions.OLDER)
        rigs = [clone.Rig(cloud) for cloud in (now, before)]
        disks = [_disk(cloud) for cloud in (now, before)]

        def rounds_of(ssh: str, seconds: float) -> None:
            both = samples[ssh] = [[], []]
            for number in rounds_within(seconds, rounds + WARM):
                for which in (0, 1) if number % 2 else (1, 0):
                    took = rigs[which].clone(*disks[which])
                    rigs[which].delete(disks[which][0])
                    if number >= WARM:
                        both[which].append(took)

        with rigs[0].shared_ssh(), rigs[1].shared_ssh():
            rounds_of("shared", 25)
        rounds_of("new", 35)
    return [
        Figure(
            f"releases/prolog/{ssh}",
            f"prolog of a further disk of 2 GiB under the simulated oned, {words}",
            "s",
            took[0],
            f"the same of {versions.RELEASE}",
            took[1],
            expected=0.6,
            because="the host side starts while oned is asked; less is imported on both sides, and "
            "nothing tidied up",
            budget=("ratio", "<=", 0.6),
            budget_from="an action's own cost",
            if_missed="`ssh host true` is in both, most of it waiting for TCP (Nagle's algorithm), and is "
            "more than half of what is left",
        )
        for (ssh, took), words in zip(
            samples.items(), ("`ssh` as OpenNebula ships it", "a new connection by `ssh` for each")
        )
    ]


def _disk(cloud: Cloud) -> "tuple[int, int]":
    """Upload an image of 2 GiB of which 64 MiB are data; return a VM that wants a disk of it, and the
    image.
    """
    path = cloud.upload_file("disk.img")
    block.fill(path, 64 * MiB)
    os.truncate(path, 2 * GiB)
    cloud.give(path)
    image = cloud.oned.image_create(STORE, "disk", path=f"/var/tmp/{path.name}", type="OS", prefix="vd")
    path.unlink()
    return cloud.create("prolog", [{"IMAGE_ID": str(image)}]), image


def _older(cloud: Cloud, commit: str) -> None:
    """Give a cloud an older version, before it has done anything."""
    versions.unpack(cloud.lab, commit)
    # What the older version does not know; defaults are the same.
    cloud.lab.fe.path(f"{REMOTES}/etc/semishared.conf").unlink()
    if commit == versions.OLDER:
        cloud.lab.fe.run(["rm", "-rf", f"{DATASTORES}/{STORE}/.semishared"], user="root")
    cloud.lab.fe.run([f"{versions.TREES[commit]}/install.sh", "--remotes", REMOTES])
    cloud.lab.sync()


def _figures(name: str, now: List[Sample], before: List[Sample]) -> List[Figure]:
    old = f"the same of {versions.KILLED}"

    def compared(part: str, what: str, of: List[List[float]]) -> Figure:
        return Figure(
            f"releases/{name}/{part}",
            f"{name}: {what}",
            "ms",
            of[0],
            old,
            of[1],
            paired=False,
            expected=1.0,
            because="more is planned, less is imported",
            budget=("ratio", "<=", 1.0) if part == "first" else None,
            budget_from="start-up CPU of an action is not higher than before",
        )

    first = [[s.first_cpu * 1000 for s in samples if s.first_cpu is not None] for samples in (now, before)]
    whole = [[s.cpu * 1000 for s in samples if s.first_cpu is None] for samples in (now, before)]
    figures = []
    if all(first):
        figures.append(compared("first", "CPU until its first command", first))
    if all(whole):
        figures.append(compared("cpu", "CPU on the front-end", whole))
    return figures
