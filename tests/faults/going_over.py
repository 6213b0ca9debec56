# SPDX-License-Identifier: Apache-2.0
"""The rig for guests that go over from one backing chain to another, and are killed on the way: one for all
four callers of guest/go_over.py.

    Migration    deltas are put on the guest's own disks, and merged (as before and after it moves)
    Directory    the guest goes on in a copy of its VM directory, in another datastore of its host
    Detach       a disk over its image on the store comes to lie over a base of the host
    Move         a disk goes to another device of its host's pool

A caller says what it starts from, what it does, what follows a kill, and what must be true then.
"""

from __future__ import annotations

import json
import os
import posixpath
import signal
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import pytest

from lab import Node
from pool_devices import mounting
from semishared.errors import SemisharedError
from semishared.model.base.steps import DetachVm
from semishared.model.device import names as device_names
from semishared.model.device.steps import MoveLayers
from semishared.model.leftover_steps import Discard, LookAround, SeenMachine
from semishared.plan.care import gc_places

from .cloud import STORE, SYSTEM, Cloud, until
from .live import (
    BASE_STORE,
    COPY,
    DOMAIN,
    OVERLAY,
    PLACES,
    TRACE,
    VM,
    VM_DIR,
    Environment,
    Live,
    digest,
    s,
    written,
)

ALL = bool(os.environ.get("SEMISHARED_FULL"))
NEXT, WITHOUT, AGAIN, BACK = "next action", "without its QEMU", "again", "back"
DELAYS = (0.005, 0.05) if ALL else (0.05,)
"""Seconds after which virsh dies."""
OWN = (OVERLAY, COPY)
KEPT = {0: written(1), 1: written(1, 2)}
DEVICES = ("/mnt/a", "/mnt/b")
COPIED = f"{SYSTEM.replace('/101', '/103')}/{VM}"
NOTES = ("disk.", "clone.", "vm.", ".staged-")


class Caller:
    """One caller of a go-over, at one disk."""

    id = ""
    site = ""
    """What its machines and files are made by (SITES)."""
    disk = OVERLAY
    marks: Tuple[int, ...] = (1, 2, 3, 5)
    """What the guest has written when it goes over."""
    always: Set[str] = set()
    """Points that are killed at in every run."""
    every = 0
    """Without SEMISHARED_FULL each so many of the other points are killed at, too; 0: none."""
    ways: Sequence[str] = (NEXT, WITHOUT, AGAIN)
    """What follows a kill; without SEMISHARED_FULL one of them at each point, unless `all_ways`."""
    all_ways = False
    runs = True
    place = VM_DIR

    @property
    def domain(self) -> str:
        return DOMAIN if self.runs else ""

    def begin(self, live: Live) -> None:
        """Have a guest that is about to go over."""
        raise NotImplementedError

    def act(self, live: Live, env: Environment, domain: Optional[str] = None) -> None:
        """Have it go over; `domain`: '' if it does not run any more."""
        raise NotImplementedError

    def follow(self, live: Live, then: str, domain: str) -> None:
        """Do what follows a kill."""
        if then == AGAIN:
            self.act(live, {}, domain)
        else:
            self.put_right(live, domain)
            # What was never published the next who writes such a file removes, or gc.
            live.host.run(["find", VM_DIR, "-maxdepth", "2", "-name", ".staged-*", "-delete"])

    def put_right(self, live: Live, domain: str) -> None:
        live.run({}, s.DescribeDisk(live.ref(self.disk), domain))

    def check_running(self, live: Live) -> None:
        """See that nothing is under way, and that the guest has open what is recorded."""
        live.at_rest()
        live.check_opened(self.disk)

    def check(self, live: Live, now: bytes) -> bool:
        """See that all is whole and nothing is left, without a guest; tell whether it has gone over."""
        raise NotImplementedError

    def has_gone_over(self, live: Live) -> Optional[bool]:
        """Tell what the files say right after a kill, None if that decides nothing."""

    def wanted(self, names: Sequence[str], number: int, then: str, said: Optional[bool]) -> Optional[bool]:
        """Tell whether it must have gone over after all; None if it may have."""
        if then == AGAIN:
            return True
        return said if then == WITHOUT else number > names.index("guest has gone over")

    # -- what is done with all of them ----------------------------------------------------------------

    def passed(self, live: Live) -> List[str]:
        """Have it go over undisturbed; return the points that were passed."""
        self.begin(live)
        live.forget_trace()
        self.act(live, {"SEMISHARED_TRACE": TRACE})
        return live.points()

    def points(self, live: Live) -> List[str]:
        """Do the same, and see that it was done."""
        return self.passed(live)

    def chosen(self, names: Sequence[str]) -> Iterator[Tuple[int, str, str]]:
        """Yield number and name of each point to kill at, and what is to follow."""
        for number, name in enumerate(names, 1):
            if (
                ALL
                or name in self.always
                or (self.every and number % self.every == len(self.id) % self.every)
            ):
                ways = [then for then in self.ways if self.may_follow(names, number, then)]
                for then in ways if ALL or self.all_ways else (ways[(number + self.disk) % len(ways)],):
                    yield number, name, then

    def may_follow(self, names: Sequence[str], number: int, then: str) -> bool:
        return self.runs or then != WITHOUT

    def killed(self, live: Live, number: int, then: str, env: Environment) -> Tuple[bool, Optional[bool]]:
        """Kill it, then do what is to follow; tell whether it has gone over, and what the files said
        before.
        """
        self.begin(live)
        with pytest.raises(SemisharedError):
            self.act(live, env)
        return self.followed(live, number, then)

    def followed(self, live: Live, number: int, then: str) -> Tuple[bool, Optional[bool]]:
        """Do what is to follow on one that was killed."""
        if then == WITHOUT:
            live.end_domain(at_work=True)
        said = self.has_gone_over(live)
        self.between(live, number)
        domain = "" if then == WITHOUT else self.domain
        self.follow(live, then, domain)
        marks = self.marks
        if domain:
            self.check_running(live)
            live.write_running(self.disk, 6)
            live.end_domain()
            marks = (*marks, 6)
        return self.check(live, written(*marks)), said

    def between(self, live: Live, number: int) -> None:
        """Do what may come between a kill and the next action."""

    def proved(self, live: Live) -> Tuple[int, List[str]]:
        """Kill it at every point that is chosen; return how often that was, and what has failed."""
        names, failures = self.points(live), []
        assert set(names) >= self.always, (self.always - set(names), names)
        live.end_domain()
        chosen = list(self.chosen(names))
        for number, name, then in chosen:
            try:
                over, said = self.killed(live, number, then, {"SEMISHARED_KILL_AT": str(number)})
                assert over is self.wanted(names, number, then, said) or (
                    self.wanted(names, number, then, said) is None
                )
            except Exception:  # noqa: BLE001 - all points are tried, all failures told
                failures.append(f"killed at {number} ({name}), then {then}: {traceback.format_exc(limit=-3)}")
        return len(chosen), failures

    @contextmanager
    def stopped_at(self, live: Live, name: str) -> Iterator[List[str]]:
        """Have a driver stand still at the last point of this name; yield what it will have said when it has
        ended, with the block.
        """
        names = self.points(live)
        number = len(names) - names[::-1].index(name)
        self.begin(live)
        live.forget_trace()
        said: List[str] = []

        def acted() -> None:
            try:
                self.act(live, {"SEMISHARED_STOP_AT": str(number), "SEMISHARED_TRACE": TRACE})
            except SemisharedError as e:
                said.append(e.detail)

        at_work = threading.Thread(target=acted)
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


OLDER = "/var/tmp/older"
BY_OLDER = """
import json, sys
sys.path.insert(0, "{top}/lib")
from semishared.config import Config
from semishared.model.base.steps import *
from semishared.model.device.steps import *
from semishared.model.steps import *
from semishared.wire.session import Session
with Session("localhost", "test", Config()) as session:
    print(json.dumps(session.run({steps}, answer=lambda question: {{"why": ""}})))
"""


def raise_error(answer: Any) -> None:
    """Raise what an answer reports as its error; an older version's is data."""
    error = answer["error"] if isinstance(answer, dict) else answer.error
    if error:
        raise SemisharedError(error)


@contextmanager
def older_version(live: Live) -> Iterator[None]:
    """Have an older version do, within the block, what the rig has done on the host: both ends of the
    conversation.
    """

    class Session:
        def __init__(self, env: Environment) -> None:
            self._env = [f"{name}={value}" for name, value in env.items()]

        def run(self, steps: Sequence[object], **_: object) -> List[object]:
            code = BY_OLDER.format(top=OLDER, steps=list(steps))
            argv = ["env", *self._env, "/usr/bin/python3", "-I", "-c", code]
            done = live.host.run(argv, check=False)
            if done.returncode:
                raise SemisharedError(done.stderr.decode().strip().splitlines()[-1])
            found: List[object] = json.loads(done.stdout)
            return found

    @contextmanager
    def session(env: Environment) -> Iterator[Session]:
        yield Session(env)

    live.session = session  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del live.session


def go_on(live: Live) -> None:
    """Let a driver that stands still go on."""
    signal.pidfd_send_signal(live.talk._process._pidfd, signal.SIGCONT)  # type: ignore[attr-defined]


def check_notes(live: Live, vm_dir: str = VM_DIR, more: Sequence[str] = NOTES) -> None:
    """See that nothing is noted as under way."""
    names = os.listdir(live.host.path(f"{vm_dir}/.semishared"))
    assert not [name for name in names if not name.startswith(tuple(more))], names


def record_in(live: Live, vm_dir: str, disk: int) -> Dict[str, str]:
    found = json.loads(live.host.path(f"{vm_dir}/.semishared/disk.{disk}.json").read_text())
    assert isinstance(found, dict)
    return found


def opened_files(live: Live) -> List[str]:
    """Return what the guest's QEMU has open."""
    pid = live.host.path(f"/run/libvirt/qemu/{DOMAIN}.pid").read_text().strip()
    lines = live.host.run(["ls", "-l", f"/proc/{pid}/fd"], user="root").stdout.decode().splitlines()
    return [line.partition(" -> ")[2] for line in lines]


# -- the callers ------------------------------------------------------------------------------------


class Migration(Caller):
    """Deltas put on the guest's own disks and merged; of the two what dies is `dies`, before the merge the
    guest writes.
    """

    site, every, ways, all_ways = "plain", 5, (AGAIN, WITHOUT), True

    def __init__(self, dies: str, disk: int, start: str, verbs: Sequence[str]) -> None:
        self.id = f"deltas {dies} {PLACES[disk]}, {start}"
        self.dies, self.disk, self.start, self.verbs = dies, disk, start, tuple(verbs)
        marks = (1, 2) if start == "plain" else (1, 2, 3, 4)
        self.marks = (*marks, 5) if dies == "merge" else marks
        self.kept = {} if start == "plain" else {0: written(1, 2), 1: written(1, 2, 3)}
        self.looked = 0
        self.whole: Dict[str, Tuple[str, ...]] = {}

    def begin(self, live: Live) -> None:
        live.restore(self.start)
        live.start()

    def act(self, live: Live, env: Environment, domain: Optional[str] = None) -> None:
        name = DOMAIN if domain is None else domain
        if name:
            live.run(env if self.dies == "add" else {}, s.AddDeltas(VM, VM_DIR, name, OWN))
            for own in OWN if self.dies == "merge" else ():
                live.write_running(own, 5)
        live.run(env if self.dies == "merge" else {}, s.MergeDeltas(VM, VM_DIR, name))

    def points(self, live: Live) -> List[str]:
        names = self.passed(live)
        self.check_running(live)
        live.check_running(self.disk, written(*self.marks))
        live.end_domain()
        self.check(live, written(*self.marks))
        self.whole = live.listing()
        return names

    def follow(self, live: Live, then: str, domain: str) -> None:
        if then == AGAIN:
            self.act(live, {}, domain)
            # To read through QEMU may let it write what it knows, which it need not have done else: so at
            # every other point.
            self.looked += 1
            if self.looked % 2 == 0:
                live.at_rest()
                live.check_running(self.disk, written(*self.marks))
            assert live.listing() == self.whole
        else:
            live.put_right()
            self.check(live, written(*self.marks))
            live.put_right()

    def check(self, live: Live, now: bytes) -> bool:
        check_notes(live)
        live.check(self.disk, now, self.kept)
        return True

    def wanted(self, names: Sequence[str], number: int, then: str, said: Optional[bool]) -> Optional[bool]:
        return None


class Directory(Caller):
    """The guest goes on in a copy of its VM directory. Whichever of the two oned says is the VM's, the next
    action there has all that the guest had written.
    """

    id, site, marks, every, all_ways = "directory", "plain", (1, 2, 5), 10, True
    always = {"mirrors equal", "guest has gone over", "copy entered"}
    ways = (AGAIN, WITHOUT, BACK)
    place = COPIED

    def begin(self, live: Live) -> None:
        """Have a guest on its deltas, a copy of its directory in the other datastore, and what it wrote
        since.
        """
        live.end_domain()
        live.host.run(["rm", "-rf", COPIED])
        live.restore("plain")
        live.start()
        self.place = COPIED
        copy = s.RenameVm(VM, VM_DIR, COPIED, True, "", (0, 1, 2, 3), live=True)
        live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN), copy)
        for disk in OWN:
            live.write_running(disk, 5)

    def act(self, live: Live, env: Environment, domain: Optional[str] = None) -> None:
        live.run(env, s.MergeDeltas(VM, COPIED, DOMAIN))

    def points(self, live: Live) -> List[str]:
        names = self.passed(live)
        assert {"delta is being mirrored", "deltas gone"} <= set(names)
        self.check_running(live)
        live.end_domain()
        self.check(live, written(*self.marks))
        return names

    def may_follow(self, names: Sequence[str], number: int, then: str) -> bool:
        return then != BACK or number <= names.index("guest has gone over")

    def follow(self, live: Live, then: str, domain: str) -> None:
        self.place = VM_DIR if then == BACK else COPIED
        live.run({}, s.MergeDeltas(VM, self.place, DOMAIN))

    def check_running(self, live: Live) -> None:
        said = {
            line.split()[0]: line.split()[1]
            for line in live.virsh("domblklist", DOMAIN).splitlines()
            if line.strip()
        }
        assert live.virsh("domstate", DOMAIN) == "running"
        for disk in OWN:
            target = f"vd{'abcd'[disk]}"
            assert os.path.normpath(said[target]) == record_in(live, self.place, disk)["path"]
            assert not live.virsh("blockjob", DOMAIN, target, "--info", "--raw").strip()

    def check(self, live: Live, now: bytes) -> bool:
        """See that a directory has the whole VM, and nothing under way."""
        check_notes(live, self.place, NOTES[:3])
        for disk in OWN:
            found = record_in(live, self.place, disk)
            assert os.path.basename(found["path"]) == "0", found
            assert found["path"].startswith(self.place)
            seen = now if disk == self.disk else written(*self.marks)
            assert live.reads(found["path"], found["format"]) == digest(seen)
            assert not live.host.path(f"{self.place}/disk.{disk}.snap/1000000").exists()
        return self.place == COPIED

    def wanted(self, names: Sequence[str], number: int, then: str, said: Optional[bool]) -> Optional[bool]:
        return then != BACK


class Detach(Caller):
    """Disk 0 lets go of its store. Whatever was killed, it lies over its base or over the image as before,
    never between.
    """

    site = "remote"
    bases = f"{BASE_STORE}/bases"

    def __init__(self, *, runs: bool) -> None:
        self.runs, self.id = runs, f"detach {'running' if runs else 'off'}"
        switched = {"switch noted", "switch ended"}
        self.always = (
            {
                *switched,
                "detach noted",
                "leased",
                "layer kept",
                "layers lie over bases",
                "layers ready",
                "mirrors equal",
                "guest has gone over",
            }
            if runs
            else {*switched, "layer laid over its base"}
        )

    def begin(self, live: Live) -> None:
        """Have a guest that has written since its start, and two snapshots."""
        live.restore("snapshots")
        live.start()
        live.write_running(self.disk, 5)
        if not self.runs:
            live.end_domain()

    def act(self, live: Live, env: Environment, domain: Optional[str] = None) -> None:
        name = self.domain if domain is None else domain
        (answer,) = live.run(env, DetachVm(VM, VM_DIR, name, (self.disk,), ("",), 0))
        raise_error(answer)

    def reads_store(self, live: Live) -> bool:
        """Tell whether the guest's QEMU has the store's image open for the disk too: the clone on the store
        lies over it anyway.
        """
        count = opened_files(live).count(live.image_of(self.disk))
        assert count in (1, 2), opened_files(live)
        return count == 2

    def check_running(self, live: Live) -> None:
        super().check_running(live)
        overlay = live.record(self.disk)["how"] == "overlay"
        assert self.reads_store(live) is not overlay

    def check(self, live: Live, now: bytes) -> bool:
        """See that headers, lease and record say the same; tell whether that is the base."""
        live.check(self.disk, now, KEPT)
        check_notes(live)
        overlay = live.record(self.disk)["how"] == "overlay"
        assert overlay or live.record(self.disk)["how"] == "remote-first"
        folder = f"{VM_DIR}/disk.{self.disk}.snap"
        assert sorted(os.listdir(live.host.path(folder))) == ["0", "1", "2"]
        info = ["qemu-img", "info", "-U", "--output=json", f"{folder}/0"]
        lowest = live.host.run(info).stdout.decode()
        assert (f"{STORE}/.semishared" in lowest) is not overlay, lowest
        assert ("/leases/" in lowest) is overlay, lowest
        own = f"{VM}-{self.disk}"
        found = [path.name for path in live.host.path(self.bases).glob("*/leases/*")]
        leases = [name for name in found if name.endswith(own)]
        assert leases == ([own] if overlay else []), leases
        return overlay

    def wanted(self, names: Sequence[str], number: int, then: str, said: Optional[bool]) -> Optional[bool]:
        if then == WITHOUT:
            return None
        # What is noted is so when it has its name, which is the point before.
        over = names.index("guest has gone over" if self.runs else "switch noted")
        return then == AGAIN or number > over - (not self.runs)


class Move(Caller):
    """A disk goes to another device of its host's pool. Whatever was killed, it lies on one device or the
    other, whole, and nothing of it on any other. What gc does before the next action takes nothing that the
    guest has open.
    """

    site = "devices"
    always = {
        "deltas noted",
        "guest writes to deltas",
        "layers copied",
        "old device noted",
        "layers have their names on the new device",
        "layers are being mirrored",
        "layers ready",
        "mirrors equal",
        "guest has gone over",
        "device switch ended",
        "layers gone from the other device",
        "deltas gone",
    }

    def __init__(self, disk: int, id: str) -> None:
        self.disk, self.id = disk, id
        self.marks = (1, 2, 3, 5) if disk == OVERLAY else (1, 5)
        self.kept = KEPT if disk == OVERLAY else {}
        self.first: Optional[device_names.Link] = None

    def begin(self, live: Live) -> None:
        live.restore("snapshots")
        live.start()
        for disk in OWN:
            live.write_running(disk, 5)
        self.first = self.link(live)

    def link(self, live: Live) -> device_names.Link:
        link = device_names.linked(os.readlink(live.host.path(f"{VM_DIR}/disk.{self.disk}.snap")))
        assert link
        return link

    def act(self, live: Live, env: Environment, domain: Optional[str] = None, rate: int = 0) -> None:
        """Move the disk to the device where it is not."""
        link, name = self.link(live), DOMAIN if domain is None else domain
        known = os.listdir(live.host.path(f"{BASE_STORE}/devices"))
        (target,) = {uuid for uuid in known if not uuid.endswith(".json")} - {link.uuid}
        with live.session(env) as session:
            move = MoveLayers(live.ref(self.disk), name, link.name, target, rate)
            (answer,) = session.run([move], answer=lambda question: {"why": ""})
        raise_error(answer)

    def has_gone_over(self, live: Live) -> Optional[bool]:
        return not live.record(self.disk)["path"].endswith("/1000000") and self.link(live) != self.first

    def between(self, live: Live, number: int) -> None:
        if number % 2:
            self.collect(live)

    def collect(self, live: Live) -> None:
        """Remove what gc finds on devices, if it would remove it."""
        location = posixpath.dirname(SYSTEM)
        (seen,) = live.run({}, LookAround(location, (101,), (), False))
        assert isinstance(seen, SeenMachine)
        for item in seen.unlinked:
            if item.replaced or not gc_places.why_unlinked_stays(item.vm, {VM: "h1"}, ""):
                live.run({}, Discard("unlinked", item.path, location, item.vm, item.seen))

    def follow(self, live: Live, then: str, domain: str) -> None:
        super().follow(live, NEXT, domain)
        assert self.first
        if then == AGAIN and self.link(live).uuid == self.first.uuid:
            self.act(live, {}, domain)

    def places(self, live: Live) -> Set[str]:
        """Return where there are layers of the disk."""
        return {
            f"{path}/.semishared/layers/{name}"
            for path in DEVICES
            for name in os.listdir(live.host.path(f"{path}/.semishared/layers"))
            if device_names.layers_named(name) == (VM, self.disk)
        }

    def opened(self, live: Live) -> Set[str]:
        """Return the directories of the disk's layers in which the guest's QEMU has files open."""
        paths = set(map(posixpath.dirname, opened_files(live)))
        own = (VM, self.disk)
        return {path for path in paths if device_names.layers_named(posixpath.basename(path)) == own}

    def check_running(self, live: Live) -> None:
        """See also that the guest has open what its disk's names lead to, and nothing else."""
        super().check_running(live)
        place = live.host.run(["realpath", f"{VM_DIR}/disk.{self.disk}.snap"]).stdout.decode().strip()
        assert self.opened(live) == {place}

    def check(self, live: Live, now: bytes) -> bool:
        """See that the disk is whole in one place; tell whether that is another one than it was."""
        live.check(self.disk, now, self.kept)
        check_notes(live)
        assert not [name for name in os.listdir(live.host.path(VM_DIR)) if ".left" in name]
        self.collect(live)
        (place,) = self.places(live)
        folder = sorted(os.listdir(live.host.path(place)))
        assert folder == (["0", "1", "2"] if self.disk == OVERLAY else ["0"]), folder
        assert self.first
        return self.link(live).uuid != self.first.uuid


# -- what they start from ---------------------------------------------------------------------------


def _plain(cloud: Cloud) -> Live:
    live = Live(cloud)
    for disk in range(4):
        for mark in (1, 2):
            live.write(disk, mark)
    live.save("plain")
    for number in (0, 1):
        for disk in range(4):
            live.change({}, "create", disk, number, domain="")
            live.write(disk, number + 3)
    live.save("tree")
    return live


def _snapshots(live: Live) -> Live:
    """Give the overlay two snapshots, and a write after each."""
    for number in (1, 2, 3):
        live.write(OVERLAY, number)
        if number < 3:
            live.change({}, "create", OVERLAY, number - 1, tuple(range(number)), domain="")
    return live


def _remote(cloud: Cloud) -> Live:
    """Disk 0 is remote-first; the others have nothing to let go of."""
    live = _snapshots(Live(cloud, {OVERLAY: "<SEMISHARED_LOCAL>remote-first</SEMISHARED_LOCAL>"}))
    live.save("snapshots")
    return live


def _devices(cloud: Cloud) -> Live:
    give_devices(cloud.h1)
    live = _snapshots(Live(cloud, devices=DEVICES))
    live.write(COPY, 1)
    live.save("snapshots")
    return live


def give_devices(node: Node) -> None:
    for path in DEVICES:
        node.run(["mkdir", "-p", path], user="root")
        node.run(mounting(path, 96), user="root")
        node.run(["chown", "oneadmin:oneadmin", path], user="root")


SITES = {"plain": _plain, "remote": _remote, "devices": _devices}


class Machines:
    """The machines of one site at a time: conftest.py has the tests of each together."""

    def __init__(self) -> None:
        self._site, self._up = "", ExitStack()
        self._live: Optional[Live] = None

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        self._up.close()

    def of(self, site: str) -> Live:
        if site != self._site or self._live is None:
            self._up.close()
            self._live = SITES[site](self._up.enter_context(Cloud.up()))
            self._up.callback(self._live.close)
            self._site = site
        return self._live
