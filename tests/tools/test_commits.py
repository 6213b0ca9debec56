# SPDX-License-Identifier: Apache-2.0
"""Commits to images of mounted stores, beyond what every kind of store does (tests/store/diff_cases.py):
locks, room, formats.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from semishared.errors import AnotherWriter, CommitRefused, JournalDamaged, NoSpace
from semishared.model.disk import names as disk_names
from semishared.model.refs import Owner
from semishared.model.store import dir_names
from semishared.store.commit.change import Part
from semishared.store.commit.claims import Diff
from semishared.store.dir import image as dir_image
from semishared.store.dir import journal as dir_journal
from semishared.store.dir import redo
from semishared.tools import qemu_img, run, whole_pages
from store.benches import DirBench
from store.cases import SIZE, MiB, nothing_left, of, ref
from store.diff_cases import DISK, SEQ, VM, Lent, is_content, lent
from tools.test_writers import exported


@pytest.fixture()
def bench(tmp_path: Path) -> DirBench:
    return DirBench(tmp_path)


def points(it: Lent, trace: Path) -> list[str]:
    """Return the points that a commit passes."""
    assert it.run(SEMISHARED_TRACE=str(trace)).returncode == 0
    return [line.split(" ", 1)[1] for line in trace.read_text().splitlines()]


@contextmanager
def stopped(it: Lent, at: int) -> Iterator[subprocess.Popen[bytes]]:
    """Have a commit stand still at a point."""
    words = [sys.executable, "-m", "store.committing", it.job()]
    with subprocess.Popen(words, env=it.env(SEMISHARED_STOP_AT=str(at)), stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 60
            while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def test_who_reads_waits_for_a_commit_that_is_decided(bench: DirBench, tmp_path: Path) -> None:
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index("commit decided") + 1
    it = lent(bench, tmp_path)
    new = it.wanted()
    with stopped(it, at) as process, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(is_content, bench, it, new)
        words = ["qemu-io", "-f", "raw", "-c", "write 0 4k", it.image.source]
        guest = subprocess.run(words, capture_output=True, check=False, timeout=60)
        assert b"lock" in guest.stderr and guest.returncode, "no QEMU opens it meanwhile"
        time.sleep(0.5)
        assert not reading.done()
        process.send_signal(signal.SIGCONT)
        reading.result(60)
        assert process.wait(60) == 0
    nothing_left(bench)


@pytest.mark.fault(49, "two commits at once do not both count on the same free space of a store")
def test_room_is_counted_by_one_commit_until_it_has_taken_it(bench: DirBench, tmp_path: Path) -> None:
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index("commit written") + 1
    one, other = lent(bench, tmp_path), lent(bench, tmp_path, 8)
    with stopped(one, at) as process, ThreadPoolExecutor(1) as pool:
        committing = pool.submit(other.run)
        side = Path(f"{bench.root}/{dir_names.side(os.path.basename(other.image.source))}")
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in Path(dir_names.commits(str(side))).glob("*/ranges")):
            assert time.monotonic() < deadline and not committing.done()
            time.sleep(0.02)
        time.sleep(0.5)
        assert not committing.done() and not os.path.exists(dir_names.commit(str(side)))
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0 and committing.result(60).returncode == 0
    for it in (one, other):
        is_content(bench, it, it.wanted())
    nothing_left(bench)


def test_who_was_cut_off_decides_nothing_any_more(bench: DirBench, tmp_path: Path) -> None:
    passed = points(lent(bench, tmp_path, 6), tmp_path / "trace")
    it = lent(bench, tmp_path)
    old = (it.top / "base").read_bytes()
    with stopped(it, passed.index("commit staged") + 1) as process:
        assert len(of(bench).leftovers(bench.root)) == 1
        # What the next claim or commit does first: with a lock that the server has taken from this one.
        side = f"{bench.root}/{dir_names.side(os.path.basename(it.image.source))}"
        subprocess.run(["rm", "-r", dir_names.commits(side)], check=True)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 1
        assert process.stderr
        assert b"was cut off" in process.stderr.read()
    is_content(bench, it, old)
    it.commit()
    is_content(bench, it, it.wanted())


SINCE = ("claimed by another disk", "committed to again", "given to a guest")


@pytest.mark.fault(
    34, "a commit that a host decides after it has lost the image to somebody is carried out by nobody"
)
@pytest.mark.parametrize("since", SINCE)
def test_what_is_decided_late_is_thrown_away(since: str, bench: DirBench, tmp_path: Path) -> None:
    passed = points(lent(bench, tmp_path, 6), tmp_path / "trace")
    it = lent(bench, tmp_path)
    side = Path(f"{bench.root}/{dir_names.side(os.path.basename(it.image.source))}")
    with stopped(it, passed.index("commit written") + 1):
        (journal,) = Path(dir_names.commits(str(side))).iterdir()
        journal.rename(tmp_path / "late")
    owner = it.owner
    if since == SINCE[0]:
        owner = it.owner._replace(vm=24)
        of(bench).claim(it.image, owner)
    elif since == SINCE[1]:
        it.write("write -P 7 3M 4k")
        it.commit()
    else:
        of(bench).begin_session(it.image)
        bench.write(it.image.source, 2 * MiB, b"\xb2" * 65536)
    expected = Path(it.image.source).read_bytes()
    # The rename of the host that was cut off arrives.
    (tmp_path / "late").rename(dir_names.commit(str(side)))
    of(bench).check(it.image)
    assert Path(it.image.source).read_bytes() == expected
    assert of(bench).owner(it.image) == owner
    nothing_left(bench)


@pytest.mark.fault(
    34,
    "who has lost the image while he ended a commit takes neither its record nor its journal from "
    "who has it now",
)
def test_what_is_ended_late_takes_nothing_from_who_came_after(bench: DirBench, tmp_path: Path) -> None:
    passed = points(lent(bench, tmp_path, 6), tmp_path / "trace")
    it = lent(bench, tmp_path)
    new, source = it.wanted(), Path(it.image.source)
    with stopped(it, passed.index("commit replayed") + 1) as process:
        # Its lock is gone, as of a machine that was cut off: it is that of a file without a name.
        subprocess.run(["cp", "-p", source, tmp_path / "same"], check=True)
        (tmp_path / "same").rename(source)
        of(bench).check(it.image)
        now = it.owner._replace(epoch=it.owner.epoch + 1, host="h2")
        of(bench).claim(it.image, now)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 1
        assert process.stderr
        assert b"cut off" in process.stderr.read()
    assert of(bench).owner(it.image) == now
    is_content(bench, it, new)
    nothing_left(bench)


def test_a_journal_of_an_older_version_is_carried_out(bench: DirBench, tmp_path: Path) -> None:
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index("commit decided") + 1
    it = lent(bench, tmp_path)
    assert it.run(SEMISHARED_KILL_AT=str(at)).returncode == -signal.SIGKILL
    journal = Path(
        f"{bench.root}/{dir_names.side(os.path.basename(it.image.source))}/{dir_names.COMMIT}/journal.json"
    )
    said = json.loads(journal.read_text())
    journal.write_text(json.dumps({"version": 1, **{key: said[key] for key in ("size", "digest", "claim")}}))
    is_content(bench, it, it.wanted())


@pytest.mark.fault(
    35, "an image that was changed, and has its size and time of before, is not committed to, and has no name"
)
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_an_image_that_was_changed_and_dated_back_is_not_committed_to(
    how: str, bench: DirBench, tmp_path: Path
) -> None:
    it = lent(bench, tmp_path)
    source = Path(it.image.source)
    was, at = source.stat(), of(bench).content(it.image)
    assert at.generation(at.see()) == it.owner.generation
    if how == "replaced":
        (tmp_path / "other").write_bytes(source.read_bytes())
        (tmp_path / "other").rename(source)
    bench.write(str(source), 2 * MiB, b"\xb2" * 65536)
    os.utime(source, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert at.generation(at.see()) == "", "nobody makes a base of it by its old name"
    for _ in range(2):
        with pytest.raises(CommitRefused, match="somebody else"):
            it.commit()
    assert at.generation(at.see()) == ""
    with source.open("rb") as file:
        assert os.pread(file.fileno(), 65536, 2 * MiB) == b"\xb2" * 65536


@pytest.mark.parametrize("how", ["another mode", "copied with its time"])
def test_an_image_that_was_touched_and_has_what_it_had_is_committed_to(
    how: str, bench: DirBench, tmp_path: Path
) -> None:
    it = lent(bench, tmp_path)
    source = Path(it.image.source)
    for _ in range(2):
        if how == "another mode":
            source.chmod(0o640 if source.stat().st_mode & 0o20 else 0o660)
        else:
            subprocess.run(["cp", "-p", source, tmp_path / "same"], check=True)
            (tmp_path / "same").rename(source)
        of(bench).claim(it.image, it.owner)
        done = it.commit()
        is_content(bench, it, it.wanted(), done.generation)
        it.write("write -P 7 11M 4k")


def test_what_older_versions_noted_of_an_image_is_understood(bench: DirBench, tmp_path: Path) -> None:
    it = lent(bench, tmp_path)
    side = f"{bench.root}/{dir_names.side(os.path.basename(it.image.source))}"
    claim, generation = Path(dir_names.owner(side)), Path(dir_names.generation(side))
    said = json.loads(claim.read_text())
    claim.write_text(json.dumps({**said, "state": said["state"][:3]}))
    said = json.loads(generation.read_text())
    generation.write_text(
        json.dumps({key: value for key, value in said.items() if key not in ("ctime_ns", "inode")})
    )
    at = of(bench).content(it.image)
    assert at.generation(at.see()) == it.owner.generation
    it.commit()
    is_content(bench, it, it.wanted())


def test_an_image_that_a_guest_has_open_is_not_committed_to(bench: DirBench, tmp_path: Path) -> None:
    it = lent(bench, tmp_path)
    with exported(it.image.source, "raw"), pytest.raises(AnotherWriter, match="process"):
        it.commit()
    it.commit()
    is_content(bench, it, it.wanted())


def test_a_journal_that_is_not_whole_is_not_carried_out(bench: DirBench, tmp_path: Path) -> None:
    at = points(lent(bench, tmp_path, 6), tmp_path / "trace").index("commit decided") + 1
    it = lent(bench, tmp_path)
    assert it.run(SEMISHARED_KILL_AT=str(at)).returncode == -signal.SIGKILL
    journal = f"{bench.root}/{dir_names.side(os.path.basename(it.image.source))}/{dir_names.COMMIT}"
    with open(dir_names.journal_data(journal), "r+b") as data:
        data.write(b"\xff")
    before = Path(it.image.source).read_bytes()
    for ask in (
        lambda: of(bench).check(it.image),
        lambda: of(bench).begin_session(it.image),
        lambda: of(bench).freeze(it.image),
    ):
        with pytest.raises(JournalDamaged):
            ask()
    assert Path(it.image.source).read_bytes() == before


OLD_MAP = """#!/bin/sh
[ "$1" != map ] || { /usr/bin/qemu-img "$@" | sed 's/"present": [a-z]*, //'; exit; }
exec /usr/bin/qemu-img "$@"
"""
"""What `qemu-img map` of QEMU before 6.1 says: that of now, without what it did not say."""


@pytest.mark.fault(
    50,
    "a grown local disk of a persistent image is committed where qemu-img does not say what is "
    "present (before 6.1)",
)
def test_commit_by_an_older_qemu(bench: DirBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = lent(bench, tmp_path).over(size=SIZE + 5 * MiB)
    it.write("write -P 4 3074k 1k", "write -z 5M 64k")
    old = tmp_path / "old"
    old.mkdir()
    (old / "qemu-img").write_text(OLD_MAP)
    (old / "qemu-img").chmod(0o755)
    monkeypatch.setattr(
        run, "environment", lambda keep=(): {**os.environ, "PATH": f"{old}:{os.environ['PATH']}"}
    )
    chain = qemu_img.chain(it.diff.layers, it.diff.base, "raw")
    assert not any("present" in entry for entry in qemu_img.mapped(chain))
    done = it.commit()
    assert done.size == SIZE + 5 * MiB
    is_content(bench, it, it.wanted(), done.generation)


@pytest.mark.fault(
    41,
    "two commits in a row of scattered writes copy at most twice what the guest changed, beside "
    "where that goes",
)
def test_scattered_writes_are_copied_twice_at_most(bench: DirBench, tmp_path: Path) -> None:
    it = lent(bench, tmp_path)
    it.commit()
    for again in range(2):
        it = it.over()
        it.write(*(f"write -P {1 + again + at % 250} {at * 32}k 4k" for at in range(SIZE // (32 << 10))))
        done = it.commit()
        table = (
            2 * done.dirty // 4096 * redo.RANGE.size
        )  # where it goes: a line each, and one for what lies between
        assert 0 < done.written <= 2 * done.dirty + table, "to the journal, and from there"


@pytest.mark.fault(
    40,
    "a commit that is decided can be read and ended, however many extents its record names, and "
    "wherever they are",
)
def test_a_decided_commit_can_be_read_however_much_it_touched(bench: DirBench, tmp_path: Path) -> None:
    it = lent(bench, tmp_path)
    stored, chance = dir_image.Stored(it.image.source), random.Random(7).randbytes(1_400_000)
    touched = frozenset(8 * at + bit for at, byte in enumerate(chance) for bit in (byte & 7, byte >> 3 & 7))
    claim = dir_journal.claim(stored)
    assert claim
    with dir_journal.settled(stored), dir_journal.draft(stored) as directory:
        after_it = claim._replace(touched=touched)
        dir_journal.decide(
            stored,
            directory,
            dir_journal.Decided(claim.size, "", after_it, dir_journal.named(claim), "a" * 32),
            None,
        )
        with dir_image.side(stored) as side:
            assert os.stat(dir_names.journal(dir_names.commit(side))).st_size > disk_names.JSON_BYTES
    dir_journal.settle(stored)
    after = dir_journal.claim(stored)
    assert after and after.touched == touched


@pytest.mark.parametrize("size", [8, 25])
def test_a_store_without_room_keeps_the_old_content(size: int, tmp_path: Path) -> None:
    """For the journal, or for what it notes."""
    where = tmp_path / "small"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "small", where], check=True)
    try:
        bench = DirBench(where)
        it = lent(bench, tmp_path)
        it.write("write -P 7 1M 14M")
        with pytest.raises(NoSpace):
            it.commit()
        is_content(bench, it, (it.top / "base").read_bytes())
        nothing_left(bench)
        subprocess.run(["mount", "-o", "remount,size=60m", where], check=True)
        it.commit()
        is_content(bench, it, it.wanted())
    finally:
        subprocess.run(["umount", where], check=True)


def test_a_host_without_room_for_its_note_has_committed(bench: DirBench, tmp_path: Path) -> None:
    where = tmp_path / "host"
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "host", where], check=True)
    try:
        it = lent(bench, tmp_path)
        it = it._replace(diff=it.diff._replace(last=str(where / "last")))
        it.commit()
        assert (where / "last").exists()
        it.write("write -P 9 7M 64k")
        with open(where / "full", "wb", 0) as full, pytest.raises(OSError, match="No space left"):
            while True:
                full.write(bytes(4096))
                full.flush()
        assert it.commit().written > 0
        assert not (where / "last").exists(), "what is there is not what the image has"
        is_content(bench, it, it.wanted())
        assert it.commit().written >= 0
        is_content(bench, it, it.wanted())
    finally:
        subprocess.run(["umount", where], check=True)


def lent_qcow2(bench: DirBench, tmp_path: Path) -> tuple[Lent, str]:
    """Return a diff over an image that is qcow2, and the manifest of that."""
    made = ref(bench)._replace(format="qcow2")
    with of(bench).made(made, 0) as draft:
        source = tmp_path / "source"
        source.write_bytes(b"\xa1" * MiB + bytes(7 * MiB))
        draft.fill(str(source), "raw")
    base, manifest = str(tmp_path / "base"), tmp_path / "manifest"
    found = of(bench).content(made)
    seen = found.see()
    copied = found.copy(seen, base, "qcow2")
    found.publish(copied, seen)
    manifest.write_bytes(copied.text())
    owner = Owner(VM, DISK, SEQ, copied.generation, "h1", bench.access.cloud)
    of(bench).claim(made, owner)
    layer = str(tmp_path / "layer")
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", layer], check=True)
    diff = Diff((layer,), base, "qcow2", str(manifest), str(tmp_path / "last"))
    return Lent(made, owner, diff, tmp_path), copied.generation


@pytest.mark.parametrize("killed", [False, True])
def test_an_image_that_is_qcow2_is_made_anew(killed: bool, bench: DirBench, tmp_path: Path) -> None:
    it, generation = lent_qcow2(bench, tmp_path)
    made, layer, found = it.image, str(tmp_path / "layer"), of(bench).content(it.image)
    it.write("write -P 1 3M 4k", "write -z 0 64k")
    if killed:
        assert it.run(SEMISHARED_KILL_AT="5").returncode == -signal.SIGKILL
    done = it.commit()
    assert (done.how, done.generation, done.size) == ("whole", "", 8 * MiB)
    compare = ["qemu-img", "compare", "-q", "-f", "qcow2", "-F", "qcow2", made.source, layer]
    subprocess.run(compare, check=True, timeout=60)
    it.write("write -P 2 5M 4k")
    assert it.commit().how == "whole"
    subprocess.run(compare, check=True, timeout=60)
    data = tmp_path / "again"
    again = found.copy(found.see(), str(data), "qcow2")
    assert again.generation != generation


def scattered(it: Lent, chance: random.Random) -> Lent:
    """Have a guest write, zero and discard anything anywhere, over two layers, of which the last ends within
    a page.
    """
    for layer in (it, it.over(size=SIZE + 9 * MiB + 512)):
        end = SIZE if layer is it else SIZE + 9 * MiB + 512
        commands = []
        for _ in range(25):
            size = min(chance.choice([512, 4096, 65536, 300 << 10, MiB, 4 * MiB, 6 * MiB]), end)
            what = chance.choice(
                ["write -P 1", "write -P 77", "write -P 200", "write -P 0", "write -z", "discard"]
            )
            commands.append(f"{what} {chance.randrange(0, end - size + 1, 512)} {size}")
        layer.write(*commands, f"write -P 5 {end - 512} 512")
    return layer


@pytest.mark.parametrize("how", ["journal", "reflink", "network"])
def test_whatever_a_guest_wrote_comes(how: str, tmp_path: Path) -> None:
    """Memory is used for one extent after the other: nothing of one comes into the next; and the hash is that
    of what is there.
    """
    from store.benches import reflinking

    with ExitStack() as stack:
        top = tmp_path / "store"
        top.mkdir()
        if how == "reflink":
            top = stack.enter_context(reflinking(tmp_path))
        elif how == "network":  # no block device is below it, as below NFS
            subprocess.run(["mount", "-t", "tmpfs", "network", top], check=True)
            stack.callback(lambda: subprocess.run(["umount", tmp_path / "store"], check=True))
        bench = DirBench(top)
        it = scattered(lent(bench, tmp_path), random.Random(14))
        for done in (it.commit(), it._replace(diff=it.diff._replace(last="")).commit()):
            assert done.how == ("reflink" if how == "reflink" else "journal")
            is_content(bench, it, it.wanted(), done.generation)


def test_owner_and_mode_stay(bench: DirBench, tmp_path: Path) -> None:
    from store.benches import reflinking

    with reflinking(tmp_path) as top:
        cloning = DirBench(top)
        it = lent(cloning, tmp_path)
        os.chmod(it.image.source, 0o640)
        os.chown(it.image.source, 9869, 9869)
        assert it.commit().how == "reflink"
        found = os.stat(it.image.source)
        assert (found.st_mode & 0o777, found.st_uid, found.st_gid) == (0o640, 9869, 9869)


def test_zeros_are_written_where_the_file_system_makes_no_holes(tmp_path: Path) -> None:
    """As NFSv3; nor does a ramfs."""
    where, start, length = tmp_path / "plain", MiB - 100, 2 * MiB + 300
    where.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "plain", where], check=True)
    try:
        before = os.urandom(4 * MiB)
        (where / "image").write_bytes(before)
        with open(where / "image", "r+b", 0) as image, whole_pages.opened(image.fileno()) as file:
            assert redo.write(file, Part([(start, length, None)])) == length
        assert (where / "image").read_bytes() == before[:start] + bytes(length) + before[start + length :]
    finally:
        subprocess.run(["umount", where], check=True)
