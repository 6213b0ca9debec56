# SPDX-License-Identifier: Apache-2.0
"""Images on Ceph: each step is killed after every one of its effects; then it is repeated, or given up.

Whatever was killed, the repetition succeeds, has the same result as if nothing had happened, and after the disk or image
is deleted there is no image, snapshot, watcher or half-removed snapshot left. All kills of a case run at the same time,
each on an image of its own: most of the time is the cluster's, which waits for watches of dead clients to end.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Sequence

import pytest

from semishared.model import steps as s
from semishared.model import steps_image as i
from tools.ceph_cluster import running
from tools.ceph_site import Site
from tools.world import MiB

TESTS = Path(__file__).resolve().parents[1]
WATCH_S = 10
"""Below that a healthy client that a busy machine holds up would lose its watch, too."""
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
    """What is there before, what is done, and what must be there after it; functions of the image's number."""

    before: Callable[[Site, int], None]
    steps: Callable[[Site, int], List[s.Step]]
    after: Callable[[Site, int], Dict[str, List[str]]]
    """Names of images, each with its snapshots (generations as `*`)."""
    over: Callable[[Site, int], List[s.Step]]
    """What removes all of it."""


def run(steps: Sequence[s.Step], **env: str) -> "subprocess.CompletedProcess[bytes]":
    """Carry out steps in a process of their own."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(list(steps)))
        file.flush()
        path = os.pathsep.join([str(TESTS), str(TESTS.parent / "lib")])
        argv = [sys.executable, "-m", "cephfaults.once", file.name]
        return subprocess.run(argv, env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, check=False, timeout=240)


def must(steps: Sequence[s.Step], **env: str) -> None:
    done = run(steps, **env)
    assert done.returncode == 0, done.stderr.decode()


def there(site: Site, number: int) -> Dict[str, List[str]]:
    """Return the images of a number, with their snapshots."""
    mine = [name for name in site.names() if name == f"one-{number}" or name.startswith((f"one-{number}-", f"one-{number}."))]
    return {
        name: sorted("*" if len(found) == 43 and found.startswith("semishared-") else found for found in site.snapshots(name))
        for name in mine
    }


def published(site: Site, number: int) -> Dict[str, List[str]]:
    """The same without what a dead client has staged and still holds: who removes the image waits for it and removes it."""
    return {name: snaps for name, snaps in there(site, number).items() if ".semishared-" not in name}


def clone_of(site: Site, number: int) -> s.ImageRef:
    return site.ref(number, f"one/one-{number}-5-0")


def nothing(site: Site, number: int) -> None:
    return None


def image(site: Site, number: int) -> None:
    site.make(number)


def cloned(site: Site, number: int) -> None:
    site.make(number)
    must([i.CloneStored(site.ref(number), clone_of(site, number).source, 0)])


def snapped(site: Site, number: int) -> None:
    site.make(number)
    must([i.KeepSnapshot(site.ref(number), 0), i.KeepSnapshot(site.ref(number), 1)])
    site.write(f"one-{number}", MiB, b"\x99" * 4096)


def frozen(site: Site, number: int) -> None:
    site.make(number)
    must([i.FreezeImage(site.ref(number))])


def unclone(site: Site, number: int) -> List[s.Step]:
    return [i.RemoveImage(clone_of(site, number)), i.RemoveImage(site.ref(number))]


def remove(site: Site, number: int) -> List[s.Step]:
    return [i.RemoveImage(site.ref(number))]


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
    "rm": Case(snapped, remove, lambda site, n: {}, remove),
    "freeze": Case(
        image, lambda site, n: [i.FreezeImage(site.ref(n))], lambda site, n: {f"one-{n}": ["semishared-new"]}, remove
    ),
    "begin a session": Case(
        frozen, lambda site, n: [i.BeginSession(site.ref(n), readonly=False)], lambda site, n: {f"one-{n}": []}, remove
    ),
    "clone for a disk": Case(
        image,
        lambda site, n: [i.CloneStored(site.ref(n), clone_of(site, n).source, 32 * MiB)],
        lambda site, n: {f"one-{n}": ["semishared-new"], f"one-{n}-5-0": []},
        unclone,
    ),
    "delete a disk": Case(
        cloned, lambda site, n: [i.RemoveImage(clone_of(site, n))], lambda site, n: {f"one-{n}": ["semishared-new"]}, unclone
    ),
    "snap_create": Case(
        image, lambda site, n: [i.KeepSnapshot(site.ref(n), 0)], lambda site, n: {f"one-{n}": ["0"]}, remove
    ),
    "snap_delete": Case(
        snapped, lambda site, n: [i.ForgetSnapshot(site.ref(n), 0)], lambda site, n: {f"one-{n}": ["1"]}, remove
    ),
    "snap_revert": Case(
        snapped, lambda site, n: [i.RevertImage(site.ref(n), 0)], lambda site, n: {f"one-{n}": ["0", "1"]}, remove
    ),
    "snap_flatten": Case(
        snapped, lambda site, n: [i.FlattenImage(site.ref(n), 0)], lambda site, n: {f"one-{n}": []}, remove
    ),
    "resize": Case(
        snapped, lambda site, n: [i.GrowImage(site.ref(n), 96 * MiB)], lambda site, n: {f"one-{n}": ["0", "1"]}, remove
    ),
    "restore": Case(
        snapped,
        lambda site, n: [i.BeginChange(site.ref(n), 96 * MiB), i.EndChange(site.ref(n), whole=True)],
        lambda site, n: {f"one-{n}": ["0", "1"]},
        remove,
    ),
}  # fmt: skip
GIVEN_UP = ("mkfs", "clone of an image", "clone for a disk", "restore")
"""Which oned does not repeat: it deletes what they were to make, or goes on with what there was."""
REVERTS = ("snap_revert", "snap_flatten")


def points(site: Site, case: Case) -> List[str]:
    """Return the names of the points a case passes when nothing goes wrong."""
    number = next(numbers)
    case.before(site, number)
    with tempfile.NamedTemporaryFile("r") as trace:
        must(case.steps(site, number), SEMISHARED_TRACE=trace.name)
        found = [line.split(" ", 1)[1] for line in trace.read().splitlines()]
    assert there(site, number) == case.after(site, number)
    must(case.over(site, number))
    assert there(site, number) == {}
    return found


def killed(site: Site, name: str, at: int, again: bool, passed: Sequence[str]) -> str:
    """Kill a case at a point, then repeat it or give it up; return what is wrong."""
    case, number = CASES[name], next(numbers)
    case.before(site, number)
    steps = case.steps(site, number)
    if run(steps, SEMISHARED_KILL_AT=str(at)).returncode == 0:
        return "it was not killed"
    if again:
        done = run(steps)
        if done.returncode:
            return f"repeated: {done.stderr.decode().strip()}"
        found, expected = published(site, number), case.after(site, number)
        if found != expected:
            return f"repeated: {found}, not {expected}"
        if name in REVERTS and site.read(f"one-{number}", MiB, 4096) != b"\xa1" * 4096:
            return "repeated: not the content of the snapshot"
    elif name == "restore":
        # The host has not filled it yet: empty is the new content.
        shown = "image shown" in passed[:at]
        must([i.BeginSession(site.ref(number), readonly=False)])
        if site.read(f"one-{number}", MiB, 4096) != (bytes(4096) if shown else b"\x99" * 4096):
            return "given up: neither what it was nor what was restored"
    done = run(case.over(site, number))
    if done.returncode:
        return f"removed: {done.stderr.decode().strip()}"
    left = there(site, number)
    return f"left: {left}" if left else ""


@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_point_leaves_nothing_and_converges(site: Site, name: str) -> None:
    first = next(numbers)
    passed = points(site, CASES[name])
    assert passed
    runs = [(at, again) for at in range(1, len(passed) + 1) for again in ((True, False) if name in GIVEN_UP else (True,))]
    if not ALL:
        # Each point once: what may be given up is, at every other point.
        runs = [(at, again) for at, again in runs if name not in GIVEN_UP or again == bool(at % 2)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda one: killed(site, name, *one, passed), runs))
    wrong = [f"{'repeated' if again else 'given up'} after {at} {passed[at - 1]}: {what}" for (at, again), what in zip(runs, found) if what]
    assert not wrong, "\n".join(wrong)
    deadline = time.monotonic() + WATCH_S + 50
    while site.busy() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert site.busy() == {}
    assert [found for found in site.names() if int(found.split("-")[1].split(".")[0]) >= first] == []
