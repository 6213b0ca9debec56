# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of links: each name below our roots becomes a symbolic link, each action is run; nothing outside
may change or get in.

What whoever can write an export, or sends a VM directory, can do at best. A link leads to a directory that
has all names an action could look for, to a private file, or (as one of our own would, but wrongly) to
another VM's or another image's data.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import pytest

from semishared.errors import SemisharedError
from semishared.model import answers
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.leftover_steps import LookAround
from semishared.plan.care import gc

from .cases import CASES as OTHER_CASES
from .cases import (
    OTHER,
    PERSISTENT,
    RAW,
    VM,
    Case,
    MiB,
    build,
    clone_steps,
    datastore,
    ln_steps,
    nothing,
    plan,
    whole_vm,
)
from .rig import MACHINES, Rig, own_mounts
from .snapshot_cases import SNAPSHOT_CASES

MARK = b"PRIVATE-TO-THIS-MACHINE-" * 171
"""A page of what nobody may find in a store or on a disk."""
SEED = 20261122
SAMPLE = 150
"""Trials of `make test`, beside the core; all of them: `make test-full`."""
AT = f"a/101/{VM}"
BAIT = (
    "0",
    "1",
    "2",
    "3",
    "6",
    "image",
    "manifest",
    "session",
    "generation.json",
    "generation",
    "have",
    "lock",
    "damaged",
    "disk.0",
    "disk.1",
    "disk.2",
    "disk.4",
    "disk.0.json",
    "disk.2.json",
    "disk.4.json",
    f"{OTHER}-0",
    f"{VM}-0",
    f"{VM}-4",
    f"vm-{VM}",
    f"vm-{VM}-disks",
    f"vm-{OTHER}",
    "base-100-1",
    "migration.json",
    "backup.xml",
    ".staged-disk.0.0123456789ab",
    f".staged-{VM}-0.0123456789ab",
    ".staged-0.0123456789ab",
    ".staged-image.0123456789ab",
    ".staged-restored.0123456789ab",
    "vm.xml",
    "disk.0.0",
)
"""Names in the directory outside: files, one as old as what is swept."""
FOLDERS = (
    "leases",
    "clones",
    "0123456789abcdef0123456789abcdef",
    "image-raw",
    f"{VM}",
    "disk.0.snap",
    f"{VM}-4.snap",
    ".semishared",
    "101",
)


class Trial(NamedTuple):
    """One name that is replaced in what a case starts from, by what, before its action."""

    case: str
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.case}: {self.name} -> {self.kind}"


# -- actions that the kill suite does not have ------------------------------------------------------


def collect(rig: Rig, _env: object) -> None:
    """Find and remove what is left over, as `semishared gc` does."""
    location = rig.inside("")[:-1]
    for machine in ("a", "fe"):
        (facts,) = plan(rig, machine, [LookAround(location, (101,), (rig.inside("100"),), False)], {})
        sources = frozenset(
            rig.inside(f"100/{path.name}") for path in rig.store().iterdir() if not path.name.startswith(".")
        )
        known = gc.Known({OTHER: "a"}, frozenset({(100, 1), (100, 2)}), sources)
        seen = answers.one(machine, LookAround, facts)
        for item in gc.find([gc.Machine(machine, location, seen, False)], known, 0, True):
            if not item.keep:
                plan(rig, machine, item.steps(), {})


def bases_care(rig: Rig, _env: object) -> None:
    """Ask for, verify, evict bases; report disks."""
    root = rig.inside(".semishared")
    (listed,) = plan(rig, "a", [base_steps.ListBases(root)], {})
    plan(rig, "a", [base_steps.ReportDisks(rig.inside("")[:-1], (101,))], {})
    for base in listed["bases"]:  # type: ignore[index]
        plan(rig, "a", [base_steps.VerifyBase(root, base["name"], 0)], {})
        plan(rig, "a", [base_steps.EvictBase(root, base["name"])], {})


def evict(rig: Rig, _env: object) -> None:
    """Evict the base of the image by its name."""
    for path in (rig.top / "names").read_text().split():
        plan(rig, "a", [base_steps.EvictBase(rig.inside(".semishared"), path)], {})


def evictable(rig: Rig) -> None:
    whole_vm(rig)
    names = [path.name for path in rig.on("a", ".semishared/bases").iterdir()]
    (rig.top / "names").write_text("\n".join(names))
    plan(
        rig, "a", [s.RemoveVm(OTHER, rig.inside(f"101/{OTHER}")), s.RemoveVm(VM, rig.inside(f"101/{VM}"))], {}
    )


def monitor(rig: Rig, env: Dict[str, Dict[str, str]]) -> None:
    datastore(rig, env, "monitor", "<ID>1</ID>")


def resize(rig: Rig, disk: int) -> Callable[[Rig, object], object]:
    return lambda rig, env: plan(
        rig, "a", [s.GrowDisk(s.DiskRef(VM, disk, rig.inside(f"101/{VM}")), 12 * MiB)], {}
    )


def image_action(name: str) -> Callable[[Rig, Dict[str, Dict[str, str]]], object]:
    def act(rig: Rig, env: Dict[str, Dict[str, str]]) -> object:
        source = f"<ID>4</ID><SIZE>8</SIZE><FORMAT>raw</FORMAT><SOURCE>{rig.inside(f'100/{PERSISTENT.name}')}</SOURCE>"  # noqa: E501
        return datastore(rig, env, name, f"{source}<TARGET_SNAPSHOT>0</TARGET_SNAPSHOT>")

    return act


def with_image_snapshot(rig: Rig) -> None:
    plan(rig, "a", ln_steps(rig, PERSISTENT, VM, 2), {})
    folder = rig.store(f"{PERSISTENT.name}.snap")
    folder.mkdir()
    shutil.copy(rig.store(PERSISTENT.name), folder / "0")


def killed_upload(rig: Rig) -> None:
    """An upload that was killed, two days ago."""
    folder = rig.store(".semishared/.uploads/" + "d" * 32)
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "image").write_bytes(b"half")


UPLOAD = "<ID>9</ID><TYPE>0</TYPE><PATH>{}/in/image-raw.raw</PATH><FORMAT></FORMAT>"
EXTRA = [
    Case("gc", collect, whole_vm),
    Case("bases", bases_care, whole_vm),
    Case("evict", evict, evictable),
    Case("datastore monitor", monitor, nothing),
    *(
        Case(f"datastore {name}", image_action(name), with_image_snapshot)
        for name in ("snap_delete", "snap_revert", "snap_flatten", "export", "rm")
    ),
    Case(
        "upload after a killed one",
        lambda rig, env: datastore(rig, env, "cp", UPLOAD.format(rig.top)),
        killed_upload,
    ),
    *(Case(f"resize disk {disk}", resize(None, disk), whole_vm) for disk in (0, 1, 2, 4)),  # type: ignore[arg-type]
    *(
        Case(
            f"cpds disk {disk}",
            lambda rig, env, disk=disk: plan(  # type: ignore[misc]
                rig,
                "a",
                [
                    s.SaveDisk(
                        s.DiskRef(VM, disk, rig.inside(f"101/{VM}")), rig.inside("100/saved"), "raw", ""
                    )
                ],
                {},
            ),
            whole_vm,
        )
        for disk in (0, 1, 2, 4)
    ),
    Case("clone once more", lambda rig, env: plan(rig, "a", clone_steps(rig, RAW), {}), whole_vm),
]
CASES = {case.name: case for case in [*OTHER_CASES, *SNAPSHOT_CASES, *EXTRA]}
CORE = [
    Trial("upload after a killed one", "store/.semishared/.uploads", "directory"),
    Trial("upload after a killed one", "store/.semishared", "directory"),
    Trial("upload after a killed one", "store/.semishared/.uploads/" + "d" * 32, "directory"),
    Trial("upload after a killed one", "store/.semishared/.uploads.lock", "private"),
    Trial("clone once more", f"{AT}/disk.0.snap", "directory"),
    Trial("clone once more", AT, "directory"),
    Trial("clone overlay cold", f"store/{RAW.name}", "private"),
    Trial("clone copy", f"store/{RAW.name}", "private"),
    Trial("clone on store", f"store/{RAW.name}", "private"),
    Trial("clone on store", f"store/.semishared/{RAW.name}", "directory"),
    Trial("clone on store", "store/.semishared", "directory"),
    Trial("clone kernel", "store/kernel", "private"),
    Trial("ln", f"store/{PERSISTENT.name}", "private"),
    Trial("datastore clone", "store/image-qcow2", "private"),
    Trial("datastore rm", f"store/{RAW.name}.snap", "directory"),
    Trial("datastore rm", f"store/.semishared/{RAW.name}", "directory"),
    Trial("datastore snap_revert", f"store/{PERSISTENT.name}.snap", "directory"),
    Trial("datastore snap_revert", f"store/{PERSISTENT.name}.snap/0", "private"),
    Trial("datastore snap_flatten", f"store/{PERSISTENT.name}.snap", "directory"),
    Trial("datastore export", f"store/{PERSISTENT.name}", "private"),
    Trial("cpds disk 2", f"store/{PERSISTENT.name}", "private"),
    Trial("cpds disk 2", f"store/.semishared/{PERSISTENT.name}/image", "wrong"),
    Trial("cpds disk 2", f"{AT}/disk.2", "private"),
    Trial("cpds disk 4", f"store/.semishared/image-qcow2/clones/{VM}-4.snap/0", "private"),
    Trial("cpds disk 4", f"store/.semishared/image-qcow2/clones/{VM}-4.snap", "directory"),
    Trial("cpds disk 4", f"store/.semishared/image-qcow2/clones/{VM}-4", "wrong"),
    Trial("cpds disk 4", "store/.semishared/image-qcow2/image", "wrong"),
    Trial("cpds disk 4", "store/image-qcow2", "private"),
    Trial("cpds disk 0", f"{AT}/disk.0.snap/0", "private"),
    Trial("cpds disk 0", f"{AT}/disk.0", "wrong"),
    Trial("cpds disk 1", f"{AT}/disk.1", "private"),
    Trial("prebackup", f"{AT}/disk.1", "private"),
    Trial("prebackup", f"store/{PERSISTENT.name}", "private"),
    Trial("delete vm", f"{AT}/.semishared", "directory"),
    Trial("delete vm", AT, "directory"),
    Trial("delete vm", "a/.semishared/locks", "directory"),
    Trial("delete disk overlay", AT, "directory"),
    Trial("delete disk on store", "store/.semishared", "directory"),
    Trial("delete disk on store", f"store/.semishared/{RAW.name}/clones", "directory"),
    Trial("delete disk on store", f"store/.semishared/{RAW.name}", "directory"),
    Trial("delete disk on store", f"store/.semishared/{RAW.name}/clones/{VM}-0.snap", "directory"),
    Trial("gc", "a/.semishared/bases", "directory"),
    Trial("gc", "store/.semishared", "directory"),
    Trial("gc", f"store/.semishared/{RAW.name}", "directory"),
    Trial("evict", "a/.semishared/bases", "directory"),
    Trial("mv host to host", AT, "directory"),
    Trial("mv host to host", f"{AT}/disk.0.snap", "directory"),
    Trial("premigrate", "store/.semishared", "directory"),
    Trial("restore in place", f"store/.semishared/{PERSISTENT.name}", "directory"),
    Trial("restore overlay", f"{AT}/disk.0.snap", "directory"),
    Trial("prebackup", "a/.semishared/bases/*/leases/7-0", "private"),
    Trial("cpds overlay", "a/.semishared/bases/*/leases/7-0", "private"),
]


# -- one trial --------------------------------------------------------------------------------------


def plant_outside(rig: Rig) -> Path:
    """Make what no action may touch or read, beside all roots."""
    top = rig.top / "outside"
    (top / "directory").mkdir(parents=True)
    (top / "private").write_bytes(MARK * (2 * MiB // len(MARK)))
    for folder in (top / "directory", *(top / "directory" / name for name in FOLDERS)):
        folder.mkdir(exist_ok=True)
        for name in BAIT:
            (folder / name).write_bytes(MARK)
            os.utime(folder / name, (1_600_000_000, 1_600_000_000))
    return top


def listing(top: Path) -> Dict[str, Tuple[object, ...]]:
    """Return names, modes, owners, sizes and times of all below."""
    found: Dict[str, Tuple[object, ...]] = {}
    for folder, folders, names in os.walk(top):
        for name in (".", *folders, *names):
            path = os.path.join(folder, name)
            info = os.lstat(path)
            times = (info.st_mtime_ns, info.st_ctime_ns)
            found[os.path.relpath(path, top)] = (
                info.st_mode,
                info.st_uid,
                info.st_size,
                info.st_nlink,
                info.st_ino,
                *times,
            )
    return found


def names(rig: Rig) -> Iterator[str]:
    """Yield every name below the roots (store, system datastores, base stores) as `machine/...` or
    `store/...`.
    """
    for part in (*MACHINES, "store"):
        top = rig.top / "live" / part
        for folder, folders, files in os.walk(top):
            for name in sorted([*folders, *files]):
                path = f"{part}/{Path(folder, name).relative_to(top)}"
                if part == "store" or (path.count("/") > 1 and not path.startswith(f"{part}/100/")):
                    yield path


def replace(rig: Rig, trial: Trial) -> bool:
    """Put the link in the place of what is there; tell whether there is one to try."""
    path = next((rig.top / "live").glob(trial.name), rig.top / "live" / trial.name)
    there = path.is_symlink()
    target = {"directory": f"{rig.top}/outside/directory", "private": f"{rig.top}/outside/private"}.get(
        trial.kind
    )
    if trial.kind == "wrong":
        if not there:
            return False
        was = os.readlink(path)
        if was.startswith("../../"):
            target = f"../../../../../../../../..{rig.top}/outside/private"
        elif was.startswith("/"):
            target = (
                f"{was}/../../../../../outside/private" if "/clones/" in was else f"{rig.top}/outside/private"
            )
        else:
            target = f"{os.path.dirname(was)}/../../../../../../../../../../../..{rig.top}/outside/private"
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(str(target), path)
    return True


def written(path: str) -> Iterator[bytes]:
    """Yield what a file holds, without its holes: images are mostly holes."""
    fd, end = os.open(path, os.O_RDONLY), 0
    try:
        while True:
            try:
                begin = os.lseek(fd, end, os.SEEK_DATA)
            except OSError:
                return  # no data after here
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            yield os.pread(fd, end - begin, begin)
    finally:
        os.close(fd)


def with_private_bytes(rig: Rig) -> List[str]:
    """Return the files below the roots that hold any of the private bytes."""
    found = []
    for folder, _, files in os.walk(rig.top / "live"):
        for name in files:
            path = os.path.join(folder, name)
            info = os.lstat(path)
            if (
                stat.S_ISREG(info.st_mode)
                and info.st_blocks
                and any(MARK[:200] in data for data in written(path))
            ):
                found.append(os.path.relpath(path, rig.top / "live"))
    return found


class Fuzzer:
    """A rig, and what each case starts from, made once."""

    def __init__(self) -> None:
        own_mounts()
        self.rig = Rig()
        build(self.rig)
        self.outside = plant_outside(self.rig)
        self.before = listing(self.outside)
        self._made: Dict[object, str] = {}

    def start(self, case: Case) -> None:
        """Put the rig into what the case starts from."""
        if case.setup not in self._made:
            self.rig.restore("base")
            case.setup(self.rig)
            self._made[case.setup] = f"start-{len(self._made)}"
            self.rig.save(self._made[case.setup])
        else:
            self.rig.restore(self._made[case.setup])

    def run(self, trial: Trial) -> str:
        """Run a trial; return what went wrong, '' if nothing did."""
        case = CASES[trial.case]
        self.start(case)
        if not replace(self.rig, trial):
            return ""
        said = "succeeded"
        try:
            case.act(self.rig, {})
        except (SemisharedError, AssertionError) as e:
            said = f"{type(e).__name__}: {e}"
        except Exception:  # noqa: BLE001 - an action that does not know what to do is a failure too
            said = traceback.format_exc()
        wrong = []
        after = listing(self.outside)
        changed = sorted(name for name in {*self.before, *after} if self.before.get(name) != after.get(name))
        if changed:
            wrong.append(f"changed outside: {', '.join(changed[:8])}")
            shutil.rmtree(self.outside)
            plant_outside(self.rig)
            self.before = listing(self.outside)
        leaked = with_private_bytes(self.rig)
        if leaked:
            wrong.append(f"private bytes in {', '.join(leaked[:8])}")
        return f"{trial}: {'; '.join(wrong)} ({said[:300]})" if wrong else ""

    def all(self, case: str) -> List[Trial]:
        """Return all trials of a case."""
        self.start(CASES[case])
        kinds = ("directory", "private", "wrong")
        return [Trial(case, name, kind) for name in sorted(set(names(self.rig))) for kind in kinds]


_fuzzer: List[Fuzzer] = []


def _fuzz(trials: List[Trial], sample: int, whole: Tuple[str, ...]) -> Tuple[int, List[str]]:
    """In a process of its own, whose mounts vanish with it: run trials, or a sample of all, or all of some
    cases.
    """
    if not _fuzzer:
        _fuzzer.append(Fuzzer())
    fuzzer = _fuzzer[0]
    try:
        if sample:
            dice = random.Random(SEED)
            # Setups take longer than trials: some cases each time, the same at each run.
            chosen = dice.sample(sorted(CASES), 12)
            known = [trial for case in chosen for trial in fuzzer.all(case)]
            trials = sorted(dice.sample(known, min(sample, len(known))))
        for case in whole:
            trials = [*trials, *fuzzer.all(case)]
        return len(trials), [wrong for wrong in map(fuzzer.run, trials) if wrong]
    except Exception:  # noqa: BLE001 - told by the test
        return 0, [traceback.format_exc()]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1) as pool:
        yield pool
        pool.submit(_end).result()


def _end() -> None:
    if _fuzzer:
        _fuzzer.pop().rig.__exit__(None, None, None)


@pytest.mark.fault(7, "no link below our roots is followed: the known ways in")
def test_known_ways_in(pool: ProcessPoolExecutor) -> None:
    count, wrong = pool.submit(_fuzz, CORE, 0, ()).result()
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


def test_sample_of_all_names_and_actions(pool: ProcessPoolExecutor) -> None:
    count, wrong = pool.submit(_fuzz, [], SAMPLE, ()).result()
    assert count
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_name(pool: ProcessPoolExecutor, case: str) -> None:
    count, wrong = pool.submit(_fuzz, [], 0, (case,)).result()
    assert count
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
