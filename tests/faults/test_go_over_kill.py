# SPDX-License-Identifier: Apache-2.0
"""Guests that go over from one backing chain to another, killed at every step of that; with and without their
QEMU, for each caller (going_over.py).

Whatever was killed, the next action has all that the guest had written, and every snapshot; a disk has gone
over or has not, never between.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import nullcontext
from typing import Any, Callable, Dict, Iterator, List, Sequence

import pytest

from lab import NodeProcess, roots
from semishared.errors import SemisharedError
from upgrade import versions

from . import conftest
from .cloud import STORE, SYSTEM, until
from .going_over import (
    COPIED,
    DELAYS,
    OLDER,
    OWN,
    SITES,
    TRACE,
    Caller,
    Detach,
    Directory,
    Machines,
    Migration,
    Move,
    go_on,
    older_version,
    record_in,
)
from .live import COPY, DOMAIN, OVERLAY, VM, VM_DIR, Live, digest, s, written

MIGRATIONS = [
    Migration("add", OVERLAY, "tree", ("snapshot-create-as",)),
    Migration("add", COPY, "plain", ("snapshot-create-as",)),
    Migration("merge", OVERLAY, "tree", ("blockcommit", "blockjob", "suspend", "resume")),
    Migration("merge", COPY, "plain", ("blockcommit",)),
]
DIRECTORY = Directory()
DETACH, DETACH_OFF = Detach(runs=True), Detach(runs=False)
MOVES = [Move(OVERLAY, "move layers"), Move(COPY, "move raw")]
"""One with snapshots, and one that is a plain file to its guest."""
FAILURES = {
    "the copy does not begin": ("blockcopy", "before"),
    "libvirt does not answer when it begins": ("blockcopy", "after"),
    "it does not say that the guest has gone over": ("blockjob", "after"),
    "the guest does not rest": ("suspend", "before"),
    "nor is it said that it does": ("suspend", "after"),
    "it gets no delta": ("snapshot-create-as", "before"),
}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines() as machines:
        yield machines


@pytest.fixture
def live(machines: Machines, site: str) -> Live:
    return machines.of(site)


def callers(*found: Caller) -> Any:
    """Have a test run for each of these callers, on machines made for it."""
    return pytest.mark.parametrize(
        ("site", "caller"), [pytest.param(caller.site, caller, id=caller.id) for caller in found]
    )


plain, remote, devices = (pytest.mark.parametrize("site", [site], ids=[""]) for site in SITES)


# -- each caller ------------------------------------------------------------------------------------


@callers(*MIGRATIONS, DIRECTORY, DETACH, DETACH_OFF, *MOVES)
def test_killed_at_every_step_it_has_gone_over_or_has_not(live: Live, caller: Caller) -> None:
    count, failures = caller.proved(live)
    row = {"points": count, "reruns": count, "deletes": 0, "passed": count - len(failures)}
    conftest.figures.setdefault("actions", {})[caller.id] = row
    assert not failures, "\n".join(failures)
    assert count > 0


@callers(*MIGRATIONS)
def test_virsh_that_dies_on_the_way(live: Live, caller: Migration) -> None:
    caller.points(live)
    for verb in caller.verbs:
        for delay in DELAYS:
            caller.killed(live, 0, "again", {"DIE_IN": verb, "DIE_AFTER": str(delay)})


@pytest.mark.parametrize("how", FAILURES.values(), ids=FAILURES)
@callers(DETACH, MOVES[0])
def test_what_libvirt_fails_at_leaves_the_guest_on_one_side(
    live: Live, caller: Caller, how: Sequence[str]
) -> None:
    env = {"FAIL_IN": how[0], "FAIL": how[1]}
    caller.begin(live)
    with pytest.raises(SemisharedError):
        caller.act(live, env)
    caller.put_right(live, DOMAIN)
    caller.check_running(live)
    live.write_running(caller.disk, 6)
    live.end_domain()
    caller.check(live, written(*caller.marks, 6))


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.long), "after"])
@pytest.mark.parametrize(
    ("site", "caller", "verb"),
    [
        pytest.param("plain", caller, verb, id=f"{caller.id}, {verb}")
        for caller in MIGRATIONS
        for verb in caller.verbs
    ],
)
def test_deltas_that_libvirt_fails_at(live: Live, caller: Migration, verb: str, when: str) -> None:
    """One error; the guest goes on; the records name what it writes to; issued again, the action ends as
    undisturbed.
    """
    caller.begin(live)
    # A guest that runs has been resumed, whatever virsh says of it.
    fails = (
        nullcontext()
        if (verb, when) == ("resume", "after")
        else pytest.raises(SemisharedError, match="no mood")
    )
    with fails:
        caller.act(live, {"FAIL_IN": verb, "FAIL": when})
    live.check_opened(caller.disk)
    caller.act(live, {})
    live.at_rest()
    live.check_running(caller.disk, written(*caller.marks))
    live.end_domain()
    caller.check(live, written(*caller.marks))


@pytest.mark.parametrize("at", ["layers ready", "mirrors equal", "guest has gone over"])
@callers(DETACH, *MOVES)
def test_qemu_that_dies_on_the_way_leaves_a_whole_disk_that_the_next_start_opens(
    live: Live, caller: Caller, at: str
) -> None:
    """Between the moment in which both hold the same, the record and the pivot too; the driver goes on, and
    finds no guest.
    """
    if isinstance(caller, Move) and at == "layers ready":
        at = "layers are being mirrored"
    with caller.stopped_at(live, at) as said:
        live.end_domain()
        go_on(live)
    assert said
    caller.put_right(live, "")
    over = caller.check(live, written(*caller.marks))
    assert over or caller is not DETACH
    live.start()
    live.check_opened(caller.disk)
    live.end_domain()


@callers(DETACH, MOVES[0])
def test_action_that_begins_meanwhile_goes_first_and_two_do_not_wait_for_each_other(
    live: Live, caller: Caller
) -> None:
    """OpenNebula knows nothing of what is under way: what it begins ends that, and finds the disk as it
    was.
    """
    at = "layers lie over bases" if caller is DETACH else "layers are being mirrored"
    with caller.stopped_at(live, at) as said:
        if isinstance(caller, Move):
            link = f"{VM_DIR}/disk.{caller.disk}.left.snap"
            was = live.host.run(["realpath", link]).stdout.decode().strip()
            assert len(caller.opened(live)) == 2
        caller.put_right(live, DOMAIN)
    assert said
    caller.check_running(live)
    if isinstance(caller, Move):
        assert caller.opened(live) == {was}
    with live.session({}) as other:
        other.run([s.DescribeDisk(live.ref(caller.disk), DOMAIN)])
        folder = ["ls", "-i", f"{VM_DIR}/disk.{caller.disk}.snap/"]
        seen = live.host.run(folder).stdout
        with pytest.raises(SemisharedError, match="acted upon"):
            caller.act(live, {})
        assert live.host.run(folder).stdout == seen
    with live.paused():
        caller.act(live, {})
    live.end_domain()
    assert caller.check(live, written(*caller.marks)) is False


@callers(MIGRATIONS[2], DIRECTORY)
def test_guest_that_somebody_has_paused_stays_where_it_is_until_it_runs(live: Live, caller: Caller) -> None:
    """Nobody keeps it from going on between the switch and the records."""
    act: Callable[[], object]
    if caller is DIRECTORY:
        caller.begin(live)

        def act() -> None:
            caller.act(live, {})
    else:
        live.restore("plain")
        live.start()
        live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN))

        def act() -> None:
            live.run({}, s.MergeDeltas(VM, VM_DIR, DOMAIN))

    with live.paused():
        act()
    for disk in OWN if caller is not DIRECTORY else ():
        live.check_opened(disk)
        assert "1000000" in live.record(disk)["path"]
    live.write_running(OVERLAY, 6)
    act()
    if caller is DIRECTORY:
        caller.check_running(live)
        live.end_domain()
        assert live.reads(record_in(live, COPIED, OVERLAY)["path"], "qcow2") == digest(written(1, 2, 5, 6))
    else:
        live.at_rest()
        live.end_domain()
        live.check(OVERLAY, written(1, 2, 6), {})


# -- what an older version has left -------------------------------------------------------------------

VERSION = "693964a1"
"""The last one that noted in deltas.json."""
LEFT = [
    (MIGRATIONS[0], "guest writes to deltas", ("again", "without its QEMU")),
    (MIGRATIONS[3], "deltas mirrored", ("again", "without its QEMU")),
    (DIRECTORY, "delta is being mirrored", ("again", "without its QEMU", "back")),
    (DIRECTORY, "guest has gone over", ("again", "without its QEMU")),
    (DETACH, "detach noted", ("next action",)),
    (DETACH, "layers lie over bases", ("next action", "without its QEMU")),
    (DETACH, "guest has gone over", ("next action", "without its QEMU")),
    (DETACH_OFF, "switch noted", ("next action",)),
    (MOVES[0], "layers have their names on the new device", ("next action", "without its QEMU", "again")),
    (MOVES[1], "guest has gone over", ("next action", "without its QEMU")),
]
"""Of each kind of note: where its writer is killed, and what follows; all but the first with test-full."""

passed_by_older: Dict[str, List[str]] = {}


@pytest.mark.parametrize(
    ("site", "caller", "at", "then"),
    [
        pytest.param(
            caller.site,
            caller,
            at,
            then,
            id=f"{caller.id}, {at}, {then}",
            marks=[pytest.mark.long] if then != ways[0] else [],
        )
        for caller, at, ways in LEFT
        for then in ways
    ],
)
def test_what_an_older_version_has_left_is_settled(live: Live, caller: Caller, at: str, then: str) -> None:
    if roots.LIBVIRT_7_0 and "raw" in caller.id:
        pytest.skip(f"{VERSION} moves no raw layer under libvirt 7.0")
    if not live.host.path(OLDER).exists():
        versions.lay_out(live.host.path(OLDER), VERSION)
    if caller.id not in passed_by_older:
        caller.points(live)
        live.end_domain()
        with older_version(live):
            passed_by_older[caller.id] = caller.passed(live)
        live.end_domain()
    names = passed_by_older[caller.id]
    number = names.index(at) + 1
    with older_version(live):
        caller.begin(live)
        with pytest.raises(SemisharedError):
            caller.act(live, {"SEMISHARED_KILL_AT": str(number)})
    assert live.host.path(f"{caller.place}/.semishared/deltas.json").exists()
    over, said = caller.followed(live, number, then)
    wanted = caller.wanted(names, number, then, said)
    assert over is wanted or wanted is None
    assert not live.host.path(f"{caller.place}/.semishared/deltas.json").exists()


# -- deltas -------------------------------------------------------------------------------------------


@plain
@pytest.mark.parametrize("at", ["mirrors equal", "guest has gone over"])
def test_guest_that_goes_on_after_a_killed_merge_is_recorded_where_it_writes(live: Live, at: str) -> None:
    """Some of its deltas merged, some not; before it is woken the records say which, and its QEMU may die any
    time.
    """
    merge = s.MergeDeltas(VM, VM_DIR, DOMAIN)
    live.restore("plain")
    live.start()
    live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN))
    live.forget_trace()
    live.run({"SEMISHARED_TRACE": TRACE}, merge)
    number = live.points().index(at) + 1
    live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN))
    with pytest.raises(SemisharedError):
        live.run({"SEMISHARED_KILL_AT": str(number)}, merge)
    until(lambda: live.virsh("domstate", DOMAIN) == "running", 20, "a guest that was woken", 0.05)
    for disk in OWN:
        live.check_opened(disk)
        live.write_running(disk, 6)
    live.end_domain()
    live.put_right()
    for disk in OWN:
        live.check(disk, written(1, 2, 6), {})


@plain
def test_disk_that_was_taken_away_with_its_delta_does_not_come_back(live: Live) -> None:
    live.restore("plain")
    live.start()
    live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN))
    live.write_running(OVERLAY, 6)
    live.end_domain()
    live.run({}, s.RemoveDisk(live.ref(COPY), ""))
    live.put_right()
    assert not [
        name
        for name in live.listing()
        if name.startswith(f"vm/{VM}/") and (f"disk.{COPY}" in name or "deltas" in name or "go-over" in name)
    ]
    live.check(OVERLAY, written(1, 2, 6), {})


# -- a copy of the directory --------------------------------------------------------------------------


@plain
def test_copy_that_its_guest_has_not_entered_does_not_move_without_what_it_wrote(live: Live) -> None:
    DIRECTORY.begin(live)
    live.end_domain()
    further = Directory()
    further.place = f"{COPIED.replace('/103', '/104')}"
    live.run({}, s.RenameVm(VM, COPIED, further.place, True, "", (0, 1, 2, 3)))
    further.check(live, written(*DIRECTORY.marks))
    live.host.run(["rm", "-rf", further.place])


@plain
def test_directory_that_a_guest_has_open_is_not_removed(live: Live) -> None:
    DIRECTORY.begin(live)
    with pytest.raises(SemisharedError, match="open"):
        live.run({}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=True))
    live.run(
        {}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=False), s.CheckNotOpen(VM, COPIED, DOMAIN, disks=True)
    )
    DIRECTORY.act(live, {})
    live.run({}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=True))
    with pytest.raises(SemisharedError, match="open"):
        live.run({}, s.CheckNotOpen(VM, COPIED, DOMAIN, disks=True))


# -- disks that let go of their store -----------------------------------------------------------------


@remote
def test_guest_lets_go_of_the_store_and_every_action_takes_its_disk_for_an_overlay(live: Live) -> None:
    disk = DETACH.disk
    DETACH.begin(live)
    assert DETACH.reads_store(live)
    DETACH.act(live, {})
    assert not DETACH.reads_store(live)
    live.at_rest()
    live.check_running(disk, written(*DETACH.marks))
    live.write_running(disk, 6)
    live.change({}, "create", disk, 2, (0, 1, 2))
    live.write_running(disk, 7)
    live.change({}, "delete", disk, 1, (0, 2))
    live.check_running(disk, written(1, 2, 3, 5, 6, 7))
    live.end_domain()
    live.check(disk, written(1, 2, 3, 5, 6, 7), {0: written(1), 2: written(1, 2, 3, 5, 6)})
    assert live.record(disk)["how"] == "overlay"


def waking(live: Live) -> NodeProcess:
    """Do what is done when the guest has rested for too long."""
    token = json.loads(live.host.path(f"{VM_DIR}/.semishared/frozen.json").read_text())["token"]
    argv = [
        "/usr/bin/python3",
        "-I",
        "/var/tmp/one/lib/semishared/guest/freeze_watch.py",
        VM_DIR,
        DOMAIN,
        token,
        "0",
    ]
    return live.host.popen(argv, stdin=subprocess.PIPE)


@remote
def test_guest_that_was_woken_before_its_turn_is_not_switched_any_more(live: Live) -> None:
    """It would write where no record says, until somebody notices."""
    with DETACH.stopped_at(live, "mirrors equal") as said:
        assert waking(live).wait(30) == 0
        live.write_running(DETACH.disk, 6)
        go_on(live)
    assert "was woken after 60 s" in said[0]
    DETACH.check_running(live)
    assert DETACH.reads_store(live)
    live.end_domain()
    assert DETACH.check(live, written(1, 2, 3, 5, 6)) is False


@remote
def test_nobody_wakes_the_guest_between_its_switch_and_the_record(live: Live) -> None:
    with DETACH.stopped_at(live, "guest has gone over") as said:
        woken = waking(live)
        time.sleep(1)
        assert live.virsh("domstate", DOMAIN) == "paused"
        go_on(live)
    assert (woken.wait(30), said) == (0, [])
    DETACH.check_running(live)
    live.end_domain()
    assert DETACH.check(live, written(*DETACH.marks))


@remote
def test_guest_is_not_woken_while_libvirt_is_at_a_switch_for_a_driver_that_was_killed(live: Live) -> None:
    """Until that is over libvirt says nothing of it: a QEMU that does not answer for a while."""
    with DETACH.stopped_at(live, "mirrors equal") as said:
        qemu = live.host.path(f"/run/libvirt/qemu/{DOMAIN}.pid").read_text().strip()
        live.host.run(["kill", "-STOP", qemu], user="root")
        go_on(live)
        time.sleep(3)
        live.talk._process.kill()
        time.sleep(3)
        live.host.run(["kill", "-CONT", qemu], user="root")
        until(lambda: live.virsh("domstate", DOMAIN) == "running", 30, "a guest that goes on", 0.02)
        live.check_opened(DETACH.disk)
        live.write_running(DETACH.disk, 6)
    assert said
    live.end_domain()
    DETACH.put_right(live, "")
    assert DETACH.check(live, written(1, 2, 3, 5, 6))


@remote
@pytest.mark.parametrize("name", ["layers ready", "mirrors equal", "guest has gone over"])
def test_libvirtd_that_dies_on_the_way_and_is_started_anew(live: Live, name: str) -> None:
    """It finds again what QEMU does; whoever has been told nothing any more leaves the guest to the next
    action.
    """
    with DETACH.stopped_at(live, name):
        pid = live.host.run(["pgrep", "-x", "libvirtd"], user="root").stdout.decode().strip()
        live.host.run(["kill", "-KILL", pid], user="root")
        live.host.run(["/usr/sbin/libvirtd", "-d"], user="root")
        until(
            lambda: live.virsh("domstate", DOMAIN, check=False) in ("running", "paused"),
            20,
            "a libvirtd that knows the guest",
            0.05,
        )
        go_on(live)
    DETACH.put_right(live, DOMAIN)
    DETACH.check_running(live)
    reads = DETACH.reads_store(live)
    live.write_running(DETACH.disk, 6)
    live.end_domain()
    assert reads is not DETACH.check(live, written(1, 2, 3, 5, 6))


VMM = "/var/tmp/one/vmm/semishared"


@remote
def test_guest_that_is_saved_meanwhile_has_the_disk_it_had(live: Live) -> None:
    """libvirt saves no guest of which a disk is being copied: OpenNebula would be told that it cannot be
    suspended.
    """
    checkpoint = f"{VM_DIR}/checkpoint"
    with DETACH.stopped_at(live, "layers ready") as said:
        live.host.run([f"{VMM}/save", DOMAIN, checkpoint, "h1", str(VM), "h1"])
    assert said and live.host.path(checkpoint).stat().st_size
    assert DOMAIN not in live.virsh("list", "--all", "--name").split()
    assert DETACH.check(live, written(*DETACH.marks)) is False


@remote
def test_disk_that_is_taken_from_the_guest_meanwhile_is_the_one_it_had(live: Live) -> None:
    """As far as this guest lets it: one that has booted nothing gives no device away, but it is asked for."""
    with DETACH.stopped_at(live, "layers ready") as said:
        argv = [f"{VMM}/detach_disk", DOMAIN, f"{VM_DIR}/disk.{DETACH.disk}", "vda", "0", str(VM), "h1"]
        done = live.host.run(argv, check=False)
    assert said and b"does not support hotplugging" in done.stderr, done.stderr
    live.at_rest()
    live.end_domain()
    assert DETACH.check(live, written(*DETACH.marks)) is False


@remote
def test_host_without_room_for_the_copies_says_how_much_is_missing(live: Live) -> None:
    live.end_domain()
    with live.cloud.small(live.host, SYSTEM, "16M"):
        DETACH.begin(live)
        free = int(live.host.run(["df", "--output=avail", "-B1", SYSTEM]).stdout.split()[-1])
        live.host.run(
            ["dd", "if=/dev/zero", f"of={SYSTEM}/filler", "bs=4096", f"count={(free - 500_000) // 4096}"]
        )
        with pytest.raises(SemisharedError, match=r"SS030 .*no space for .* are missing"):
            DETACH.act(live, {})
        live.host.run(["rm", f"{SYSTEM}/filler"])
        assert DETACH.reads_store(live)
        DETACH.act(live, {})
        assert not DETACH.reads_store(live)
        live.end_domain()
        assert DETACH.check(live, written(*DETACH.marks))


@remote
def test_guest_that_has_something_else_open_is_left_alone(live: Live) -> None:
    DETACH.begin(live)
    live.end_domain()
    path = f"{VM_DIR}/disk.{DETACH.disk}.snap/0"
    other = f"{STORE}/other"
    live.host.run(["cp", live.image_of(DETACH.disk), other])
    live.host.run(["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", other, "-F", "raw", path])
    live.start()
    with pytest.raises(SemisharedError, match="which does not end at"):
        DETACH.act(live, {})
    live.at_rest()
    live.end_domain()
    live.host.path(other).unlink()


# -- disks that go to another device ------------------------------------------------------------------


@callers(*MOVES)
def test_disk_goes_to_another_device_and_back_under_its_guest_and_every_action_finds_it(
    live: Live, caller: Move
) -> None:
    disk = caller.disk
    caller.begin(live)
    first = caller.link(live)
    for mark, back in ((6, False), (7, True)):
        caller.act(live, {})
        assert (caller.link(live).uuid == first.uuid) is back
        caller.check_running(live)
        assert len(caller.places(live)) == 1
        live.write_running(disk, mark)
    now = written(*caller.marks, 6, 7)
    live.check_running(disk, now)
    number = 2 if disk == OVERLAY else 0
    live.change({}, "create", disk, number, tuple(range(number + 1)))
    live.write_running(disk, 4)
    caller.act(live, {})
    caller.check_running(live)
    live.end_domain()
    assert caller.link(live).uuid != first.uuid
    kept = {**caller.kept, number: now}
    live.check(disk, written(*caller.marks, 4, 6, 7), kept)
    caller.act(live, {}, "")
    live.check(disk, written(*caller.marks, 4, 6, 7), kept)


@devices
def test_device_that_becomes_full_under_the_guest_meanwhile_keeps_it(live: Live) -> None:
    """What the guest writes until it has moved goes to the device that is left: a guest that found it full
    would be paused.
    """
    move = MOVES[0]
    move.begin(live)
    (first,) = move.opened(live)
    device = first.partition("/.semishared")[0]
    said: List[str] = []

    def moved() -> None:
        try:
            move.act(live, {}, rate=100 << 10)
        except SemisharedError as e:
            said.append(str(e))

    at_work = threading.Thread(target=moved)
    at_work.start()
    until(lambda: len(move.places(live)) == 2, 30, "a copy that has begun", 0.02)
    free = int(live.host.run(["df", "--output=avail", "-B1", device]).stdout.split()[-1])
    live.host.run(["fallocate", "-l", str(free - (1 << 20)), f"{device}/filler"], user="root")
    at_work.join(60)
    live.host.run(["rm", "-f", f"{device}/filler"], user="root")
    assert not at_work.is_alive() and said and "where its guest writes until it has moved" in said[0], said
    move.check_running(live)
    assert move.opened(live) == {first}
    live.end_domain()
    move.check(live, written(*move.marks))
