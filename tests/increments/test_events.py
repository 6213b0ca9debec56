# SPDX-License-Identifier: Apache-2.0
"""What happens to a VM between two backups, for every kind of disk: the second restores what the disks held,
and is whole, for a reason that is said, where the mark is lost.

Of one VM, one event after another. `EXACT` and `WHOLE` are what docs/explanation/increments.md says.
"""

from __future__ import annotations

from typing import Callable, Dict, FrozenSet, Mapping, NamedTuple

import pytest

from .rig import KINDS, RAW, Rig

FILES = frozenset(KINDS) - set(RAW)
"""Kinds of disk that have marks."""
OWN = FILES - {"in place", "diff", "volatile"}
"""Those whose snapshots are layers."""
DIFF = frozenset({"diff"})
COMMITTED = "it was committed"
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"


class Event(NamedTuple):
    do: Callable[[Rig], None]
    whole: FrozenSet[str] = frozenset()
    """The kinds of disk that lose their mark by it."""
    why: str = ""
    often: bool = True
    """Also in `make test`."""
    maybe: FrozenSet[str] = frozenset()
    """Of `whole`: those that keep it where the other host has what the disk lies over."""


def off_and_on(rig: Rig) -> None:
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    rig.cloud.oned.vm_resume(rig.vm)


def suspended(rig: Rig) -> None:
    rig.cloud.oned.vm_suspend(rig.vm)
    rig.cloud.oned.vm_resume(rig.vm)


def stopped(rig: Rig) -> None:
    rig.cloud.oned.vm_stop(rig.vm)
    rig.deploy()


def undeployed(rig: Rig) -> None:
    rig.cloud.oned.vm_undeploy(rig.vm, hard=True)
    rig.deploy()


def moved_live(rig: Rig) -> None:
    rig.cloud.oned.vm_migrate(rig.vm, rig.other, how="live")


def moved_off(rig: Rig) -> None:
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    rig.cloud.oned.vm_migrate(rig.vm, rig.other)
    rig.cloud.oned.vm_resume(rig.vm)


def moved_within_its_host(rig: Rig) -> None:
    ds = rig.cloud.oned.vm(rig.vm).last.ds_id
    host = rig.cloud.oned.vm(rig.vm).last.host.name
    rig.cloud.oned.vm_migrate(rig.vm, host, 102 if ds == 101 else 101, how="live")


def grown(rig: Rig) -> None:
    rig.grow()


def grown_off(rig: Rig) -> None:
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    rig.grow()
    rig.cloud.oned.vm_resume(rig.vm)


def killed(rig: Rig) -> None:
    """Its QEMU: what it had not written out of its bitmaps is lost."""
    rig.guest_is_killed()
    rig.cloud.oned.vm_find_off(rig.vm)
    rig.cloud.oned.vm_resume(rig.vm)


def killed_and_grown(rig: Rig) -> None:
    killed(rig)
    rig.grow()


def with_snapshots(rig: Rig) -> None:
    for kind in sorted(OWN):
        rig.cloud.oned.disk_snapshot_create(rig.vm, rig.numbers[kind], "kept")
    rig.model.write("between", 6144, 64)


def without_snapshots(rig: Rig) -> None:
    rig.delete_snapshots()


def snapshots_come_and_go_off(rig: Rig) -> None:
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    with_snapshots_off(rig)
    rig.cloud.oned.vm_resume(rig.vm)
    rig.model.write("over", 6400, 64)
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    rig.delete_snapshots()
    rig.cloud.oned.vm_resume(rig.vm)


def with_snapshots_off(rig: Rig) -> None:
    for kind in sorted(OWN):
        rig.cloud.oned.disk_snapshot_create(rig.vm, rig.numbers[kind], "off")


def gone_back(rig: Rig) -> None:
    """To a snapshot of each disk that was made before the mark."""
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    with_snapshots_off(rig)
    held = rig.model.held()
    rig.cloud.oned.vm_resume(rig.vm)
    rig.kept.back_up()
    rig.model.write("given-up", 6912, 64)
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    for kind in sorted(OWN):
        (snapshot,) = rig.snapshots(kind)
        rig.cloud.oned.disk_snapshot_revert(rig.vm, rig.numbers[kind], snapshot)
        rig.model.is_again(rig.targets[kind], held)
    rig.delete_snapshots()
    rig.cloud.oned.vm_resume(rig.vm)


def committed(rig: Rig) -> None:
    rig.cloud.lab.fe.run([COMMAND, "commit", str(rig.vm)])


def let_go(rig: Rig) -> None:
    """Of the store: its remote-first disks are overlays from then on."""
    rig.cloud.lab.fe.run([COMMAND, "detach", str(rig.vm)])


def another_comes_and_goes(rig: Rig) -> None:
    image = rig.cloud.data_image("event-other", b"other", 8)
    rig.cloud.oned.disk_attach(rig.vm, image)
    disk = max(int(disk["DISK_ID"]) for disk in rig.cloud.oned.vm(rig.vm).disks)
    rig.cloud.oned.disk_detach(rig.vm, disk)
    rig.cloud.oned.image_delete(image)


EVENTS: Mapping[str, Event] = {
    "off and on": Event(off_and_on),
    "suspended": Event(suspended),
    "stopped": Event(stopped, DIFF, COMMITTED, often=False),
    "undeployed": Event(undeployed, DIFF, COMMITTED),
    "moved live": Event(moved_live),
    "moved while off": Event(moved_off, DIFF, COMMITTED, often=False, maybe=DIFF),
    "moved live to another datastore": Event(moved_within_its_host, often=False),
    "another disk attached and detached": Event(another_comes_and_goes),
    "grown": Event(grown),
    "grown while off": Event(grown_off, often=False),
    "snapshots": Event(with_snapshots),
    "snapshots deleted": Event(without_snapshots),
    "snapshots while off": Event(snapshots_come_and_go_off, OWN, "while the VM was off"),
    "gone back to a snapshot": Event(gone_back, OWN, "while the VM was off"),
    "QEMU killed": Event(killed, FILES, "its QEMU was killed"),
    "QEMU killed, then grown": Event(killed_and_grown, FILES, "its QEMU was killed", often=False),
    "committed": Event(committed, DIFF, COMMITTED),
    "let go of the store": Event(let_go),
}


@pytest.mark.fault(86, "what happened between two backups is in the second, whole where a mark was lost")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if event.often else [pytest.mark.long]) for name, event in EVENTS.items()],
)
def test_increment_after(rig: Rig, name: str) -> None:
    event, kept = EVENTS[name], rig.kept
    if name != "snapshots deleted":
        rig.delete_snapshots()
    kept.reset()
    kept.back_up()
    rig.model.write("marked", 3072, 64)
    kept.back_up()
    rig.model.write("before", 3584, 64)
    event.do(rig)
    rig.model.write("after", 4096, 64)
    kept.back_up()
    kept.check()
    reasons = kept.whole[-1]
    wanted: Dict[int, str] = {
        rig.numbers[kind]: event.why
        for kind in event.whole
        if kind not in event.maybe or rig.numbers[kind] in reasons
    }
    assert set(reasons) == set(wanted), reasons
    assert all(why in reasons[disk] for disk, why in wanted.items()), reasons
    # The next one goes by its mark again.
    rig.model.write("next", 4608, 64)
    kept.back_up()
    assert not kept.whole[-1]
    kept.check(since=len(kept.sums) - 1)
