# SPDX-License-Identifier: Apache-2.0
"""Images on Ceph: each step is killed after every one of its effects; then it is repeated, or given up.

Whatever was killed, the repetition succeeds, has the same result as if nothing had happened, and after the
disk or image is deleted there is no image, snapshot, watcher or half-removed snapshot left. All kills of a
case run at the same time, each on an image of its own: most of the time is the cluster's, which waits for
watches of dead clients to end.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Sequence

import pytest

from lab import forks
from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.refs import ImageRef
from semishared.model.store import image_steps as i
from semishared.model.store.access import MOUNTED
from semishared.tools import layers, qemu_img
from semishared.wire.session import Session
from tools.ceph_cluster import running
from tools.ceph_site import Site
from tools.world import OVERLAY_OPTIONS, MiB, World, make_image, qemu_io

from .conftest import WATCH_S

TESTS = Path(__file__).resolve().parents[1]
AT_ONCE = 6
ALL = bool(os.environ.get("SEMISHARED_FULL"))
numbers = iter(range(100, 100000))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(WATCH_S) as cluster:
        site = Site(cluster.conf)
        site.command("osd set-require-min-compat-client", version="mimic")
        try:
            yield site
        finally:
            site.close()


class Case(NamedTuple):
    """What is there before, what is done, and what must be there after it; functions of the image's
    number.
    """

    before: Callable[[Site, int], List[s.Step]]
    """What makes it makes the image itself, and returns the steps for the rest."""
    steps: Callable[[Site, int], List[s.Step]]
    after: Callable[[Site, int], Dict[str, List[str]]]
    """Names of images, each with its snapshots (generations as `*`)."""
    over: Callable[[Site, int], List[s.Step]]
    """What removes all of it."""


def run(steps: Sequence[s.Step], **env: str) -> subprocess.CompletedProcess[bytes]:
    """Carry out steps in a process of their own."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(list(steps)))
        file.flush()
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "lib")])
        argv = [*forks.words("cephfaults.once"), file.name]
        return subprocess.run(
            argv, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, check=False, timeout=240
        )


def traced(done: subprocess.CompletedProcess[bytes], trace: Path) -> List[str]:
    """Return the names of the points that what is done has passed."""
    assert done.returncode == 0, done.stderr.decode()
    return [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]


def there(site: Site, number: int) -> Dict[str, List[str]]:
    """Return the images of a number, with their snapshots."""
    mine = [
        name
        for name in site.names()
        if name == f"one-{number}" or name.startswith((f"one-{number}-", f"one-{number}."))
    ]
    return {
        name: sorted(
            "*" if len(found) == 43 and found.startswith("semishared-") else found
            for found in site.snapshots(name)
        )
        for name in mine
    }


def published(site: Site, number: int) -> Dict[str, List[str]]:
    """The same without what a dead client has staged and still holds: who removes the image waits for it and
    removes it.
    """
    return {name: snaps for name, snaps in there(site, number).items() if ".semishared-" not in name}


def clone_of(site: Site, number: int) -> s.ImageRef:
    return site.ref(number, f"one/one-{number}-5-0")


def nothing(site: Site, number: int) -> List[s.Step]:
    return []


def image(site: Site, number: int) -> List[s.Step]:
    site.make(number)
    return []


def cloned(site: Site, number: int) -> List[s.Step]:
    site.make(number)
    return [i.CloneStored(site.ref(number), clone_of(site, number).source, 0)]


def snapped(site: Site, number: int) -> List[s.Step]:
    site.make(number)
    return [i.KeepSnapshot(site.ref(number), 0), i.KeepSnapshot(site.ref(number), 1)]


def frozen(site: Site, number: int) -> List[s.Step]:
    site.make(number)
    return [i.FreezeImage(site.ref(number))]


def unclone(site: Site, number: int) -> List[s.Step]:
    return [i.RemoveImage(clone_of(site, number)), i.RemoveImage(site.ref(number))]


def remove(site: Site, number: int) -> List[s.Step]:
    return [i.RemoveImage(site.ref(number))]


FILES = tempfile.TemporaryDirectory(prefix="semishared-mounted-")
"""A mounted store, with images that are copied to the pool and from it."""


def file(site: Site, number: int) -> List[s.Step]:
    make_image(Path(FILES.name, f"{number}.qcow2"), "qcow2", 64 * MiB, "write -P 0xa1 1M 64k")
    return []


def from_file(site: Site, number: int) -> List[s.Step]:
    to = site.ref(number)._replace(access=site.access.by_bridge())
    return [i.CopyAcross(to, f"{FILES.name}/{number}.qcow2", "qcow2", MOUNTED, 64 * MiB)]


def at_file(number: int) -> ImageRef:
    return ImageRef(100, number, "qcow2", f"{FILES.name}/{number}.qcow2")


def to_file(site: Site, number: int) -> List[s.Step]:
    return [i.CopyAcross(at_file(number), f"one/one-{number}", "raw", site.access.by_bridge(), 64 * MiB)]


CASES = {
    "mkfs": Case(
        nothing,
        lambda site, n: [i.CreateImage(site.ref(n), 16 * MiB, "")],
        lambda site, n: {f"one-{n}": ["semishared-new"]},
        remove,
    ),
    "clone of an image": Case(
        image,
        lambda site, n: [i.CopyStored(site.ref(n, f"one/one-{n}-copy"), f"one/one-{n}")],
        lambda site, n: {f"one-{n}": [], f"one-{n}-copy": ["semishared-new"]},
        lambda site, n: [i.RemoveImage(site.ref(n, f"one/one-{n}-copy")), i.RemoveImage(site.ref(n))],
    ),
    "clone of a file": Case(file, from_file, lambda site, n: {f"one-{n}": ["semishared-new"]}, remove),
    "clone to a file": Case(
        image,
        to_file,
        lambda site, n: {f"one-{n}": []},
        lambda site, n: [i.RemoveImage(at_file(n)), i.RemoveImage(site.ref(n))],
    ),
    "rm": Case(snapped, remove, lambda site, n: {}, remove),
    "freeze": Case(
        image,
        lambda site, n: [i.FreezeImage(site.ref(n))],
        lambda site, n: {f"one-{n}": ["semishared-new"]},
        remove,
    ),
    "begin a session": Case(
        frozen,
        lambda site, n: [i.BeginSession(site.ref(n), readonly=False)],
        lambda site, n: {f"one-{n}": []},
        remove,
    ),
    "clone for a disk": Case(
        image,
        lambda site, n: [i.CloneStored(site.ref(n), clone_of(site, n).source, 32 * MiB)],
        lambda site, n: {f"one-{n}": ["semishared-new"], f"one-{n}-5-0": []},
        unclone,
    ),
    "delete a disk": Case(
        cloned,
        lambda site, n: [i.RemoveImage(clone_of(site, n))],
        lambda site, n: {f"one-{n}": ["semishared-new"]},
        unclone,
    ),
    "snap_create": Case(
        image, lambda site, n: [i.KeepSnapshot(site.ref(n), 0)], lambda site, n: {f"one-{n}": ["0"]}, remove
    ),
    "snap_delete": Case(
        snapped,
        lambda site, n: [i.ForgetSnapshot(site.ref(n), 0)],
        lambda site, n: {f"one-{n}": ["1"]},
        remove,
    ),
    "snap_revert": Case(
        snapped,
        lambda site, n: [i.RevertImage(site.ref(n), 0)],
        lambda site, n: {f"one-{n}": ["0", "1"]},
        remove,
    ),
    "snap_flatten": Case(
        snapped, lambda site, n: [i.FlattenImage(site.ref(n), 0)], lambda site, n: {f"one-{n}": []}, remove
    ),
    "resize": Case(
        snapped,
        lambda site, n: [i.GrowImage(site.ref(n), 96 * MiB)],
        lambda site, n: {f"one-{n}": ["0", "1"]},
        remove,
    ),
    "restore": Case(
        snapped,
        lambda site, n: [i.BeginChange(site.ref(n), 96 * MiB), i.EndChange(site.ref(n), whole=True)],
        lambda site, n: {f"one-{n}": ["0", "1"]},
        remove,
    ),
}
GIVEN_UP = ("mkfs", "clone of an image", "clone of a file", "clone to a file", "clone for a disk", "restore")
"""Which oned does not repeat: it deletes what they were to make, or goes on with what there was."""
REVERTS = ("snap_revert", "snap_flatten")


def standing(site: Site, case: Case, count: int) -> List[int]:
    """Have what is there before, so many times; return the numbers."""
    found = [next(numbers) for _ in range(count)]
    steps = [step for number in found for step in case.before(site, number)]
    if steps:
        site.on(*steps)
    if case.before is snapped:
        for number in found:
            site.write(f"one-{number}", MiB, b"\x99" * 4096)
    return found


def points(site: Site, case: Case) -> List[str]:
    """Return the names of the points a case passes when nothing goes wrong."""
    (number,) = standing(site, case, 1)
    with tempfile.NamedTemporaryFile("r") as trace:
        found = traced(run(case.steps(site, number), SEMISHARED_TRACE=trace.name), Path(trace.name))
    assert there(site, number) == case.after(site, number)
    site.on(*case.over(site, number))
    assert there(site, number) == {}
    return found


def killed(site: Site, name: str, number: int, at: int, again: bool, passed: Sequence[str]) -> str:
    """Kill a case at a point, then repeat it or give it up; return what is wrong."""
    case = CASES[name]
    if run(case.steps(site, number), SEMISHARED_KILL_AT=str(at)).returncode == 0:
        return "it was not killed"
    doing = "repeated"
    try:
        with Session("localhost", "test", Config()) as begun:
            if again:
                begun.run(case.steps(site, number))
                found, expected = published(site, number), case.after(site, number)
                if found != expected:
                    return f"repeated: {found}, not {expected}"
                if name in REVERTS and site.read(f"one-{number}", MiB, 4096) != b"\xa1" * 4096:
                    return "repeated: not the content of the snapshot"
                if name == "clone of a file" and site.read(f"one-{number}", MiB, 3) != b"\xa1" * 3:
                    return "repeated: not the content of the file"
                if name == "clone to a file":
                    qemu_io(at_file(number).source, "qcow2", "read -P 0xa1 1M 64k", "read -P 0 2M 64k")
            elif name == "restore":
                # The host has not filled it yet: empty is the new content.
                shown = "image shown" in passed[:at]
                doing = "given up"
                begun.run([i.BeginSession(site.ref(number), readonly=False)])
                if site.read(f"one-{number}", MiB, 4096) != (bytes(4096) if shown else b"\x99" * 4096):
                    return "given up: neither what it was nor what was restored"
            doing = "removed"
            begun.run(case.over(site, number))
    except SemisharedError as e:
        return f"{doing}: {e.line()}"
    left = there(site, number)
    return f"left: {left}" if left else ""


@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_point_leaves_nothing_and_converges(site: Site, name: str) -> None:
    first = next(numbers)
    passed = points(site, CASES[name])
    assert passed
    runs = [
        (at, again)
        for at in range(1, len(passed) + 1)
        for again in ((True, False) if name in GIVEN_UP else (True,))
    ]
    if not ALL:
        # Each point once: what may be given up is, at every other point.
        runs = [(at, again) for at, again in runs if name not in GIVEN_UP or again == bool(at % 2)]
    before = standing(site, CASES[name], len(runs))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(
            pool.map(lambda number, one: killed(site, name, number, one[0], one[1], passed), before, runs)
        )
    wrong = [
        f"{'repeated' if again else 'given up'} after {at} {passed[at - 1]}: {what}"
        for (at, again), what in zip(runs, found)
        if what
    ]
    assert not wrong, "\n".join(wrong)
    assert site.held_after(WATCH_S + 50) == {}
    assert [found for found in site.names() if int(found.split("-")[1].split(".")[0]) >= first] == []


# -- snapshots of a disk that reads from Ceph ----------------------------------------------------------


class Layered(NamedTuple):
    """A disk of four layers over an image on Ceph, the second of which is to go; each holds a pattern of its
    own.
    """

    world: World
    number: int
    named: str
    """What the header of the lowest layer is to name."""

    @classmethod
    def made(cls, site: Site, top: Path) -> Layered:
        found, number = World(top), next(numbers)
        disk, image = found.disk(), site.make(number, 16 * MiB)
        (lent,) = site.on(i.LendContent(image))
        create = s.CreateRemote(
            disk, image._replace(generation=lent["generation"]), 0, OVERLAY_OPTIONS, lent["snapshot"]
        )
        found.on(s.PrepareVm(disk.vm, disk.vm_dir), create)
        for number_of in (1, 2, 3):
            qemu_io(os.path.realpath(disk.path), "qcow2", f"write -P {number_of} {number_of + 1}M 64k")
            found.on(
                s.AddLayer(disk, number_of, number_of - 1, "qcow2"), s.ActivateLayer(disk, number_of, "qcow2")
            )
        return cls(found, number, layers.backing_of(f"{disk.path}.snap/0")[0])

    def layer(self, number: int) -> str:
        return f"{self.world.disk().path}.snap/{number}"

    def as_qemu_leaves_it(self) -> None:
        """Let the lowest layer not say who reads the image, as after a pull of a running guest's QEMU."""
        node = json.loads(self.named[len("json:") :])
        del node["file"]["user"]
        qemu_img.lay_over(self.layer(0), f"json:{json.dumps(node)}", "raw")

    def delete(self, copy: bool, **env: str) -> subprocess.CompletedProcess[bytes]:
        disk = self.world.disk()
        return run([s.MergeLayer(disk, 2, "0", "qcow2", copy=copy), s.DropLayer(disk, 1)], **env)

    def wrong(self, site: Site) -> str:
        """Return what is not as it is to be after the layer is gone; remove the disk and the image."""
        disk = self.world.disk()
        found = {
            number: layers.backing_of(self.layer(number))[0]
            for number in layers.numbered(f"{disk.path}.snap")
        }
        if found != {0: self.named, 2: "0", 3: "2"}:
            return f"layers {found}"
        patterns = ((0xA1, 1), (1, 2), (2, 3), (3, 4))
        qemu_io(
            os.path.realpath(disk.path),
            "qcow2",
            *(f"read -P {pattern} {at}M 64k" for pattern, at in patterns),
        )
        site.on(s.RemoveVm(disk.vm, disk.vm_dir), i.RemoveImage(site.ref(self.number)))
        left = [*self.world.leftovers(), *there(site, self.number)]
        return f"left: {left}" if left else ""


@pytest.mark.parametrize("copy", [False, True], ids=["off", "open"])
def test_a_snapshot_between_others_of_a_disk_that_reads_from_ceph_is_deleted_wherever_that_is_killed(
    site: Site, tmp_path: Path, copy: bool
) -> None:
    def laid(name: str) -> Layered:
        found = Layered.made(site, tmp_path / name)
        if not copy:
            found.as_qemu_leaves_it()
        return found

    whole = laid("whole")
    trace = tmp_path / "trace"
    passed = traced(whole.delete(copy, SEMISHARED_TRACE=str(trace)), trace)
    assert passed[-1] == "layer removed" and ("layer named in full" in passed) is not copy
    assert whole.wrong(site) == ""

    def killed(at: int) -> str:
        found = laid(str(at))
        if found.delete(copy, SEMISHARED_KILL_AT=str(at)).returncode == 0:
            return "it was not killed"
        done = found.delete(copy)
        return done.stderr.decode() if done.returncode else found.wrong(site)

    # The last one is the end: of a layer that is gone no more is asked.
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert list(pool.map(killed, range(1, len(passed)))) == [""] * (len(passed) - 1)


def test_what_is_open_and_does_not_say_who_reads_it_is_left_as_it_is(site: Site, tmp_path: Path) -> None:
    laid = Layered.made(site, tmp_path / "open")
    laid.as_qemu_leaves_it()
    before = {number: layers.backing_of(laid.layer(number)) for number in range(4)}
    done = laid.delete(copy=True)
    assert (
        done.returncode == 1
        and b"which does not say as whom one/one-" in done.stderr
        and b"SS003" in done.stderr
    )
    assert {number: layers.backing_of(laid.layer(number)) for number in range(4)} == before
    disk = laid.world.disk()
    site.on(s.RemoveVm(disk.vm, disk.vm_dir), i.RemoveImage(site.ref(laid.number)))
