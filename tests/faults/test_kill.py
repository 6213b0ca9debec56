# SPDX-License-Identifier: Apache-2.0
"""Each action is killed at its steps, at every one of them with test-full (points.py); then it is issued
again, or the VM is deleted.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Dict, Iterator, List, Set, Tuple

import pytest

from points import Known
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.tools import extents, layers

from . import conftest, driver_kills
from .cases import CASES as OTHER_CASES
from .cases import (
    IMAGES,
    OTHER,
    PERSISTENT,
    RAW,
    VM,
    Case,
    build,
    clone_steps,
    datastore,
    delete_steps,
    ln_steps,
    plan,
)
from .cloud import STORE, SYSTEM, Cloud, until
from .rig import MACHINES, Listing, Rig, backing_of, file_digest, file_system, own_mounts, points
from .rig import digest as digest_of
from .snapshot_cases import SNAPSHOT_CASES
from .stock_cases import STOCK_CASES

OLD = 3 * 86400
CASES = [*OTHER_CASES, *SNAPSHOT_CASES, *STOCK_CASES]


ALL = bool(os.environ.get("SEMISHARED_FULL"))
digest = lru_cache(maxsize=None)(digest_of)
EMPTY = digest_of(bytes(8 << 20))
_generations: Dict[Tuple[str, str], str] = {}


def generation(path: Path, format: str) -> str:
    """Return the generation of a file's content, computed once per content."""
    key = file_digest(path), format
    if key not in _generations:
        _generations[key] = extents.copy(str(path), None, format, "x").generation
    return _generations[key]


# -- what must always be true -----------------------------------------------------------------------


def check_store(rig: Rig, case: Case, before: Dict[str, str]) -> None:
    """Nobody touches a stored image; what is new under a final name is whole; what is called current is
    so.
    """
    for path in sorted(rig.store().iterdir()):
        if path.is_dir():
            continue
        if path.name in before:
            assert file_digest(path) in (before[path.name], digest(case.restored)), f"{path.name} was changed"
        elif any(re.search(pattern, "store/IMAGE1") for pattern in case.opaque):
            assert file_system(path)
        else:
            format = "qcow2" if path.open("rb").read(4) == b"QFI\xfb" else "raw"
            seen = rig.guest_sees("fe", rig.inside(f"100/{path.name}"), format)
            known = {digest(image.content) for image in IMAGES.values()} | {
                digest(data) for data in case.guest.values()
            }
            assert seen in known | {EMPTY}, f"{path.name} is half made"
    for header in rig.store(".semishared").glob("*/generation.json"):
        if not rig._is_current(header):
            continue
        known_as = json.loads(header.read_text())
        image = rig.store(header.parent.name)
        assert generation(image, known_as["format"]) == known_as["generation"]
        assert extents.generation_of((header.parent / "manifest").read_bytes()) == known_as["generation"]


def check_bases(rig: Rig, machine: str) -> None:
    """A base and each lease on it has the content of the generation in its name."""
    for base in rig.on(machine, ".semishared/bases").glob("*"):
        named = base.name.rpartition("-")[2]
        text = (base / "manifest").read_bytes()
        assert extents.generation_of(text) == named
        files = [base / "image", *(base / "leases").iterdir()]
        for path in (path for path in files if path.exists()):
            assert generation(path, extents.parse(text).format) == named, f"{path} is not its generation"


def check_disk(rig: Rig, case: Case, machine: str, vm_dir: Path, path: Path) -> None:
    """A disk under its final name is what its record says, over the base it names, and its guest reads what
    it must.
    """
    number = int(path.name[5:])
    record_file = vm_dir / f".semishared/disk.{number}.json"
    if not record_file.exists():
        if file_digest(path) == digest_of_iso():
            return
        raise AssertionError(f"{path} has no record")
    record = json.loads(record_file.read_text())
    inside = f"{rig.datastores}/{path.relative_to(rig.on(machine))}"
    where = f"{machine}/{path.relative_to(rig.on(machine))}"
    if record["how"] == "in-place":
        assert os.readlink(path) == record["path"]
    elif record["how"] == "volatile":
        assert record["path"] == inside
    else:
        check_layers(rig, machine, path, record)
    if record["how"] == "volatile":
        if any(re.search(pattern, where) for pattern in case.opaque):
            assert file_system(path)
        else:
            assert rig.guest_sees(machine, inside, record["format"]) == EMPTY
        return
    image = record["image"]
    if record["how"] == "overlay":
        base = f"{rig.datastores}/.semishared/bases/{image['store']}-{image['id']}-{image['generation']}"
        backing = lowest_backing(rig, machine, record["path"])
        lease = f"{base}/leases/{vm_dir.name}-{number}"
        assert (case.restored and not backing) or backing == lease, (
            f"{where} lies over {backing}, its record says {base}"
        )
        if machine == "fe":
            return  # Without a lease there; its base is the image's generation in the store
        assert record["format"] == "qcow2", "what it says of itself is checked before its guest reads it"
    elif record["how"] in ("store-clone", "remote-first"):
        backing = lowest_backing(rig, machine, record["path"])
        directory, name = os.path.split(image["source"])
        assert (case.restored and not backing) or backing == f"{directory}/.semishared/{name}/image"
    wanted = digest(case.guest.get(where, IMAGES[image["id"]].content))
    seen = rig.guest_sees(machine, record["path"], record["format"])
    changed = digest(changed_image()) if image["id"] == RAW.id else ""
    or_else = changed if "new generation" in case.name else digest(case.restored) if case.restored else wanted
    assert seen in (wanted, or_else), f"the guest of {where} reads something else"
    check_snapshots(rig, machine, record, case.snapshots.get(where, {}))


def check_layers(rig: Rig, machine: str, path: Path, record: Dict[str, Any]) -> None:
    """The record names a layer beside the disk (or beside its clone on the store); disk.N leads to one of
    them.
    """
    folder = os.path.dirname(record["path"])
    first = os.readlink(path)
    if record["how"] == "store-clone":
        assert folder == f"{first}.snap"
        first = os.readlink(rig.outside(machine, first))
    else:
        assert folder == f"{rig.datastores}/{path.relative_to(rig.on(machine))}.snap"
    assert os.path.dirname(first) == os.path.basename(folder)
    assert rig.outside(machine, f"{folder}/{os.path.basename(first)}").exists()


def check_snapshots(rig: Rig, machine: str, record: Dict[str, Any], wanted: Dict[int, bytes]) -> None:
    """Each snapshot that is there holds what it did, through whatever layers it has now."""
    if not wanted:
        return
    in_place = record["how"] == "in-place"
    folder = f"{record['image']['source']}.snap" if in_place else os.path.dirname(record["path"])
    outside = str(rig.outside(machine, folder))
    known = (
        {}
        if in_place
        else layers.tree(
            outside, int(os.path.basename(record["path"])), record["format"], record.get("raw_layer")
        )
    )
    for number, content in wanted.items():
        if number in layers.numbered(outside) and f"{folder}/{number}" != record["path"]:
            format = record["format"] if in_place else str(known[number]["format"])
            assert rig.guest_sees(machine, f"{folder}/{number}", format) == digest(content), (
                f"snapshot {number} holds something else"
            )


def lowest_backing(rig: Rig, machine: str, path: str) -> str:
    """Return what the lowest layer of a disk names as its backing file."""
    while True:
        backing = backing_of(rig.outside(machine, path)) or ""
        if "/" in backing or not backing:
            return backing
        path = f"{os.path.dirname(path)}/{backing}"


@cache
def digest_of_iso() -> str:
    from .cases import ISO

    return digest(ISO)


@cache
def changed_image() -> bytes:
    from .cases import CHANGED

    return bytes(CHANGED)


def check_whole(rig: Rig, case: Case) -> None:
    """A VM directory that is moved or removed is whole wherever it is, and one that is moved is somewhere."""
    if not case.name.startswith(("mv ", "delete vm")):
        return
    wanted = {f"disk.{number}" for number in range(5)} | {
        f".semishared/disk.{number}.json" for number in (0, 1, 2, 4)
    }
    found = [vm_dir for machine in MACHINES for vm_dir in rig.on(machine).glob(f"10[12]/{VM}")]
    assert found or case.name == "delete vm", "the VM is nowhere"
    for vm_dir in found:
        names = {
            str(path.relative_to(vm_dir)) for path in (*vm_dir.glob("disk.*"), *vm_dir.glob(".semishared/*"))
        }
        assert wanted <= names, f"{vm_dir} lacks {sorted(wanted - names)}"


def check(rig: Rig, case: Case, before: Dict[str, str]) -> None:
    """Assert everything that must be true at any moment."""
    check_store(rig, case, before)
    for machine in MACHINES:
        check_bases(rig, machine)
        for vm_dir in rig.on(machine).glob("10[12]/[0-9]*"):
            for path in sorted(path for path in vm_dir.glob("disk.*") if not path.name.endswith(".snap")):
                check_disk(rig, case, machine, vm_dir, path)
            for path in vm_dir.glob("kernel"):
                assert path.read_bytes() == rig.store("kernel").read_bytes()


# -- leftovers --------------------------------------------------------------------------------------


STAGED = re.compile(
    r"/\.staged-|/\.probe-|/\.uploads/|/\.semishared/staging/|/\.(incoming|outgoing|removed)-"
)


def split(listing: Listing) -> tuple[Listing, Set[str]]:
    """Tell a listing from what is staged in it: names that nobody takes for anything finished."""
    staged = {
        path for path in listing if STAGED.search(f"{path}/") and not path.endswith(("/.uploads", "/staging"))
    }
    return {path: what for path, what in listing.items() if path not in staged}, staged


def tidy(listing: Listing) -> Listing:
    """Leave out the empty directories of ours that an action may or may not have made, and the locks."""
    own = re.compile(r"/(staging|locks|locks/.*|\.uploads|clones|bases)$|/\.semishared$")
    return {path: what for path, what in listing.items() if not own.search(path)}


def of_the_vm(listing: Listing) -> List[str]:
    """Return what belongs to the VM."""
    mine = re.compile(
        rf"/10[12]/{VM}(/|$)|/\.(incoming|outgoing|removed)-{VM}(-|/|$)|/(leases|clones)/(\.staged-)?{VM}-"
    )
    return [path for path in listing if mine.search(path)]


def next_actions(rig: Rig) -> None:
    """What a working cloud does anyway, days later: clones of the same images, an upload. It removes what is
    staged.
    """
    for part in (*MACHINES, "store"):
        for folder, _, files in os.walk(rig.top / "live" / part):
            for name in files:
                if STAGED.search(f"{folder}/{name}"):
                    path = os.path.join(folder, name)
                    moment = os.lstat(path).st_mtime - OLD
                    os.utime(path, (moment, moment), follow_symlinks=False)
    for machine in ("a", "b"):
        steps = []
        for image in IMAGES.values():
            if rig.store(image.name).exists():
                if image is PERSISTENT:
                    steps += ln_steps(rig, image, 8, image.id, machine=machine)
                    continue
                steps += clone_steps(rig, image, 8, image.id, machine)
                steps += clone_steps(rig, image, 8, 10 + image.id, machine, SEMISHARED_PLACE="shared")
        if rig.on(machine, "102").exists():
            steps.append(s.PrepareVm(9, rig.inside("102/9")))
        plan(rig, machine, steps, {})
    plan(rig, "fe", [s.PrepareVm(9, rig.inside("101/9"))], {})
    datastore(rig, {}, "cp", f"<ID>99</ID><TYPE>0</TYPE><PATH>{rig.top}/in/image-raw.raw</PATH>")


# -- the proof --------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one action."""

    points: int = 0
    reruns: int = 0
    deletes: int = 0
    passed: int = 0
    failures: List[str] = field(default_factory=list)


def difference(wanted: Listing, found: Listing) -> str:
    lines = [f"missing {path}" for path in sorted(wanted.keys() - found.keys())]
    lines += [f"left over {path}: {found[path]}" for path in sorted(found.keys() - wanted.keys())]
    both = sorted(wanted.keys() & found.keys())
    lines += [
        f"{path}: {found[path]} instead of {wanted[path]}" for path in both if wanted[path] != found[path]
    ]
    return "; ".join(lines)


class Proof:
    """One action on one rig."""

    def __init__(self, rig: Rig, case: Case, known: Known) -> None:
        self.rig, self.case, self.known, self.outcome = rig, case, known, Outcome()

    def run(self) -> Outcome:
        rig, case = self.rig, self.case
        rig.restore("base")
        case.setup(rig)
        rig.save("ready")
        self.before = {path.name: file_digest(path) for path in rig.store().iterdir() if path.is_file()}
        traces = {machine: rig.top / f"trace-{machine}" for machine in case.killed}
        for trace in traces.values():
            trace.unlink(missing_ok=True)
        case.act(rig, {machine: {"SEMISHARED_TRACE": str(trace)} for machine, trace in traces.items()})
        check(rig, case, self.before)
        self.wanted, staged = split(rig.listing(case.opaque))
        assert not staged, f"an undisturbed run leaves {sorted(staged)}"
        for machine, trace in traces.items():
            names = points(trace)
            assert names, f"{machine} passed no point"
            # What is done, and with what: a copy and an overlay are two, an overlay of raw and of qcow2 are
            # not.
            action = " ".join(case.name.replace(",", "").split()[:2])
            for number in self.known.chosen(f"{action} on {machine}", case.name, names):
                self.outcome.points += 1
                self.attempt(machine, number, names[number - 1])
        return self.outcome

    def attempt(self, machine: str, number: int, name: str) -> None:
        """Kill at one point; then rerun, and from the same state delete (at every third point without
        SEMISHARED_FULL).
        """
        where = f"killed on {machine} at {number} ({name})"
        failed = False
        try:
            self.kill(machine, number)
            check(self.rig, self.case, self.before)
            check_whole(self.rig, self.case)
        except Exception:  # noqa: BLE001 - all points are tried, all failures told
            self.outcome.failures.append(f"{where}: {traceback.format_exc(limit=-3)}")
            failed = True
        self.rig.save("killed")
        for kind, proof in (("rerun", self.rerun), ("delete", self.delete)):
            try:
                if kind == "rerun":
                    self.outcome.reruns += 1
                else:
                    if self.case.name.startswith("datastore") or not (ALL or number % 3 == 1):
                        continue
                    self.rig.restore("killed")
                    self.outcome.deletes += 1
                proof()
            except Exception:  # noqa: BLE001
                self.outcome.failures.append(f"{where}, then {kind}: {traceback.format_exc(limit=-3)}")
                failed = True
        self.outcome.passed += not failed

    def kill(self, machine: str, number: int) -> None:
        self.rig.restore("ready")
        try:
            self.case.act(self.rig, {machine: {"SEMISHARED_KILL_AT": str(number)}})
        except SemisharedError:
            return
        raise AssertionError("the action succeeded although it was killed")

    def rerun(self) -> None:
        """Issue the action again: the end state is that of an undisturbed run."""
        self.case.act(self.rig, {})
        check(self.rig, self.case, self.before)
        check_whole(self.rig, self.case)
        self.remove_orphans()
        found, staged = split(self.rig.listing(self.case.opaque))
        problem = difference(self.wanted, found)
        assert not problem, problem
        self.swept(staged)

    def remove_orphans(self) -> None:
        images = [path for path in self.rig.store().iterdir() if re.fullmatch(r"[0-9a-f]{32}", path.name)]
        assert len(images) <= 1 + self.case.orphans, f"{len(images)} images"
        if len(images) > 1:
            # Complete, but its name was never told: the older of the two.
            first = min(images, key=lambda path: path.stat().st_ctime_ns)
            datastore(
                self.rig, {}, "rm", f"<ID>9</ID><SOURCE>{self.rig.inside(f'100/{first.name}')}</SOURCE>"
            )

    def delete(self) -> None:
        """Delete the disks and the VM: nothing of it is left anywhere."""
        rig = self.rig
        for machine in {"a", *self.case.killed}:
            steps = []
            for datastore_id in (101, 102):
                for number in range(5):
                    steps += delete_steps(rig, f"{datastore_id}/{VM}/disk.{number}")
                steps += delete_steps(rig, f"{datastore_id}/{VM}", store=datastore_id)
            plan(rig, machine, steps, {})
        listing = rig.listing(self.case.opaque)
        assert not of_the_vm(listing), f"left of the VM: {of_the_vm(listing)}"
        check(rig, self.case, self.before)
        for machine in MACHINES:
            assert OTHER_IS_WHOLE(rig, machine)
        _, staged = split(listing)
        self.swept(staged)

    def swept(self, staged: Set[str]) -> None:
        """What is left staged is removed by the actions of the next days."""
        if not staged:
            return
        next_actions(self.rig)
        _, left = split(self.rig.listing(self.case.opaque))
        assert not left, f"never removed: {sorted(left)}"


def OTHER_IS_WHOLE(rig: Rig, machine: str) -> bool:  # noqa: N802
    """Tell whether the other VM's disk still has all of its backing."""
    path = rig.on(machine, f"101/{OTHER}/disk.0")
    return not path.exists() or bool(rig.guest_sees(machine, rig.inside(f"101/{OTHER}/disk.0"), "qcow2"))


_rig: List[Rig] = []


def _work(index: int, known: Known) -> Outcome:
    """Prove one case in a worker process, which has a rig of its own."""
    if not _rig:
        own_mounts()
        _rig.append(Rig(forked=True))
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
        build(_rig[0])
    try:
        return Proof(_rig[0], CASES[index], known).run()
    except Exception:  # noqa: BLE001 - told by the test
        return Outcome(failures=[traceback.format_exc()])


def _follow(parent: int) -> None:
    """End this worker, and its rig, when the test run is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    _end(0)
    os._exit(1)


def _end(_: int) -> int:
    for rig in _rig:
        rig.__exit__(None, None, None)
    _rig.clear()
    return os.getpid()


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dict[str, Future[Outcome]]]:
    """Prove the selected cases, two at a time."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {spec.params["name"] for spec in specs if spec and "name" in spec.params}
    pools = [ProcessPoolExecutor(1) for _ in range(2)]
    for pool in pools:
        # Their processes are there from now on: one that a thread forked later would have open what another
        # thread just then starts a program with, which would wait for it to be closed.
        pool.submit(os.getpid).result()
    futures: Dict[str, Future[Outcome]] = {}
    # The long ones first; whoever is done takes the next.
    queue = sorted(
        (index for index, case in enumerate(CASES) if case.name in wanted),
        key=lambda index: CASES[index].name[:3] != "mv ",
    )
    waiting, known = iter(queue), Known(tmp_path_factory.mktemp("known"))
    futures = {CASES[index].name: Future() for index in queue}

    def serve(pool: ProcessPoolExecutor) -> None:
        for index in waiting:
            try:
                futures[CASES[index].name].set_result(pool.submit(_work, index, known).result())
            except BaseException as e:  # noqa: BLE001 - the test that waits is to see it
                futures[CASES[index].name].set_exception(e)

    threads = [threading.Thread(target=serve, args=(pool,), daemon=True) for pool in pools]
    for thread in threads:
        thread.start()
    try:
        yield futures
    finally:
        list(waiting)
        for thread in threads:
            thread.join()
        for pool in pools:
            pool.submit(_end, 0).result()
            pool.shutdown()


# -- the driver on the front-end, killed while its host side works ----------------------------------


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(forks=True) as up:
        yield up


@pytest.fixture(scope="module")
def source(cloud: Cloud) -> str:
    return driver_kills.prepare(cloud)


def begin(cloud: Cloud, held: driver_kills.Held, source: str) -> None:
    cloud.forget(7)
    cloud.vm(7, {0: held.image}, lcm_state=8 if held.action == "mv" else 3)
    for action, words in held.before.items():
        done = cloud.tm(action, *words(source), stdin=held.stdin)
        assert done.returncode == 0, done.stderr.decode()


def run_undisturbed(cloud: Cloud, held: driver_kills.Held, source: str) -> None:
    done = cloud.tm(held.action, *held.words(source), stdin=held.stdin)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("action", driver_kills.HELD)
def test_driver_killed_while_its_host_works(cloud: Cloud, source: str, action: str, outcomes: object) -> None:
    """The host side and all it started are gone within seconds; issued again, the action ends as if
    undisturbed.
    """
    held = driver_kills.HELD[action]
    begin(cloud, held, source)
    run_undisturbed(cloud, held, source)
    wanted = driver_kills.listing(cloud)
    begin(cloud, held, source)
    host = cloud.node(held.host)
    with cloud.held(host, held.lock):
        driver = cloud.start(held.action, *held.words(source), stdin=held.stdin)
        cloud.wait_for_hostside(host)
        assert driver.poll() is None, f"it did not wait for {held.lock}"
        # Only the driver: its ssh must end because the driver's end of the pipe is gone.
        cloud.kill_driver(driver)
        for node in cloud.lab.hosts:
            cloud.wait_for_no_hostside(node)
    run_undisturbed(cloud, held, source)
    assert driver_kills.listing(cloud) == wanted
    conftest.figures["drivers_killed"] = conftest.figures.get("drivers_killed", 0) + 1


def test_driver_killed_while_its_host_runs_a_program(cloud: Cloud, source: str) -> None:
    """The programs that the host side has started die with it, even one that is stopped."""
    cloud.forget(7)
    cloud.vm(7, {0: -1})
    done = cloud.tm("mkimage", "300", "raw", f"h1:{SYSTEM}/7/disk.0", "7", "101")
    assert done.returncode == 0, done.stderr.decode()
    cloud.h1.run(["dd", "if=/dev/urandom", f"of={SYSTEM}/7/disk.0", "bs=1M", "count=300", "conv=notrunc"])
    stopper = cloud.stopped(cloud.h1, "qemu-img convert")
    driver = cloud.start("cpds", f"h1:{SYSTEM}/7/disk.0", f"{STORE}/saved", "-1", "7", "100")
    assert stopper.communicate()[0], "no qemu-img at work"
    cloud.kill_driver(driver)
    cloud.wait_for_no_hostside(cloud.h1)
    until(lambda: cloud.h1.run(["pgrep", "-x", "qemu-img"], check=False).returncode == 1, 30, "no qemu-img")
    assert not cloud.fe.path(f"{STORE}/saved").exists()
    done = cloud.tm("cpds", f"h1:{SYSTEM}/7/disk.0", f"{STORE}/saved", "-1", "7", "100")
    assert done.returncode == 0, done.stderr.decode()
    cloud.h1.run(["cmp", f"{SYSTEM}/7/disk.0", f"{STORE}/saved"])
    assert not cloud.fe.run(["find", STORE, "-maxdepth", "1", "-name", ".staged-*"]).stdout
    cloud.fe.run(["rm", f"{STORE}/saved"])


# -- the verdicts: last, because they wait --------------------------------------------------------


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_action_killed_at_every_step(name: str, outcomes: Dict[str, Future[Outcome]]) -> None:
    outcome = outcomes[name].result()
    row: Dict[str, Any] = {key: getattr(outcome, key) for key in ("points", "reruns", "deletes", "passed")}
    conftest.figures.setdefault("actions", {})[name] = row
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.passed == outcome.points > 0
