# SPDX-License-Identifier: Apache-2.0
"""DESIGN §6 on a real Ceph cluster: what the bridge does is killed at every point, then done again, then removed.

The end is that of a run that nobody killed; nothing of ours stays in the pool: no snapshot, clone, staged or hidden image,
watcher or lock. (Watches end after 4 s here, 30 s elsewhere.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from semishared.errors import HostFailed
from semishared.plan import image_steps as i
from semishared.plan import steps as s
from tools.world import MiB, World

if TYPE_CHECKING:
    from tools.ceph_site import Site

CLONE = "one/one-7-23-1"


@dataclass
class Case:
    """Something the bridge does: what is there before, and the steps."""

    name: str
    steps: Callable[[Site], list[s.Step]]
    before: Callable[[Site], None] = lambda site: None
    removes: tuple[str, ...] = (CLONE, "one/one-60", "one/one-7")
    extra: dict[str, Any] = field(default_factory=dict)


def image(site: Site) -> None:
    site.make()
    site.write("one-7", 8 * MiB, b"\x11" * 4096)


def snapshots(site: Site) -> None:
    image(site)
    site.on(i.KeepSnapshot(site.ref(), 0))
    site.write("one-7", 8 * MiB, b"\x22" * 4096)
    site.on(i.KeepSnapshot(site.ref(), 1))
    site.write("one-7", 8 * MiB, b"\x33" * 4096)


def clone(site: Site) -> None:
    image(site)
    site.on(i.CloneStored(site.ref(), CLONE, 0))
    site.on(i.KeepSnapshot(site.ref(7, CLONE), 0))


def frozen(site: Site) -> None:
    image(site)
    site.on(i.FreezeImage(site.ref()))


def snapshot_id(site: Site, name: str) -> int:
    import rbd

    with rbd.Image(site.ioctx, "one-7", read_only=True) as opened:
        return int(opened.snap_get_id(name))


CASES = [
    Case("mkfs", lambda site: [i.CreateImage(site.ref(), 16 * MiB, "")]),
    Case("mkfs ext4", lambda site: [i.CreateImage(site.ref(), 16 * MiB, "ext4")]),
    Case("copy", lambda site: [i.CopyStored(site.ref(60), "one/one-7", -1, running=False)], image),
    Case("copy of a running one", lambda site: [i.CopyStored(site.ref(60), "one/one-7", -1, running=True)], image),
    Case("copy of a snapshot", lambda site: [i.CopyStored(site.ref(60), "one/one-7", 0, running=False)], snapshots),
    Case("freeze", lambda site: [i.FreezeImage(site.ref())], image),
    Case("name", lambda site: [i.NameGeneration(site.ref(), snapshot_id(site, "semishared-new"), "ab" * 16)], frozen),
    Case("session", lambda site: [i.BeginSession(site.ref(), readonly=False)], frozen),
    Case("clone", lambda site: [i.CloneStored(site.ref(), CLONE, 80 * MiB)], image),
    Case("remove clone", lambda site: [i.RemoveClone(site.ref(7, CLONE))], clone),
    Case("remove", lambda site: [i.RemoveImage(site.ref())], snapshots),
    Case("keep", lambda site: [i.KeepSnapshot(site.ref(), 2)], snapshots),
    Case("forget", lambda site: [i.ForgetSnapshot(site.ref(), 0)], snapshots),
    Case("revert", lambda site: [i.RevertImage(site.ref(), 0)], snapshots),
    Case("flatten", lambda site: [i.FlattenImage(site.ref(), 0)], snapshots),
    Case("grow", lambda site: [i.GrowImage(site.ref(), 80 * MiB)], image),
    Case("change undone", lambda site: [i.BeginChange(site.ref(), 0), i.EndChange(site.ref(), whole=False)], snapshots),
]


@pytest.fixture(autouse=True, params=["v1", "v2"])
def clones(request: pytest.FixtureRequest, site: Site) -> Iterator[None]:
    """In clusters where only protected snapshots are cloned, and where any are."""
    site.command("osd set-require-min-compat-client", version="mimic" if request.param == "v2" else "luminous")
    yield


def state(site: Site) -> dict[str, Any]:
    """Return what is in the pool: content, size and snapshots of each image."""
    found = {}
    for name in site.names():
        kinds = sorted(snap if len(snap) < 40 else "generation" for snap in site.snapshots(name))
        found[name] = (site.size(name), hash(site.content(name)), kinds)
    return found


def quiet(site: Site) -> None:
    """Wait until the watches of the killed have ended."""
    deadline = time.monotonic() + 20
    while site.busy():
        assert time.monotonic() < deadline, site.busy()
        time.sleep(0.2)


def killed_at(site: Site, steps: list[s.Step], number: int) -> bool:
    """Carry out steps in a host side that kills itself at its n-th point; tell whether it came that far."""
    os.environ["SEMISHARED_KILL_AT"] = str(number)
    try:
        site.on(*steps)
    except HostFailed:
        return True
    finally:
        del os.environ["SEMISHARED_KILL_AT"]
    return False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_killed_at_every_point_it_converges_and_leaves_nothing(site: Site, case: Case) -> None:
    case.before(site)
    site.on(*case.steps(site))
    wanted = state(site)
    number = 0
    while True:
        number += 1
        site.wipe()
        case.before(site)
        steps = case.steps(site)
        if not killed_at(site, steps, number):
            break
        quiet(site)
        if case.name == "change undone":
            # Whoever comes next undoes it.
            site.on(i.GrowImage(site.ref(), 0))
        else:
            site.on(*steps)
        found = state(site)
        if "ext4" in case.name:
            found, wanted = ({name: (size, 0, kinds) for name, (size, _, kinds) in each.items()} for each in (found, wanted))
        assert found == wanted, f"killed at point {number}"
        assert site.busy() == {}
        for name in case.removes:
            site.on(i.RemoveImage(site.ref(7, name)))
        assert site.names() == [], f"killed at point {number}, then removed"
    assert number > 1, "no point was passed"


def test_upload_that_is_killed_leaves_nothing_that_the_next_does_not_remove(site: Site, world: World) -> None:
    from semishared.config import Config
    from semishared.do import extents
    from semishared.do.ssh import Session

    content = bytes(MiB) + b"\x77" * (3 * MiB)
    generation = extents.Copy(None, 8 * MiB)
    generation.add(0, content)

    def upload() -> None:
        with Session("localhost", "cp", Config()) as session:
            session.begin([i.ReceiveImage(site.ref(), 8 * MiB)])
            session.send(extent=0)
            session.send_data(content)
            session.send(end=True, sha256=generation.manifest("raw").generation)
            session.finish()

    number = 0
    while True:
        number += 1
        site.wipe()
        os.environ["SEMISHARED_KILL_AT"] = str(number)
        try:
            upload()
            break
        except HostFailed:
            pass
        finally:
            del os.environ["SEMISHARED_KILL_AT"]
        assert [name for name in site.names() if name == "one-7"] == [] or site.content("one-7")[: 4 * MiB] == content
        quiet(site)
        upload()
        assert site.names() == ["one-7"]
        assert site.content("one-7")[: 4 * MiB] == content
        assert site.snapshots("one-7") == [f"semishared-{generation.manifest('raw').generation}"]
    assert number > 3
