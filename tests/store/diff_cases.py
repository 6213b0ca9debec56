# SPDX-License-Identifier: Apache-2.0
"""What every kind of store must do with diffs: asked with the other cases (cases.py), where processes and
qemu-img are.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple, Type

import pytest

from lab import forks
from points import Known
from semishared import store
from semishared.errors import AnotherWriter, CommitRefused, NotOwner, SemisharedError, StaleDiff
from semishared.model.refs import ImageRef, Owner
from semishared.store.commit.claims import Committed, Diff
from semishared.tools import extents

from .cases import SIZE, Bench, MiB, case, content, image, nothing_left, of, pattern
from .committing import commit

TESTS = Path(__file__).resolve().parents[1]
AT_ONCE = 6
VM, DISK, SEQ = 23, 1, 5
WAYS = ("commit replayed", "commit renamed")
"""How the new content becomes the image's: what is before depends on it, what is after does not."""
FULL = bool(os.environ.get("SEMISHARED_FULL"))


class Lent(NamedTuple):
    """An image that was claimed for a diff on this machine."""

    image: ImageRef
    owner: Owner
    diff: Diff
    top: Path

    def write(self, *commands: str, layer: int = -1) -> None:
        """Let the guest write, by commands of qemu-io."""
        words = [word for command in commands for word in ("-c", command)]
        subprocess.run(
            ["qemu-io", "-f", "qcow2", *words, self.diff.layers[layer]],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=300,
        )

    def over(self, *, below: int = -1, size: int = 0) -> Lent:
        """Lay a new active layer over one of the chain: what a snapshot does, or, over a lower one, going
        back to it.
        """
        layers = self.diff.layers[: len(self.diff.layers) + 1 + below]
        path = f"{self.top}/layer-{os.urandom(4).hex()}"
        words = ["qemu-img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=128k"]
        under = ["-b", layers[-1], "-F", "qcow2"] if layers else ["-b", self.diff.base, "-F", "raw"]
        subprocess.run([*words, *under, path, *([str(size)] if size else [])], check=True, timeout=300)
        return self._replace(diff=self.diff._replace(layers=(*layers, path)))

    def wanted(self) -> bytes:
        """Return what the guest sees."""
        target = f"{self.top}/seen-{os.urandom(4).hex()}"
        subprocess.run(
            ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", self.diff.layers[-1], target],
            check=True,
            timeout=300,
        )
        return Path(target).read_bytes()

    def commit(self) -> Committed:
        """Commit it."""
        return commit(self.image, self.owner, self.diff)

    def run(self, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Commit it in another process, a fork."""
        words = [*forks.words("store.committing"), self.job()]
        return subprocess.run(words, env=self.env(**env), capture_output=True, check=False, timeout=300)

    def job(self) -> str:
        """Write what store.committing is to be told, and return where."""
        job = self.top / "job"
        job.write_bytes(pickle.dumps((self.image, self.owner, self.diff)))
        return str(job)

    def env(self, **more: str) -> Dict[str, str]:
        """Return what that needs."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "lib")]), **more}


def lent(bench: Bench, top: Path, number: int = 7) -> Lent:
    """Publish an image, stage its base, and claim it for a diff: a write, one in pieces, a hole where data
    was, more at the end.
    """
    own = top / f"vm-{number}"
    own.mkdir()
    made = image(bench, own, number)
    _, generation = content(bench, made, own)
    manifest = own / "manifest"
    manifest.write_bytes(extents.copy(str(own / "base"), None, "raw", "test").text())
    owner = Owner(VM, DISK, SEQ, generation, "h1", bench.access.cloud)
    assert of(bench).claim(made, owner) is None
    assert of(bench).owner(made) == owner
    found = Lent(made, owner, Diff((), str(own / "base"), "raw", str(manifest), str(own / "last")), own).over(
        below=0
    )
    found.write("write -P 1 3M 4k", "write -P 2 5M 1M", f"write -z {MiB} 32k", "discard 9M 1M")
    return found


def is_content(bench: Bench, it: Lent, wanted: bytes, generation: str = "") -> None:
    """Judge what a host would read, after settling, and its name."""
    (it.top / "read").mkdir(exist_ok=True)
    data, found = content(bench, it.image, it.top / "read")
    assert data == wanted
    target = it.top / "wanted"
    target.write_bytes(wanted)
    assert found == extents.copy(str(target), None, "raw", "test").generation
    assert generation in ("", found)


def is_process(bench: Bench) -> bool:
    return bench.outlives_processes


@case(is_process)
def a_diff_comes_into_its_image(bench: Bench, top: Path) -> None:
    it = lent(bench, top)
    of(bench).may_commit(it.image, it.owner)
    done = it.commit()
    assert (done.size, done.dirty, bool(done.how)) == (SIZE, MiB + 4096, True)
    is_content(bench, it, it.wanted(), done.generation)
    again = it.commit()
    assert (again.how, again.written, again.generation) == ("", 0, done.generation), "nothing to do"
    it.write("write -P 3 3077k 8k")
    more = it.commit()
    assert 8192 <= more.written <= 2 * 16384 + 100, (
        "only the extents of 4 MiB that the image does not have, and what is dirty of them"
    )
    is_content(bench, it, it.wanted(), more.generation)
    kept = of(bench).content(it.image).expected(more.generation)
    assert kept and kept.generation == more.generation, (
        "whoever stages it knows what it has in common with others"
    )
    of(bench).disown(it.image, it.owner)
    assert of(bench).owner(it.image) is None
    nothing_left(bench)


@case(is_process)
def all_layers_come_and_the_image_grows(bench: Bench, top: Path) -> None:
    it = lent(bench, top).over(size=SIZE + 5 * MiB + 4096)
    it.write("write -P 4 3074k 1k", "write -P 5 18M 4k", "write -z 5M 64k")
    done = it.commit()
    assert done.size == SIZE + 5 * MiB + 4096
    is_content(bench, it, it.wanted(), done.generation)


@case(is_process)
def a_guest_that_went_back_is_followed(bench: Bench, top: Path) -> None:
    first = lent(bench, top)
    it = first.over()
    it.write("write -P 6 7M 1M", "write -P 7 3M 4k", "write -P 8 15M 64k")
    it.commit()
    for last in ("", it.diff.last):
        back = first.over()
        back = back._replace(diff=back.diff._replace(last=last))
        done = back.commit()
        is_content(bench, back, back.wanted(), done.generation)
        assert done.generation


@case(is_process)
def without_its_manifest_a_commit_has_no_name(bench: Bench, top: Path) -> None:
    it = lent(bench, top)
    it = it._replace(diff=it.diff._replace(manifest="", last=""))
    assert it.commit().generation == ""
    is_content(bench, it, it.wanted())
    it.write("write -P 9 11M 4k")
    it.commit()
    is_content(bench, it, it.wanted())


def refused(it: Lent, wanted: Type[SemisharedError], *, why: str = "") -> None:
    """Judge a refusal: nothing has changed, neither the image nor the diff."""
    layers = [Path(layer).read_bytes() for layer in it.diff.layers]
    at = store.of(it.image.access)
    at.settle(it.image)
    with pytest.raises(wanted, match=why):
        at.may_commit(it.image, it.owner)
    with pytest.raises(wanted, match=why):
        it.commit()
    assert [Path(layer).read_bytes() for layer in it.diff.layers] == layers


@case(is_process)
def two_disks_never_commit_to_one_image(bench: Bench, top: Path) -> None:
    it = lent(bench, top)
    refused(it._replace(owner=it.owner._replace(vm=24)), NotOwner, why="disk 1 of VM 23 since")
    other = it.owner._replace(vm=24, epoch=1)
    assert of(bench).claim(it.image, other) == it.owner
    refused(it, NotOwner, why="disk 1 of VM 24 since")
    of(bench).disown(it.image, it.owner)
    assert of(bench).owner(it.image) == other, "which is not its own"
    is_content(bench, it, (it.top / "base").read_bytes())
    done = it._replace(owner=other).commit()
    is_content(bench, it, it.wanted(), done.generation)
    of(bench).disown(it.image, other)
    refused(it, NotOwner, why="no disk")


@case(is_process)
def a_diff_of_before_is_refused(bench: Bench, top: Path) -> None:
    it = lent(bench, top)
    later = it.owner._replace(epoch=SEQ + 2, host="h2")
    assert of(bench).claim(it.image, later) == it.owner
    refused(it, StaleDiff, why="SEQ 7")
    with pytest.raises(StaleDiff):
        of(bench).claim(it.image, it.owner)
    of(bench).note_epoch(it.image, VM, SEQ + 3)
    refused(it._replace(owner=later), StaleDiff, why="SEQ 8")
    with pytest.raises(StaleDiff):
        of(bench).claim(it.image, later)
    is_content(bench, it, (it.top / "base").read_bytes())
    now = it._replace(owner=it.owner._replace(epoch=SEQ + 3))
    of(bench).claim(it.image, now.owner)
    now.commit()
    is_content(bench, now, now.wanted())


@case(is_process)
def an_image_that_was_changed_meanwhile_is_left_alone(bench: Bench, top: Path) -> None:
    grown, written, kept, back = (lent(bench, top, number) for number in (7, 8, 9, 10))
    of(bench).grow(grown.image, 2 * SIZE)
    refused(grown, CommitRefused, why="grown")
    of(bench).begin_session(written.image)
    bench.write(written.image.source, MiB, b"\xb2" * 65536)
    refused(written, CommitRefused, why="written")
    of(bench).keep(kept.image, 3)
    refused(kept, CommitRefused, why="has 3")
    of(bench).forget(kept.image, 3)
    of(bench).keep(back.image, 0)
    of(bench).revert(back.image, 0)
    refused(back, CommitRefused)
    with pytest.raises(CommitRefused):
        of(bench).claim(written.image, written.owner)
    assert pattern(bench, written.image.source) == 0xB2
    nothing_left(bench)
    kept.commit()
    is_content(bench, kept, kept.wanted())


@case(is_process)
def a_diff_that_is_written_to_is_not_committed(bench: Bench, top: Path) -> None:
    from tools.test_writers import exported

    it = lent(bench, top)
    with exported(it.diff.layers[0], "qcow2"), pytest.raises(AnotherWriter):
        it.commit()
    is_content(bench, it, (it.top / "base").read_bytes())


# -- killed -------------------------------------------------------------------------------------------


def killed(bench: Bench, top: Path, number: int, at: int) -> Tuple[bool, str]:
    """Kill a commit at a point, look, and commit again; return whether it was the new content, and what is
    wrong.
    """
    it = lent(bench, top, number)
    old, new = (it.top / "base").read_bytes(), it.wanted()
    layers = [Path(layer).read_bytes() for layer in it.diff.layers]
    died = it.run(SEMISHARED_KILL_AT=str(at))
    if died.returncode != -signal.SIGKILL:
        return False, f"it was not killed: {died.stderr.decode()}"
    if [Path(layer).read_bytes() for layer in it.diff.layers] != layers:
        return False, "the diff was changed"
    (it.top / "read").mkdir()
    if number % 2:  # else who commits again is the first to look
        of(bench).check(it.image)
        data, _ = content(bench, it.image, it.top / "read")
        if data not in (old, new):
            return False, "neither the old nor the new content"
        was_new = data == new
    else:
        was_new = False
    again = it.run()
    if again.returncode:
        return was_new, f"again: {again.stderr.decode()}"
    is_content(bench, it, new)
    of(bench).disown(it.image, it.owner)
    return was_new, ""


def chosen(bench: Bench, top: Path, passed: Sequence[str]) -> List[int]:
    """Return at which points a commit is killed: at all on its way, and after it at those where none that
    went another way was.
    """
    way = next((number for number, name in enumerate(passed, 1) if name in WAYS), len(passed))
    after = (
        Known(top.parent).chosen(type(bench).__name__, passed[way - 1], passed[way:]) if passed[way:] else []
    )
    return [*range(1, way + 1), *(way + at for at in after)]


@case(is_process)
def who_is_killed_while_committing_leaves_the_old_or_the_new(bench: Bench, top: Path) -> None:
    traced, trace = lent(bench, top), top / "trace"
    assert traced.run(SEMISHARED_TRACE=str(trace)).returncode == 0
    passed = [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]
    assert "commit decided" in passed
    looks = (1, 0) if FULL else (1,)
    runs = [(100 + 2 * at + look, at) for at in chosen(bench, top, passed) for look in looks]
    runs += (
        []
        if FULL
        else [(2 * at, at) for at in (passed.index("commit decided"), passed.index("commit decided") + 1)]
    )
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda one: killed(bench, top, *one), runs))
    wrong = [f"killed after {at} {passed[at - 1]}: {what}" for (_, at), (_, what) in zip(runs, found) if what]
    assert not wrong, "\n".join(wrong)
    decided = passed.index("commit decided") + 1
    seen = {at: was_new for (number, at), (was_new, _) in zip(runs, found) if number % 2}
    assert seen == {at: at >= decided for at in seen}, "one rename, or one write, decides"
    nothing_left(bench)
