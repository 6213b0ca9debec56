# SPDX-License-Identifier: Apache-2.0
"""Disks that let go of their store, killed at every step of that; with and without their QEMU, while the
guest runs and off.

Whatever was killed, the next action has all that the guest had written, and every snapshot; the disk lies
over its base or over the image as before, never between.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import traceback
from contextlib import contextmanager
from typing import Dict, Iterator, List

import pytest

from lab import NodeProcess
from semishared.errors import SemisharedError
from semishared.model.base.steps import DetachVm

from .cloud import STORE, SYSTEM, Cloud, until
from .live import DOMAIN, OVERLAY, TRACE, VM, VM_DIR, Environment, Live, s, written

ALL = bool(os.environ.get("SEMISHARED_FULL"))
EVERY = 1 if ALL else 1000
ALWAYS = (
    "detach noted",
    "leased",
    "switch noted",
    "layer kept",
    "layers lie over bases",
    "layers ready",
    "mirrors equal",
    "guest has gone over",
    "switch ended",
)
"""Points that are killed at in every run."""
DISK = OVERLAY
"""The one that is made remote-first here; the others have nothing to let go of."""
BASES = "/var/lib/one/datastores/.semishared/bases"
NOW, KEPT = written(1, 2, 3, 5), {0: written(1), 1: written(1, 2)}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Cloud.up() as cloud:
        live = Live(cloud, {DISK: "<SEMISHARED_LOCAL>remote-first</SEMISHARED_LOCAL>"})
        try:
            live.write(DISK, 1)
            live.change({}, "create", DISK, 0, (0,), domain="")
            live.write(DISK, 2)
            live.change({}, "create", DISK, 1, (0, 1), domain="")
            live.write(DISK, 3)
            live.save("snapshots")
            yield live
        finally:
            live.close()


def begin(live: Live, *, runs: bool = True) -> None:
    """Have a guest that has written since its start, and two snapshots."""
    live.restore("snapshots")
    live.start()
    live.write_running(DISK, 5)
    if not runs:
        live.end_domain()


def detach(live: Live, env: Environment, domain: str = DOMAIN) -> None:
    (answer,) = live.run(env, DetachVm(VM, VM_DIR, domain, (DISK,), ("",), 0))
    assert isinstance(answer, dict)
    if answer["error"]:
        raise SemisharedError(str(answer["error"]))


def put_right(live: Live, domain: str) -> None:
    live.run({}, s.DescribeDisk(live.ref(DISK), domain))


def check(live: Live, now: bytes = NOW) -> str:
    """See that the disk is whole, that nothing is under way or left, and that headers and record say the
    same; return which they say.
    """
    live.check(DISK, now, KEPT)
    names = os.listdir(live.host.path(f"{VM_DIR}/.semishared"))
    assert not [name for name in names if not name.startswith(("disk.", "clone.", "vm.", ".staged-"))], names
    record = live.record(DISK)
    folder = live.host.path(f"{VM_DIR}/disk.{DISK}.snap")
    assert sorted(os.listdir(folder)) == ["0", "1", "2"]
    lowest = live.host.run(
        ["qemu-img", "info", "-U", "--output=json", f"{VM_DIR}/disk.{DISK}.snap/0"]
    ).stdout.decode()
    assert (f"{STORE}/.semishared" in lowest) is (record["how"] == "remote-first"), lowest
    assert ("/leases/" in lowest) is (record["how"] == "overlay"), lowest
    leases = [
        path.name for path in live.host.path(BASES).glob("*/leases/*") if path.name.endswith(f"{VM}-{DISK}")
    ]
    assert leases == ([f"{VM}-{DISK}"] if record["how"] == "overlay" else []), leases
    return record["how"]


def reads_store(live: Live) -> bool:
    """Tell whether the guest's QEMU has the store's image open for the disk too: the clone on the store lies
    over it anyway.
    """
    pid = live.host.path(f"/run/libvirt/qemu/{DOMAIN}.pid").read_text().strip()
    said = live.host.run(["ls", "-l", f"/proc/{pid}/fd"], user="root").stdout.decode().splitlines()
    count = len([line for line in said if line.endswith(f" {live.image_of(DISK)}")])
    assert count in (1, 2), said
    return count == 2


def points(live: Live, *, runs: bool) -> List[str]:
    begin(live, runs=runs)
    live.forget_trace()
    detach(live, {"SEMISHARED_TRACE": TRACE}, DOMAIN if runs else "")
    return live.points()


def test_guest_lets_go_of_the_store_and_every_action_takes_its_disk_for_an_overlay(live: Live) -> None:
    begin(live)
    assert reads_store(live)
    detach(live, {})
    assert not reads_store(live)
    live.at_rest()
    live.check_running(DISK, NOW)
    live.write_running(DISK, 6)
    live.change({}, "create", DISK, 2, (0, 1, 2))
    live.write_running(DISK, 7)
    live.change({}, "delete", DISK, 1, (0, 2))
    live.check_running(DISK, written(1, 2, 3, 5, 6, 7))
    live.end_domain()
    live.check(DISK, written(1, 2, 3, 5, 6, 7), {0: written(1), 2: written(1, 2, 3, 5, 6)})
    assert live.record(DISK)["how"] == "overlay"


def killed(live: Live, number: int, then: str, *, runs: bool) -> str:
    """Kill at a point, then do what is to follow; return how the disk is after that."""
    begin(live, runs=runs)
    with pytest.raises(SemisharedError):
        detach(live, {"SEMISHARED_KILL_AT": str(number)}, DOMAIN if runs else "")
    if then == "without its QEMU":
        live.end_domain()
    domain = DOMAIN if runs and then != "without its QEMU" else ""
    if then == "again":
        detach(live, {}, domain)
    else:
        put_right(live, domain)
        # What was never published the next who writes such a file removes, or gc.
        live.host.run(["find", f"{VM_DIR}/.semishared", "-name", ".staged-*", "-delete"])
    if domain:
        live.at_rest()
        live.check_opened(DISK)
        reads = reads_store(live)
        live.write_running(DISK, 6)
        live.end_domain()
        how = check(live, written(1, 2, 3, 5, 6))
        assert reads is (how == "remote-first")
        return how
    return check(live)


@pytest.mark.parametrize("runs", [True, False], ids=["running", "off"])
def test_killed_at_every_step_the_disk_is_whole_over_its_base_or_over_the_image(
    live: Live, runs: bool
) -> None:
    names, failures, ends = points(live, runs=runs), [], {}
    expected = set(ALWAYS) if runs else {"switch noted", "layer laid over its base", "switch ended"}
    assert expected <= set(names), names
    live.end_domain()
    for number, name in enumerate(names, 1):
        if number % EVERY and name not in expected:
            continue
        ways = ("next action", "without its QEMU", "again") if runs else ("next action", "again")
        # Without SEMISHARED_FULL one of them at each point.
        for then in ways if ALL else (ways[number % len(ways)],):
            try:
                ends[number, then] = killed(live, number, then, runs=runs)
            except Exception:  # noqa: BLE001 - all points are tried, all failures told
                failures.append(f"killed at {number} ({name}), then {then}: {traceback.format_exc(limit=-3)}")
    assert not failures, "\n".join(failures)
    assert {how for (_, then), how in ends.items() if then == "again"} <= {"overlay"}
    # What is noted is so when it has its name, which is the point before.
    over = names.index("guest has gone over") + 1 if runs else names.index("switch noted")
    done = {number: how for (number, then), how in ends.items() if then == "next action"}
    assert all(how == ("overlay" if number >= over else "remote-first") for number, how in done.items()), done


FAILURES: Dict[str, Environment] = {
    "the copy does not begin": {"FAIL_IN": "blockcopy", "FAIL": "before"},
    "libvirt does not answer when it begins": {"FAIL_IN": "blockcopy", "FAIL": "after"},
    "it does not say that the guest has gone over": {"FAIL_IN": "blockjob", "FAIL": "after"},
    "the guest does not rest": {"FAIL_IN": "suspend", "FAIL": "before"},
    "nor is it said that it does": {"FAIL_IN": "suspend", "FAIL": "after"},
    "it gets no delta": {"FAIL_IN": "snapshot-create-as", "FAIL": "before"},
}


@pytest.mark.parametrize("env", FAILURES.values(), ids=FAILURES)
def test_what_libvirt_fails_at_leaves_the_guest_as_it_was_or_over_its_base(
    live: Live, env: Environment
) -> None:
    begin(live)
    with pytest.raises(SemisharedError):
        detach(live, env)
    put_right(live, DOMAIN)
    live.at_rest()
    live.check_opened(DISK)
    live.write_running(DISK, 6)
    live.end_domain()
    check(live, written(1, 2, 3, 5, 6))


@contextmanager
def stopped_at(live: Live, name: str) -> Iterator[List[str]]:
    """Have a driver stand still at the last point of this name; yield what it will have said when it has
    ended, with the block.
    """
    names = points(live, runs=True)
    number = len(names) - names[::-1].index(name)
    begin(live)
    live.forget_trace()
    said: List[str] = []

    def detached() -> None:
        try:
            detach(live, {"SEMISHARED_STOP_AT": str(number), "SEMISHARED_TRACE": TRACE})
        except SemisharedError as e:
            said.append(e.detail)

    at_work = threading.Thread(target=detached)
    at_work.start()
    until(
        lambda: live.host.path(TRACE).exists() and len(live.points()) == number,
        60,
        f"a driver at {name}",
        0.05,
    )
    time.sleep(0.1)
    yield said
    at_work.join(150)
    assert not at_work.is_alive()


@pytest.mark.parametrize("name", ["layers ready", "mirrors equal", "guest has gone over"])
def test_qemu_that_dies_on_the_way_leaves_a_whole_disk_that_the_next_start_opens(
    live: Live, name: str
) -> None:
    """Between the moment in which both hold the same, the record and the pivot too; the driver goes on, and
    finds no guest.
    """
    with stopped_at(live, name) as said:
        live.end_domain()
        go_on(live)
    assert said
    put_right(live, "")
    assert check(live) == "overlay"


def go_on(live: Live) -> None:
    """Let a driver that stands still go on."""
    signal.pidfd_send_signal(live.talk._process._pidfd, signal.SIGCONT)  # type: ignore[attr-defined]


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


def test_guest_that_was_woken_before_its_turn_is_not_switched_any_more(live: Live) -> None:
    """It would write where no record says, until somebody notices."""
    with stopped_at(live, "mirrors equal") as said:
        assert waking(live).wait(30) == 0
        live.write_running(DISK, 6)
        go_on(live)
    assert "was woken after 60 s" in said[0]
    live.at_rest()
    live.check_opened(DISK)
    assert reads_store(live)
    live.end_domain()
    assert check(live, written(1, 2, 3, 5, 6)) == "remote-first"


def test_nobody_wakes_the_guest_between_its_switch_and_the_record(live: Live) -> None:
    with stopped_at(live, "guest has gone over") as said:
        woken = waking(live)
        time.sleep(1)
        assert live.virsh("domstate", DOMAIN) == "paused"
        go_on(live)
    assert (woken.wait(30), said) == (0, [])
    live.at_rest()
    live.check_opened(DISK)
    live.end_domain()
    assert check(live) == "overlay"


def test_guest_is_not_woken_while_libvirt_is_at_a_switch_for_a_driver_that_was_killed(live: Live) -> None:
    """Until that is over libvirt says nothing of it: a QEMU that does not answer for a while."""
    with stopped_at(live, "mirrors equal") as said:
        qemu = live.host.path(f"/run/libvirt/qemu/{DOMAIN}.pid").read_text().strip()
        live.host.run(["kill", "-STOP", qemu], user="root")
        go_on(live)
        time.sleep(3)
        live.talk._process.kill()
        time.sleep(3)
        live.host.run(["kill", "-CONT", qemu], user="root")
        until(lambda: live.virsh("domstate", DOMAIN) == "running", 30, "a guest that goes on", 0.02)
        live.check_opened(DISK)
        live.write_running(DISK, 6)
    assert said
    live.end_domain()
    put_right(live, "")
    assert check(live, written(1, 2, 3, 5, 6)) == "overlay"


def test_action_that_begins_meanwhile_goes_first(live: Live) -> None:
    """OpenNebula knows nothing of what is under way: what it begins ends that, and finds the disk as it
    was.
    """
    with stopped_at(live, "layers lie over bases") as said, live.session({}) as session:
        session.run([s.DescribeDisk(live.ref(DISK), DOMAIN)])
    assert said
    live.at_rest()
    live.check_opened(DISK)
    assert reads_store(live)
    live.end_domain()
    assert check(live) == "remote-first"


@pytest.mark.parametrize("name", ["layers ready", "mirrors equal", "guest has gone over"])
def test_libvirtd_that_dies_on_the_way_and_is_started_anew(live: Live, name: str) -> None:
    """It finds again what QEMU does; whoever has been told nothing any more leaves the guest to the next
    action.
    """
    with stopped_at(live, name):
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
    put_right(live, DOMAIN)
    live.at_rest()
    live.check_opened(DISK)
    reads = reads_store(live)
    live.write_running(DISK, 6)
    live.end_domain()
    assert reads is (check(live, written(1, 2, 3, 5, 6)) == "remote-first")


VMM = "/var/tmp/one/vmm/semishared"


def test_guest_that_is_saved_meanwhile_has_the_disk_it_had(live: Live) -> None:
    """libvirt saves no guest of which a disk is being copied: OpenNebula would be told that it cannot be
    suspended.
    """
    checkpoint = f"{VM_DIR}/checkpoint"
    with stopped_at(live, "layers ready") as said:
        live.host.run([f"{VMM}/save", DOMAIN, checkpoint, "h1", str(VM), "h1"])
    assert said and live.host.path(checkpoint).stat().st_size
    assert DOMAIN not in live.virsh("list", "--all", "--name").split()
    assert check(live) == "remote-first"


def test_disk_that_is_taken_from_the_guest_meanwhile_is_the_one_it_had(live: Live) -> None:
    """As far as this guest lets it: one that has booted nothing gives no device away, but it is asked for."""
    with stopped_at(live, "layers ready") as said:
        argv = [f"{VMM}/detach_disk", DOMAIN, f"{VM_DIR}/disk.{DISK}", "vda", "0", str(VM), "h1"]
        done = live.host.run(argv, check=False)
    assert said and b"does not support hotplugging" in done.stderr, done.stderr
    live.at_rest()
    live.end_domain()
    assert check(live) == "remote-first"


def test_guest_that_is_paused_or_at_work_for_others_is_left_alone(live: Live) -> None:
    begin(live)
    with live.paused():
        detach(live, {})
    with live.session({}) as other:
        other.run([s.DescribeDisk(live.ref(DISK), DOMAIN)])
        host = live.host.run(["ls", f"{VM_DIR}/disk.{DISK}.snap"]).stdout
        with pytest.raises(SemisharedError, match="acted upon"):
            detach(live, {})
        assert live.host.run(["ls", f"{VM_DIR}/disk.{DISK}.snap"]).stdout == host
    live.end_domain()
    assert check(live) == "remote-first"


def test_host_without_room_for_the_copies_says_how_much_is_missing(live: Live) -> None:
    live.end_domain()
    with live.cloud.small(live.host, SYSTEM, "16M"):
        begin(live)
        free = int(live.host.run(["df", "--output=avail", "-B1", SYSTEM]).stdout.split()[-1])
        live.host.run(
            ["dd", "if=/dev/zero", f"of={SYSTEM}/filler", "bs=4096", f"count={(free - 500_000) // 4096}"]
        )
        with pytest.raises(SemisharedError, match=r"no space for .* are missing.*SS030"):
            detach(live, {})
        live.host.run(["rm", f"{SYSTEM}/filler"])
        assert reads_store(live)
        detach(live, {})
        assert not reads_store(live)
        live.end_domain()
        assert check(live) == "overlay"


def test_guest_that_has_something_else_open_is_left_alone(live: Live) -> None:
    begin(live)
    live.end_domain()
    path = f"{VM_DIR}/disk.{DISK}.snap/0"
    other = f"{STORE}/other"
    live.host.run(["cp", live.image_of(DISK), other])
    live.host.run(["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", other, "-F", "raw", path])
    live.start()
    with pytest.raises(SemisharedError, match="which does not end at"):
        detach(live, {})
    live.at_rest()
    live.end_domain()
    live.host.path(other).unlink()
