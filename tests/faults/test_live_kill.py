# SPDX-License-Identifier: Apache-2.0
"""Actions on a running guest's disks, killed at every step and in the midst of libvirt's work; then issued
again.

Afterwards the guest runs, nothing is left in its QEMU or beside its disks, and after QEMU has been killed too
every disk and every snapshot holds what it must. The same if QEMU dies with the action: whatever it had in
memory only, what the next start opens holds all that the guest had written, and the action can be issued
again while the VM is off.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import pytest

from lab import roots
from lab.listening import events
from semishared.errors import SemisharedError
from semishared.model.disk.record import Record

from . import agent_guest, conftest
from .cloud import Cloud, until
from .live import (
    COPY,
    DOMAIN,
    IN_PLACE,
    ON_STORE,
    OVERLAY,
    PLACES,
    SAVED,
    TRACE,
    VM,
    VM_DIR,
    Environment,
    Live,
    MiB,
    digest,
    s,
    written,
)

ALL = bool(os.environ.get("SEMISHARED_FULL"))
DELAYS = (0.005, 0.05) if ALL else (0.05,)
"""Seconds after which virsh dies."""
EVERY = 5
"""Without SEMISHARED_FULL every fifth point of each action, another fifth for each."""


@dataclass
class Case:
    """One action on one disk: what it starts from, what is there then and afterwards, which calls of virsh
    die.
    """

    name: str
    disk: int
    start: str
    act: Callable[[Live, Environment], object]
    dies_in: Sequence[str] = ()
    kept: Dict[int, bytes] = field(default_factory=dict)
    now: bytes = written(1, 2)
    off: Optional[Callable[[Live], object]] = None
    """The same action on a VM that is off."""


CHANGED = bytes(3 * MiB) + bytes([3]) * (MiB // 2) + bytes(len(written()) - 3 * MiB - MiB // 2)
"""What an increment has where the guest has written 3 since the one before."""
KEPT = {0: written(1, 2), 1: written(1, 2, 3), -1: written(1, 2, 3, 4)}


def _create(disk: int, start: str, number: int) -> Case:
    kept = {number: written(1, 2)} if start == "plain" else {0: KEPT[0], 1: KEPT[1], number: KEPT[-1]}
    verb = "blockcopy" if disk == IN_PLACE else "snapshot-create-as"
    return Case(
        f"snap_create_live {PLACES[disk]}, snapshot {number}",
        disk,
        start,
        lambda live, env: live.change(env, "create", disk, number, tuple(kept)),
        (verb,),
        kept,
        written(1, 2) if start == "plain" else KEPT[-1],
        lambda live: live.change({}, "create", disk, number, tuple(kept), ""),
    )


def _delete(disk: int, number: int, dies_in: Sequence[str]) -> Case:
    return Case(
        f"snap_delete running {PLACES[disk]}, snapshot {number}",
        disk,
        "tree",
        lambda live, env: live.change(env, "delete", disk, number, (0, 1)),
        dies_in,
        {0: KEPT[0], 1: KEPT[1]},
        KEPT[-1],
        lambda live: live.change({}, "delete", disk, number, (0, 1), ""),
    )


def _delete_again(disk: int) -> Case:
    """Snapshot 2, after snapshot 0 was merged into 1: libvirt still knows its layer, which is not there any
    more.
    """

    def act(live: Live, env: Environment, domain: str = DOMAIN) -> None:
        live.change({}, "delete", disk, 0, (0, 1, 2), domain)
        live.change(env, "delete", disk, 2, (1, 2), domain)

    return Case(
        f"snap_delete running {PLACES[disk]}, snapshot 2, after 0 merged",
        disk,
        "deep",
        act,
        ("blockpull",),
        {1: KEPT[1]},
        written(1, 2, 3, 4, 5),
        lambda live: act(live, {}, ""),
    )


def _save(disk: int) -> Case:
    return Case(
        f"cpds live {PLACES[disk]}",
        disk,
        "tree",
        lambda live, env: live.run(env, s.SaveDisk(live.ref(disk), SAVED, "raw", DOMAIN, freeze="SUSPEND")),
        ("blockcopy",),
        {0: KEPT[0], 1: KEPT[1]},
        KEPT[-1],
    )


CASES = [
    _create(OVERLAY, "plain", 0),
    _create(COPY, "plain", 0),
    _create(ON_STORE, "plain", 3),
    _create(IN_PLACE, "plain", 0),
    _create(OVERLAY, "tree", 2),
    _delete(OVERLAY, 1, ("blockpull", "suspend", "resume")),
    _delete(OVERLAY, 0, ()),
    _delete(COPY, 1, ("blockpull",)),
    _delete(ON_STORE, 1, ("blockpull",)),
    _delete(IN_PLACE, 1, ()),
    _delete_again(OVERLAY),
    _save(OVERLAY),
    _save(IN_PLACE),
    Case(
        "prebackup_live",
        OVERLAY,
        "plain",
        lambda live, env: live.back_up(env, "SUSPEND"),
        ("suspend", "resume", "backup-begin"),
    ),
    Case(
        "prebackup_live, an increment",
        OVERLAY,
        "marked",
        lambda live, env: live.back_up(env, "SUSPEND", since=0),
        ("suspend", "resume", "backup-begin"),
        now=written(1, 2, 3),
    ),
    Case("postbackup_live", OVERLAY, "backed up", lambda live, env: live.end_backup(env)),
]


backs_up = pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")


def _row(case: Case, *values: Any) -> Any:
    """Return values for a test of a case, which is skipped where libvirt does not have what it asks for."""
    return pytest.param(*values, marks=[backs_up] if "backup" in case.name else [])


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Cloud.up() as cloud:
        live = Live(cloud)
        try:
            for disk in range(4):
                for mark in (1, 2):
                    live.write(disk, mark)
            live.save("plain")
            for number in (0, 1):
                for disk in range(4):
                    live.change({}, "create", disk, number, domain="")
                    live.write(disk, number + 3)
            live.save("tree")
            live.change({}, "create", OVERLAY, 2, domain="")
            live.write(OVERLAY, 5)
            live.save("deep")
            if not roots.LIBVIRT_7_0:
                live.restore("plain")
                live.start()
                live.back_up({}, "NONE")
                live.end_domain()
                live.save("backed up")
                live.restore("plain")
                live.start()
                live.back_up({}, "NONE", since=-1)
                live.end_backup({})
                for disk in range(4):
                    live.write_running(disk, 3)
                # Not as a power cut: QEMU writes its bitmaps out at its end.
                live.virsh("destroy", DOMAIN)
                live.end_domain()
                live.save("marked")
            yield live
        finally:
            live.close()


class Proof:
    """One case, killed everywhere."""

    def __init__(self, live: Live, case: Case) -> None:
        self.live, self.case = live, case
        self.failures: List[str] = []
        self.row: Dict[str, Any] = {"points": 0, "reruns": 0, "deletes": 0, "passed": 0}

    def run(self) -> None:
        live, case = self.live, self.case
        self.begin()
        live.forget_trace()
        case.act(live, {"SEMISHARED_TRACE": TRACE})
        names = live.points()
        self.check()
        self.wanted = live.listing()
        for number, name in enumerate(names, 1):
            if not ALL and number % min(EVERY, len(names)) != len(case.name) % min(EVERY, len(names)):
                continue
            kill = {"SEMISHARED_KILL_AT": str(number)}
            self.attempt(f"killed at {number} ({name})", kill, self.rerun)
            if case.off:
                self.attempt(f"killed with its QEMU at {number} ({name})", kill, self.power_cut)
        for verb in case.dies_in:
            for delay in DELAYS:
                dies = {"DIE_IN": verb, "DIE_AFTER": str(delay)}
                self.attempt(f"killed with virsh {verb} after {delay} s", dies, self.rerun)

    def begin(self) -> None:
        self.live.restore(self.case.start)
        self.live.start()

    def attempt(self, where: str, env: Environment, then: Callable[[], None]) -> None:
        self.row["points"] += 1
        try:
            self.begin()
            with pytest.raises(SemisharedError):
                self.case.act(self.live, env)
            then()
            self.row["passed"] += 1
        except Exception:  # noqa: BLE001 - all points are tried, all failures told
            self.failures.append(f"{where}: {traceback.format_exc(limit=-3)}")

    def rerun(self) -> None:
        """Issue the action again, on the guest that still runs."""
        self.row["reruns"] += 1
        self.case.act(self.live, {})
        # To read through QEMU may let it write what it knows, which it need not have done else: so at every
        # other point.
        self.check(read=self.row["points"] % 2 == 0)
        assert self.live.listing() == self.wanted

    def power_cut(self) -> None:
        """See what the next start opens when QEMU is gone as well; then issue the action again."""
        live, case = self.live, self.case
        live.end_domain(at_work=True)
        live.put_right()
        live.check(case.disk, case.now, case.kept)
        self.row["reruns"] += 1
        assert case.off
        case.off(live)
        live.check(case.disk, case.now, case.kept)

    def check(self, read: bool = True) -> None:
        """See that the action is done and the guest whole; then again without its QEMU."""
        live, case = self.live, self.case
        live.at_rest()
        if read:
            live.check_running(case.disk, case.now)
        else:
            live.check_opened(case.disk)
        live.end_domain()
        live.check(case.disk, case.now, case.kept)
        if case.name.startswith("cpds"):
            assert live.reads(SAVED, "raw") == digest(case.now)
        if case.name.startswith("prebackup"):
            number = int(case.start == "marked")
            for disk in range(4):
                wanted = CHANGED if number else case.now
                assert live.reads(f"{VM_DIR}/backup/disk.{disk}.{number}", "qcow2") == digest(wanted)


def _killed_at(live: Live, name: str, case: Case, saved: str) -> None:
    """Have an action on a guest that was started from saved files killed at the first point of a name."""
    live.restore(saved)
    live.start()
    live.forget_trace()
    case.act(live, {"SEMISHARED_TRACE": TRACE})
    number = live.points().index(name) + 1
    live.restore(saved)
    live.start()
    with pytest.raises(SemisharedError):
        case.act(live, {"SEMISHARED_KILL_AT": str(number)})


def test_what_stands_in_for_a_merged_layer_goes_with_whatever_comes_next(live: Live) -> None:
    """Not only with what changes snapshots: an empty layer is none that a plan may find."""
    _killed_at(live, "layer stood in for", _delete_again(OVERLAY), "deep")
    folder = live.host.path(f"{VM_DIR}/disk.{OVERLAY}.snap")
    assert sorted(os.listdir(folder)) == ["0", "1", "2", "3"]
    live.run({}, s.DescribeDisk(live.ref(OVERLAY), DOMAIN))
    assert sorted(os.listdir(folder)) == ["1", "2", "3"]
    live.at_rest()


def test_clone_on_a_store_whose_host_died_in_a_pull(live: Live) -> None:
    """The note in the VM's directory goes with its host; whoever takes the VM over has the one beside the
    clone.
    """
    _killed_at(live, "layer pulled", _delete(ON_STORE, 1, ()), "tree")
    record = live.record(ON_STORE)
    live.end_domain()
    live.host.run(["rm", "-r", VM_DIR])
    image = Record.parse(ON_STORE, json.dumps(record).encode()).of_image
    live.run({}, s.PrepareVm(VM, VM_DIR), s.AdoptClone(live.ref(ON_STORE), image, record["path"]))
    live.check(ON_STORE, KEPT[-1], {0: KEPT[0], 1: KEPT[1]})


@backs_up
def test_guest_without_an_agent_is_told_of_and_goes_on(live: Live) -> None:
    """FS_FREEZE = AGENT: it cannot be frozen, nor thawed; nothing that comes after may fail for that."""
    live.restore("plain")
    live.start()
    before = live.listing()
    with pytest.raises(SemisharedError, match="agent"):
        live.back_up({}, "AGENT")
    live.at_rest()
    live.end_backup({})
    assert live.listing() == before
    note = live.host.path(f"{VM_DIR}/.semishared/frozen.json")
    note.write_text(json.dumps({"how": "AGENT", "run": live.virsh("domid", DOMAIN)}))
    with pytest.raises(SemisharedError, match="agent"):
        live.change({}, "create", OVERLAY, 0)
    live.change({}, "create", OVERLAY, 0)
    live.at_rest()


FAILING = [
    # case, verb; the snapshot at each place, then what deletes and copies call
    *(
        (index, "blockcopy" if case.disk == IN_PLACE else "snapshot-create-as")
        for index, case in enumerate(CASES[:5])
    ),
    *((index, verb) for index, case in enumerate(CASES) if index >= 5 for verb in case.dies_in),
]


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.long), "after"])
@pytest.mark.parametrize(
    ("index", "verb"),
    [_row(CASES[index], index, verb) for index, verb in FAILING],
    ids=[f"{CASES[index].name}, {verb}" for index, verb in FAILING],
)
def test_action_that_libvirt_fails(live: Live, index: int, verb: str, when: str) -> None:
    """One error; the guest goes on; the records name what it writes to; issued again, the action ends as
    undisturbed.
    """
    case = CASES[index]
    live.restore(case.start)
    live.start()
    # A guest that runs has been resumed, whatever virsh says of it.
    fails = (
        nullcontext()
        if (verb, when) == ("resume", "after")
        else pytest.raises(SemisharedError, match="no mood")
    )
    with fails:
        case.act(live, {"FAIL_IN": verb, "FAIL": when})
    live.check_opened(case.disk)
    case.act(live, {})
    live.at_rest()
    live.check_running(case.disk, case.now)
    live.end_domain()
    live.check(case.disk, case.now, case.kept)


@backs_up
def test_action_that_is_stopped_in_its_midst_does_not_hold_up_the_next(live: Live) -> None:
    """It may be at work for ever (its front-end cut off, its storage hung): whoever comes next ends it, and
    is then alone.
    """
    live.restore("plain")
    live.start()
    stuck = threading.Thread(
        target=_ends, args=(lambda: live.back_up({"SEMISHARED_STOP_AT": "7"}, "SUSPEND"),)
    )
    stuck.start()
    until(lambda: live.host.path(f"{VM_DIR}/.semishared/frozen.json").exists(), 20, "a guest at rest", 0.02)
    started = time.monotonic()
    live.end_backup({})
    stuck.join(60)
    assert not stuck.is_alive()
    assert time.monotonic() - started < 60
    live.at_rest()
    live.back_up({}, "NONE")
    live.end_backup({})
    live.at_rest()


@backs_up
def test_guest_at_rest_is_woken_when_the_front_end_dies(live: Live) -> None:
    """Nobody may ever come next: the host side's last act is to let the guest go on."""
    live.restore("plain")
    live.start()
    stuck = threading.Thread(
        target=_ends, args=(lambda: live.back_up({"FAIL_IN": "backup-begin", "FAIL": "never"}, "SUSPEND"),)
    )
    stuck.start()
    until(lambda: live.virsh("domstate", DOMAIN) == "paused", 20, "a guest at rest", 0.05)
    stdin = live.talk._process.stdin
    assert stdin
    stdin.close()
    until(lambda: live.virsh("domstate", DOMAIN) == "running", 30, "a guest that goes on", 0.05)
    stuck.join(60)
    assert not stuck.is_alive()
    live.end_backup({})
    live.at_rest()


LIVE_ACTIONS = [
    ("snap_create_live", 3, OVERLAY, ["0"]),
    ("snap_create_live", 3, ON_STORE, ["0"]),
    ("snap_create_live", 3, IN_PLACE, ["0"]),
    ("cpds", 26, OVERLAY, [SAVED, "-1"]),
]


@pytest.mark.fault(16, "a running guest rests while a snapshot of its disk is taken, or the disk saved")
@pytest.mark.parametrize(
    ("action", "lcm_state", "disk", "words"),
    LIVE_ACTIONS,
    ids=[f"{a[0]} {PLACES[a[2]]}" for a in LIVE_ACTIONS],
)
def test_guest_without_an_agent_is_suspended_for_the_moment(
    live: Live, action: str, lcm_state: int, disk: int, words: List[str]
) -> None:
    live.restore("plain")
    live.start()
    live.cloud.vm(VM, {0: 1, 1: 2, 2: 3, 3: 4}, lcm_state=lcm_state)
    place = f"h1:{VM_DIR}/disk.{disk}"
    with events(live.host, DOMAIN) as said:
        done = live.cloud.tm(action, place, *words, str(VM), "100")
        assert done.returncode == 0, done.stderr.decode()
        until(lambda: "Resumed" in said(), 30, "a guest that was suspended and goes on", 0.05)
    assert said().index("Suspended") < said().index("Resumed")
    assert "INFO" in done.stderr.decode() and "suspended for the moment" in done.stderr.decode()
    live.at_rest()
    live.check_opened(disk)


@backs_up
@pytest.mark.fault(16, "a guest goes on, by itself, when the host side was killed while it rested")
def test_guest_goes_on_though_its_host_side_was_killed_while_it_rested(live: Live) -> None:
    live.restore("plain")
    live.start()
    live.forget_trace()
    live.back_up({"SEMISHARED_TRACE": TRACE}, "SUSPEND")
    live.end_backup({})
    number = live.points().index("guest frozen") + 1
    with pytest.raises(SemisharedError):
        live.back_up({"SEMISHARED_KILL_AT": str(number)}, "SUSPEND")
    until(lambda: live.virsh("domstate", DOMAIN) == "running", 30, "a guest that goes on", 0.05)
    until(
        lambda: not live.host.path(f"{VM_DIR}/.semishared/frozen.json").exists(),
        30,
        "no note of a rest",
        0.05,
    )
    live.end_backup({})
    live.at_rest()


def boot_with_agent(live: Live) -> None:
    """Start the domain with a guest that has QEMU's agent and writes nothing out by itself."""
    for path, name in zip(agent_guest.build(), ("vmlinux", "initrd")):
        shutil.copy(path, live.host.path(f"/var/tmp/{name}"))
    boot = f"<kernel>/var/tmp/vmlinux</kernel><initrd>/var/tmp/initrd</initrd><cmdline>{agent_guest.COMMAND_LINE}</cmdline>"  # noqa: E501
    live.start(boot, agent_guest.DEVICES, memory_mib=192)
    until(lambda: count(live) > 2, 90, "a guest that writes", 0.1)
    until(
        lambda: "{}" in live.virsh("qemu-agent-command", DOMAIN, '{"execute":"guest-ping"}', check=False),
        30,
        "its agent",
        0.2,
    )


def count(live: Live) -> int:
    """Return how often the guest has written to its file system."""
    said = live.host.path("/var/tmp/guest.log").read_text(errors="replace")
    numbers = [
        line.split()[1] for line in said.splitlines() if line.startswith("alive ") and len(line.split()) == 2
    ]
    return int(numbers[-1]) if numbers else 0


def goes_on(live: Live) -> None:
    before = count(live)
    until(lambda: count(live) > before + 2, 60, "a guest whose file system is thawed", 0.1)


@backs_up
@pytest.mark.fault(
    16, "what a guest with an agent has written is in the live snapshot, though it has not written it out"
)
def test_agent_freezes_the_file_systems_for_a_live_snapshot(live: Live) -> None:
    live.restore("plain")
    boot_with_agent(live)
    live.cloud.vm(VM, {0: 1, 1: 2, 2: 3, 3: 4}, lcm_state=3)
    with events(live.host, DOMAIN) as said:
        done = live.cloud.tm("snap_create_live", f"h1:{VM_DIR}/disk.0", "0", str(VM), "100")
        assert done.returncode == 0, done.stderr.decode()
        goes_on(live)
        assert "Suspended" not in said()
    snapshot = f"{VM_DIR}/disk.0.snap/0"
    live.host.run(["qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", snapshot, "/tmp/reads"])
    assert agent_guest.MARK in live.host.path("/tmp/reads").read_bytes(), "what the guest had not written out"
    assert "agent froze" in done.stderr.decode()
    live.at_rest()
    # Killed while it is frozen: thawed by who watches, with nobody coming after.
    live.forget_trace()
    live.back_up({"SEMISHARED_TRACE": TRACE}, "AGENT")
    live.end_backup({})
    with pytest.raises(SemisharedError):
        live.back_up({"SEMISHARED_KILL_AT": str(live.points().index("guest frozen") + 1)}, "AGENT")
    goes_on(live)
    live.end_backup({})
    live.at_rest()
    # Both, one after the other, as an increment with disks on Ceph and others wants it.
    both = s.RestGuest(VM, VM_DIR, DOMAIN, "AGENT-AND-SUSPEND")
    with live.session({}) as session:
        seen: List[str] = []
        session.run([both], answer=lambda _: {"seen": seen.append(live.virsh("domstate", DOMAIN))})
    assert seen == ["paused"]
    goes_on(live)
    live.at_rest()
    with pytest.raises(SemisharedError), live.session({"SEMISHARED_KILL_AT": "4"}) as session:
        session.run([both], answer=lambda _: {})
    goes_on(live)
    live.run({}, s.DescribeDisk(live.ref(OVERLAY), DOMAIN))
    live.at_rest()
    # It froze, and nobody heard so: thawed, then suspended.
    save = s.SaveDisk(live.ref(OVERLAY), SAVED, "raw", DOMAIN, freeze="AGENT-OR-SUSPEND")
    (found,) = live.run({"FAIL_IN": "domfsfreeze", "FAIL": "after"}, save)
    assert found == s.Rested("SUSPEND", "no mood for domfsfreeze")
    goes_on(live)
    live.at_rest()
    # It does not thaw: told once; the next action thaws it.
    with live.session({"FAIL_IN": "domfsthaw", "FAIL": "before"}) as session:
        with pytest.raises(SemisharedError, match="no mood for domfsthaw"):
            session.run([save._replace(freeze="AGENT")])
        before = count(live)
        time.sleep(1)
        assert count(live) <= before + 1, "its file system is frozen"
    live.run({}, s.DescribeDisk(live.ref(OVERLAY), DOMAIN))
    goes_on(live)
    live.at_rest()


def test_rest_for_what_is_done_elsewhere_ends_with_its_front_end(live: Live) -> None:
    """As on Ceph, where the bridge takes the snapshot meanwhile."""
    live.restore("plain")
    live.start()
    rest = s.RestGuest(VM, VM_DIR, DOMAIN, "AGENT-OR-SUSPEND")
    with live.session({}) as session:
        found = session.run([rest], answer=lambda question: {"seen": live.virsh("domstate", DOMAIN)})
        assert found[0].rest == "SUSPEND" and "agent is not configured" in found[0].why
        live.at_rest()
        session.begin([rest], answers=True)
        assert session.read() == {"event": "ask", "rests": DOMAIN}
        assert live.virsh("domstate", DOMAIN) == "paused"
        assert session._process.stdin
        session._process.stdin.close()
        until(lambda: live.virsh("domstate", DOMAIN) == "running", 30, "a guest that goes on", 0.05)
    until(
        lambda: not live.host.path(f"{VM_DIR}/.semishared/frozen.json").exists(),
        30,
        "no note of a rest",
        0.05,
    )
    live.at_rest()


@pytest.mark.long
def test_no_guest_rests_for_longer_than_a_minute(live: Live) -> None:
    live.restore("plain")
    live.start()

    def late(_: Dict[str, object]) -> object:
        until(lambda: live.virsh("domstate", DOMAIN) == "running", 70, "a guest that goes on", 1)
        return {}

    with live.session({}) as session, pytest.raises(SemisharedError, match="was woken after 60 s"):
        session.run([s.RestGuest(VM, VM_DIR, DOMAIN, "SUSPEND")], answer=late)
    live.at_rest()


def _ends(action: Callable[[], object]) -> None:
    with pytest.raises(SemisharedError):
        action()


@pytest.mark.parametrize("case", [_row(case, case) for case in CASES], ids=[case.name for case in CASES])
def test_live_action_killed_at_every_step(live: Live, case: Case) -> None:
    proof = Proof(live, case)
    proof.run()
    conftest.figures.setdefault("actions", {})[case.name] = proof.row
    assert not proof.failures, "\n".join(proof.failures)
    assert proof.row["passed"] == proof.row["points"] > 0
