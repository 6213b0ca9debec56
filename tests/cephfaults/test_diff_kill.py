# SPDX-License-Identifier: Apache-2.0
"""Local disks of persistent images on Ceph: what actions do with them is killed after each effect, on host
and bridge, and repeated.

Whatever was killed: to whoever comes to the bridge the image is what it was, or what it is to be; the action
done again ends as if nothing had happened; after the disk is gone nothing is left, on the host or in the
pool, but one snapshot of the content.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import pytest

from lab import forks
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.store import image_steps as i
from semishared.wire.session import Session
from tools.ceph_site import Site
from tools.world import MiB, World, qemu_io

from .conftest import WATCH_S
from .diff_flows import Job, session

TESTS = Path(__file__).resolve().parents[1]
AT_ONCE = 6
ALL = bool(os.environ.get("SEMISHARED_FULL"))
SIZE = 16 * MiB
numbers = iter(range(100, 100000))


class Standing(NamedTuple):
    """An image, and a host's place for a disk of it."""

    site: Site
    world: World
    number: int

    @classmethod
    def made(cls, site: Site, top: Path) -> Standing:
        found = cls(site, World(top), next(numbers))
        site.make(found.number, SIZE)
        return found

    @property
    def name(self) -> str:
        return f"one-{self.number}"

    def job(self, flow: str) -> Job:
        return Job(
            flow, self.site.ref(self.number), self.world.disk(), self.site.datastore_xml(self.world.top)
        )

    def run(self, flow: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Do an action in a process of its own."""
        job = self.world.top / "job"
        job.write_bytes(pickle.dumps(self.job(flow)))
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "lib")])
        argv = [*forks.words("cephfaults.diff_flows"), str(job)]
        return subprocess.run(
            argv, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, check=False, timeout=240
        )

    def write(self, *patterns: Tuple[int, str]) -> None:
        """Write as the guest does, in the disk's active layer: patterns, each with where."""
        commands = (f"write -P {pattern} {at} 64k" for pattern, at in patterns)
        qemu_io(os.path.realpath(self.world.disk().path), "qcow2", *commands)

    def lent(self, begun: Session) -> Tuple[bytes, bytes]:
        """Have the disk, with something committed and something that is not; return what the image is and
        what it is to be.
        """
        self.job("attached").carry_out(begun)
        self.write((0x11, "3M"))
        self.job("committed").carry_out(begun)
        self.write((0x12, "1M"), (0x13, "9M"))
        old = self.site.content(self.name)
        wanted = bytearray(old)
        for pattern, at in ((0x12, MiB), (0x13, 9 * MiB)):
            wanted[at : at + 65536] = bytes([pattern]) * 65536
        return old, bytes(wanted)

    def left(self, begun: Session) -> List[str]:
        """Return what is left of a VM that is gone, and had that disk alone."""
        begun.run([s.RemoveVm(self.world.disk().vm, self.world.disk().vm_dir)])
        found = self.world.leftovers() + self.world.leases()
        (*more, snapshot) = self.site.snapshots(self.name) or [""]
        return (
            found
            + more
            + ([] if re.match(r"semishared-([0-9a-f]{32}|new)\Z", snapshot) else [f"snapshot {snapshot!r}"])
        )


def standings(
    site: Site, top: Path, flow: str, names: Sequence[object]
) -> List[Tuple[Standing, bytes, bytes]]:
    """Have as many as there are names, each as an action finds it; with what the image is, and what it is to
    be.
    """
    found = []
    with (
        session() as begun
    ):  # one conversation: a host side takes longer to reach Ceph than to have a disk there
        for name in names:
            standing = Standing.made(site, top / str(name))
            found.append(
                (
                    standing,
                    *((site.content(standing.name),) * 2 if flow == "attached" else standing.lent(begun)),
                )
            )
    return found


def points(standing: Standing, flow: str) -> List[str]:
    """Return the names of the points an action passes when nothing goes wrong."""
    trace = standing.world.top / "trace"
    done = standing.run(flow, SEMISHARED_TRACE=str(trace))
    assert done.returncode == 0, done.stderr.decode()
    found = [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]
    with session() as begun:
        standing.job("ended").carry_out(begun)
        assert standing.left(begun) == []
    return found


def killed(standing: Standing, old: bytes, wanted: bytes, flow: str, at: int) -> str:
    """Kill an action at a point and repeat it; return what is wrong."""
    site = standing.site
    if standing.run(flow, SEMISHARED_KILL_AT=str(at)).returncode == 0:
        return "it was not killed"
    if at % 2:
        # Somebody else comes to the bridge first: what they find is whole.
        site.on(i.SettleImage(site.ref(standing.number)))
        if site.content(standing.name) not in (old, wanted):
            return "something between"
    doing = "repeated"
    try:
        with session() as begun:
            standing.job(flow).carry_out(begun)
            # What has ended is judged below.
            if flow != "ended" and site.content(standing.name) != wanted:
                return "repeated: not what was to be"
            if flow == "attached":
                standing.write((0x21, "5M"))
            if flow != "ended":
                doing = "ended"
                standing.job(doing).carry_out(begun)
            if flow == "attached" and site.read(standing.name, 5 * MiB, 65536) != b"\x21" * 65536:
                return "ended: not what was written"
            if flow != "attached" and site.content(standing.name) != wanted:
                return "ended: not what was to be"
            doing = "removed"
            left = standing.left(begun)
    except SemisharedError as e:
        return f"{doing}: {e.line()}"
    return f"left: {left}" if left else ""


@pytest.mark.parametrize(
    "flow",
    # Each begins with a commit like that at the end: the rest of their points is passed on a mounted store
    # too.
    ["attached", "ended", *(pytest.param(flow, marks=pytest.mark.long) for flow in ("committed", "renewed"))],
)
def test_killed_anywhere_the_image_is_whole_and_the_action_converges(
    site: Site, tmp_path: Path, flow: str
) -> None:
    ((whole, _, _),) = standings(site, tmp_path, flow, ["whole"])
    passed = points(whole, flow)
    # By default each kind of point, where it is passed for the last time.
    last = {name: at for at, name in enumerate(passed, 1)}
    runs = range(1, len(passed) + 1) if ALL else sorted(last.values())
    there = standings(site, tmp_path, flow, runs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda one, at: killed(one[0], one[1], one[2], flow, at), there, runs))
    wrong = [f"after {at} {passed[at - 1]}: {what}" for at, what in zip(runs, found) if what]
    assert not wrong, "\n".join(wrong)
    assert site.held_after(WATCH_S + 50) == {}
