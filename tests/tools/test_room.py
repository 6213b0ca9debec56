# SPDX-License-Identifier: Apache-2.0
"""Room on a host's disk: idle bases go for whatever needs it, leased ones never, and the disk is never driven
full in vain.

The host's own disk is a real file system that holds two bases and no third one; the store is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest

from semishared.base import room
from semishared.config import Config
from semishared.disk import epochs, vm_dir
from semishared.errors import HostFailed, NoSpace, SemisharedError
from semishared.front import questions
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.named import to_data
from semishared.plan.base import eviction
from semishared.tools import progress
from semishared.wire.session import Session
from tools.test_base_care import flip
from tools.test_host_transfer import carry
from tools.test_pool import Pool
from tools.world import MiB, World, allocated, qemu_io

DISK = 48 * MiB
IMAGE = 16 * MiB
Answer = Callable[[Dict[str, object]], object]
FLOOR = 0.05
"""What the site's configuration leaves free by default, as a share."""


class Host:
    """A machine whose datastores are on a disk of 48 MiB."""

    def __init__(self, world: World, front_end: str) -> None:
        self.world, self.front_end = world, front_end
        self.asked: list[dict[str, object]] = []

    @property
    def answer(self) -> Answer | None:
        """What answers this host, if anybody does."""
        front_end = self.front_end

        def answer(question: dict[str, object]) -> object:
            self.asked.append(question)
            return questions.answer(front_end, question, "h1", Config())

        return answer if front_end else None

    def on(self, *steps: s.Step) -> list[object]:
        """Carry out steps; what the host asks is answered as the front-end would, if it does."""
        with Session("localhost", "test", Config()) as session:
            return [to_data(one) for one in session.run(steps, answer=self.answer)]

    def image(self, number: int, size: int = IMAGE) -> s.ImageRef:
        """Make an image of random bytes, of which nobody knows the hashes."""
        path = self.world.store / f"image-{number}"
        path.write_bytes(os.urandom(size))
        return s.ImageRef(100, number, "raw", str(path))

    def known(self, number: int) -> s.ImageRef:
        """Make an image whose generation the store knows, as another host that has staged it has left it."""
        image = self.image(number)
        (staged,) = self.on(s.StageBase(str(self.world.root), image))
        assert isinstance(staged, dict)
        name = f"100-{number}-{staged['generation']}"
        assert self.on(base_steps.EvictBase(str(self.world.root), name))[0]["evicted"]  # type: ignore[index]
        return image._replace(generation=str(staged["generation"]))

    def fill(self) -> None:
        """Stage two bases that nobody uses, 1 before 2: there is no room for a third."""
        for number in (1, 2):
            self.on(s.StageBase(str(self.world.root), self.image(number)))
            os.utime(next(self.bases(number)) / "leases", (number, number))
        assert self.free() < IMAGE + FLOOR * DISK

    def bases(self, number: int) -> Iterator[Path]:
        return iter([path for path in self.world.bases() if path.name.startswith(f"100-{number}-")])

    def numbers(self) -> list[int]:
        return sorted(
            int(path.name.split("-")[1]) for path in self.world.bases() if (path / "image").exists()
        )

    def free(self) -> int:
        found = os.statvfs(self.world.location)
        return found.f_bavail * found.f_frsize

    def check_made(self, *numbers: int) -> None:
        """Assert which bases are there, and that the least was removed for it."""
        assert self.numbers() == list(numbers)
        assert self.free() >= 0.9 * FLOOR * DISK, "what has to stay free beside bases is not"


@pytest.fixture(params=["answered", "alone"])
def host(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A host with a front-end that answers, and one whose action has nobody to ask."""
    disk = tmp_path / "disk"
    disk.touch()
    os.truncate(disk, DISK)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-m", "0", "-N", "2000", "-O", "^has_journal", str(disk)], check=True
    )
    store = tmp_path / "store"
    store.mkdir()
    subprocess.run(["mount", "-o", "loop", str(disk), str(world.location)], check=True)
    try:
        world.store.mkdir()
        world.system.mkdir()
        subprocess.run(["mount", "--bind", str(store), str(world.store)], check=True)
        try:
            yield Host(world, str(tmp_path / "front-end") if request.param == "answered" else "")
        finally:
            subprocess.run(["umount", str(world.store)], check=True)
    finally:
        subprocess.run(["umount", str(world.location)], check=True)


def test_image_of_unknown_content_makes_room(host: Host) -> None:
    host.fill()
    host.on(s.StageBase(str(host.world.root), host.image(3)))
    host.check_made(2, 3)
    # As after each persistent session: known once, and then not any more.
    image = host.image(2)
    host.world.link(image, host.world.disk(9))
    host.world.on(s.EndSession(host.world.disk(9)))
    os.utime(next(host.bases(2)) / "leases", (1, 1))
    host.on(s.StageBase(str(host.world.root), image))
    assert host.numbers() == [2, 3] and len(host.world.bases()) == 2
    assert host.world.leftovers() == []


def test_image_of_known_content_makes_room(host: Host) -> None:
    image = host.known(3)
    host.fill()
    host.on(*host.world.cloning(image._replace(generation=""), host.world.disk()))
    host.check_made(2, 3)


@pytest.mark.fault(78, "what a host evicts by its own decision is in its answer, for the front-end's trail")
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_what_a_host_evicts_alone_is_in_its_answer(host: Host, is_known: bool) -> None:
    image = host.known(3) if is_known else host.image(3)
    host.fill()
    gone = next(host.bases(1)).name
    with Session("localhost", "test", Config()) as session:
        session.run([s.StageBase(str(host.world.root), image)], answer=host.answer)
        assert session.evicted == ([] if host.front_end else [gone])
        session.run([base_steps.ListBases(str(host.world.root))])
        assert session.evicted == ([] if host.front_end else [gone]), "each is said once"
    host.check_made(2, 3)


@pytest.mark.fault(78, "what a host evicts by its own decision is in its answer also if its step fails then")
def test_what_a_host_evicts_alone_is_said_of_a_step_that_fails(host: Host) -> None:
    host.fill()
    gone, image = next(host.bases(1)).name, host.image(3)
    with Session("localhost", "test", Config()) as session:
        with pytest.raises(SemisharedError):
            steps = (
                s.StageBase(str(host.world.root), image),
                s.StageBase(str(host.world.root), image._replace(source="/none")),
            )
            session.run(steps, answer=host.answer)
        assert session.evicted == ([] if host.front_end else [gone])


@pytest.mark.fault(78, "what a host evicts by its own decision is in its syslog")
def test_what_a_host_evicts_alone_is_in_its_syslog(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import syslog

    said: list[str] = []
    monkeypatch.setattr(syslog, "syslog", lambda _priority, line: said.append(line))
    monkeypatch.setattr(progress, "asked_by", "alice/commit")
    host.fill()
    gone = next(host.bases(1)).name
    vm = host.world.disk(5).vm_dir
    host.on(s.PrepareVm(5, vm))
    answer = host.answer

    def ask(**question: Any) -> Dict[str, Any]:
        assert answer
        found: Any = answer(question)
        return dict(found)

    room.for_disk(vm, IMAGE, ask if answer else None)
    assert host.numbers() == [2]
    rows = [json.loads(line) for line in said]
    assert [row["what"] for row in rows if row["who"].startswith("alice@")] == (
        [] if host.front_end else [f"base {gone} on {os.uname().nodename}, by itself"]
    )
    assert host.front_end or (rows[0]["did"], rows[0]["result"]) == ("evict", "ok")
    progress.evicted.clear()


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
def test_leased_bases_stay_and_nothing_is_written_in_vain(host: Host, is_known: bool) -> None:
    image = host.known(3) if is_known else host.image(3)
    for number in (1, 2):
        host.world.clone(host.image(number), host.world.disk(number))
    before = host.free()
    with pytest.raises(NoSpace, match="no space for a base of .* on "):
        host.on(s.StageBase(str(host.world.root), image))
    assert host.numbers() == [1, 2] and len(host.world.leases()) == 2
    assert host.free() >= before - MiB
    assert host.world.leftovers() == []
    for number in (1, 2):
        qemu_io(host.world.disk(number).path, "qcow2", "read 0 16M")


def test_what_a_killed_stage_has_left_is_not_in_its_own_way(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = host.known(3)
    for number in (1, 2):
        host.world.clone(host.image(number), host.world.disk(number))
    host.world.on(s.RemoveDisk(host.world.disk(1), ""))
    half_made = host.world.root / "staging" / "100-3" / "image"
    # While base 1 goes, when staging is made, and at last, by the run that goes on with that, when all is
    # copied.
    for kill_at in (1, 2, 3, 2):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(kill_at))
        with pytest.raises(HostFailed):
            host.on(s.StageBase(str(host.world.root), image))
    assert allocated(half_made) >= IMAGE
    monkeypatch.delenv("SEMISHARED_KILL_AT")
    assert host.free() < IMAGE, "it has its room already"
    host.on(s.StageBase(str(host.world.root), image))
    host.check_made(2, 3)
    assert host.world.leftovers() == []


def arriving(host: Host) -> tuple[str, str]:
    """Make VM 5 with an overlay over image 3, as it lies where the image's base is not; return it and where
    it goes.
    """
    disk, source = host.world.disk(), host.world.top / "elsewhere" / "101" / "5"
    host.world.clone(host.known(3), disk)
    qemu_io(disk.path, "qcow2", "write -P 0x31 2M 64k")
    source.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", "--sparse=always", disk.vm_dir, str(source)], check=True)
    host.world.on(s.RemoveVm(5, disk.vm_dir))
    for path in host.bases(3):
        assert host.on(base_steps.EvictBase(str(host.world.root), path.name))[0]["evicted"]  # type: ignore[index]
    host.fill()
    host.asked.clear()
    return str(source), disk.vm_dir


def here(host: Host, source: str) -> str:
    """Bring a VM directory from elsewhere to another datastore of this machine."""
    away = host.world.location / "103" / "5"
    away.parent.mkdir()
    subprocess.run(["cp", "-a", "--sparse=always", source, str(away)], check=True)
    return str(away)


def test_vm_that_arrives_makes_room_for_its_base(host: Host) -> None:
    source, target = arriving(host)
    carry(source, target, 5, answer=host.answer)
    host.check_made(2, 3)
    assert [name for name in host.world.leases() if name.startswith("100-3-")]
    qemu_io(f"{target}/disk.1", "qcow2", "read -P 0x31 2M 64k", "read 3M 13M")


def test_vm_that_resumes_makes_room_for_its_base(host: Host) -> None:
    source, target = arriving(host)
    host.on(s.RenameVm(5, here(host, source), target, True, ""))
    host.check_made(2, 3)
    qemu_io(f"{target}/disk.1", "qcow2", "read 3M 13M")


def test_vm_that_arrives_is_not_refused_for_the_floor_alone(host: Host) -> None:
    source, target = arriving(host)
    for number in (1, 2):
        disk = host.world.disk(number)
        base = next(host.bases(number)).name.split("-")[2]
        image = s.ImageRef(100, number, "raw", str(host.world.store / f"image-{number}"), base)
        host.world.on(*host.world.cloning(image, disk))
    with pytest.raises(NoSpace):
        carry(source, target, 5, answer=host.answer, arrived=False)
    assert host.numbers() == [1, 2] and os.path.isdir(source)
    host.world.on(s.RemoveVm(1, host.world.disk(1).vm_dir))
    # With base 1 gone there is room, but not for all that is to stay free.
    filler = Path(host.world.location) / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, host.free() - 2 * MiB)
    carry(source, target, 5, answer=host.answer)
    assert host.numbers() == [2, 3]
    qemu_io(f"{target}/disk.1", "qcow2", "read 3M 13M")


def test_disk_that_is_saved_where_it_is_not_at_home_borrows_its_base_and_makes_room(host: Host) -> None:
    source, target = arriving(host)
    host.world.on(s.RenameVm(5, here(host, source), target, False, ""))
    assert host.numbers() == [1, 2], "a VM at rest needs no base"
    saved = host.world.store / "saved"
    host.on(s.SaveDisk(host.world.disk(), str(saved), "raw", ""))
    assert saved.stat().st_size == IMAGE
    qemu_io(saved, "raw", "read -P 0x31 2M 64k")
    assert host.numbers() == [2] and host.world.leases() == [], "what was borrowed is given back"


def test_base_that_is_mended_makes_room(host: Host) -> None:
    image = host.image(3)
    host.on(*host.world.cloning(image, host.world.disk()))
    (base,) = host.bases(3)
    host.on(s.StageBase(str(host.world.root), host.image(1)))
    flip(base / "image", 3 * MiB)
    (found,) = host.on(base_steps.VerifyBase(str(host.world.root), base.name, 0))
    assert found["damaged"]  # type: ignore[index]
    (mended,) = host.on(
        base_steps.MendBase(str(host.world.root), image._replace(generation=base.name.split("-")[2]))
    )
    assert mended == {"relinked": ["5-1"]}
    host.check_made(3)
    qemu_io(host.world.disk().path, "qcow2", "read 0 16M")


def test_full_copy_makes_room(host: Host) -> None:
    host.fill()
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(3), 0))
    host.check_made(2)
    assert allocated(os.path.realpath(disk.path)) >= IMAGE
    other = host.world.disk(6)
    host.on(s.PrepareVm(6, other.vm_dir), s.CopyImage(other, host.image(4, 14 * MiB), 0))
    assert host.numbers() == []


def test_guests_disks_may_have_what_bases_must_leave_free(host: Host) -> None:
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(3, 45 * MiB), 0))
    assert host.free() < FLOOR * DISK


@pytest.mark.parametrize(
    ("format", "fs"), [("raw", "ext4"), ("qcow2", "ext4"), ("qcow2", ""), ("raw", "swap")]
)
def test_volatile_disk_makes_room(host: Host, format: str, fs: str) -> None:
    host.fill()
    filler = Path(host.world.location) / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, host.free() - MiB // 2)
    with filler.open("ab", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CreateVolatile(disk, 128 * MiB, format, fs))
    host.check_made(2)


def test_volatile_disk_with_room_asks_nobody(host: Host) -> None:
    host.on(s.StageBase(str(host.world.root), host.image(1)))
    host.asked.clear()
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CreateVolatile(disk, 128 * MiB, "raw", ""))
    assert host.asked == [] and host.numbers() == [1]


def test_disks_on_another_file_system_leave_bases_alone(host: Host) -> None:
    host.fill()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", str(host.world.system)], check=True
    )
    try:
        disk = host.world.disk()
        with pytest.raises(NoSpace):
            host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(3), 0))
        assert host.numbers() == [1, 2], "no byte of theirs is of use there"
    finally:
        subprocess.run(["umount", str(host.world.system)], check=True)


# -- what arrives, and what is written beside a guest's disks ---------------------------------------


def elsewhere(host: Host, size: int) -> str:
    """Make VM 5 with a full copy of an image of `size` bytes, as it lies on another machine's disk; return
    where.
    """
    disk, source = host.world.disk(), host.world.top / "elsewhere" / "101" / "5"
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(9, size), 0))
    source.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", "--sparse=always", disk.vm_dir, str(source)], check=True)
    host.world.on(s.RemoveVm(5, disk.vm_dir))
    return str(source)


def make_room(host: Host, source: str, target: str) -> dict[str, object]:
    """Ask the target of a move for room, as plan/vm/moves.py does; return what the source says of the
    directory.
    """
    (found,) = host.on(s.LookAtVm(5, source))
    assert isinstance(found, dict)
    host.on(s.MakeRoom(5, target, found["bytes"], tuple(found["bases"])))
    return found


def test_vm_that_arrives_makes_room_for_its_disks(host: Host) -> None:
    source, target = elsewhere(host, IMAGE), host.world.disk().vm_dir
    host.fill()
    host.asked.clear()
    found = make_room(host, source, target)
    assert IMAGE <= found["bytes"] < IMAGE + MiB and found["bases"] == []  # type: ignore[operator]
    assert [question["question"] for question in host.asked] == (["room"] if host.front_end else [])
    assert host.numbers() == [2]
    carry(source, target, 5, answer=host.answer)
    assert host.free() >= FLOOR * DISK
    qemu_io(f"{target}/disk.1", "raw", "read 0 16M")


def test_vm_that_does_not_fit_is_refused_before_it_is_sent(host: Host) -> None:
    source, target = elsewhere(host, 24 * MiB), host.world.disk().vm_dir
    for number in (1, 2):
        host.world.clone(host.image(number), host.world.disk(number))
    free = host.free()
    with pytest.raises(NoSpace, match=r"^no space for 24.* in .*/101/5 on .*: .* are missing$"):
        make_room(host, source, target)
    assert host.numbers() == [1, 2] and host.free() >= free - MiB
    assert not os.path.exists(target) and os.path.isdir(source) and host.world.leftovers() == []


@pytest.mark.parametrize("size", [IMAGE, 32 * MiB], ids=["another is enough", "all others are not enough"])
def test_bases_of_the_vm_that_arrives_stay(host: Host, size: int) -> None:
    source, target = elsewhere(host, size), host.world.disk().vm_dir
    host.fill()
    (found,) = host.on(s.LookAtVm(5, source))
    own = next(host.bases(1)).name
    step = s.MakeRoom(5, target, found["bytes"], (own,))  # type: ignore[index]
    if size == IMAGE:
        host.on(step)
    else:
        assert host.free() + IMAGE < size < host.free() + 2 * IMAGE
        with pytest.raises(NoSpace, match=r"^no space for .* in .*/101/5 on "):
            host.on(step)
    assert host.numbers() == [1], "1 was the least recently used"


def test_vm_that_changes_its_datastore_keeps_its_base_where_the_copy_does_not_fit(host: Host) -> None:
    source, target = arriving(host)
    for number in (1, 2):
        host.on(base_steps.EvictBase(str(host.world.root), next(host.bases(number)).name))
    host.on(s.StageBase(str(host.world.root), s.ImageRef(100, 3, "raw", str(host.world.store / "image-3"))))
    away = here(host, source)
    with (Path(host.world.location) / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, host.free() - (64 << 10))
    with pytest.raises(NoSpace):
        host.on(s.RenameVm(5, away, target, True, ""))
    assert host.numbers() == [3] and os.path.isdir(away)


def test_what_is_set_aside_for_a_file_and_its_second_name_are_not_counted(host: Host) -> None:
    directory = host.world.top / "elsewhere" / "101" / "5"
    directory.mkdir(parents=True)
    with (directory / "disk.0").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MiB)
        file.write(os.urandom(MiB))
    os.link(directory / "disk.0", directory / "disk.0.second")
    (found,) = host.on(s.LookAtVm(5, str(directory)))
    assert MiB <= found["bytes"] < 2 * MiB  # type: ignore[index]


def backed_up(host: Host, disk: s.DiskRef) -> Path:
    """Back a disk up; return the copy."""
    directory = f"{disk.vm_dir}/backup"
    host.on(s.BackUp(disk.vm, disk.vm_dir, directory, (str(disk.disk),), "", "NONE", "eA=="))
    return Path(directory) / f"disk.{disk.disk}.0"


def test_backup_makes_room_for_its_copies(host: Host) -> None:
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(9, 12 * MiB), 0))
    for number in (1, 2):
        host.on(s.StageBase(str(host.world.root), host.image(number, 12 * MiB)))
        os.utime(next(host.bases(number)) / "leases", (number, number))
    assert host.free() < 12 * MiB
    copy = backed_up(host, disk)
    assert host.numbers() == [2] and allocated(copy) >= 12 * MiB


def test_backup_that_does_not_fit_is_refused_before_it_begins(host: Host) -> None:
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(9, 24 * MiB), 0))
    host.world.clone(host.image(1, 4 * MiB), host.world.disk(1))
    free = host.free()
    with pytest.raises(NoSpace, match=r"^no space for 2.* in .*/101/5 on .*: .* are missing$"):
        backed_up(host, disk)
    assert host.numbers() == [1] and host.free() >= free - MiB and not os.path.exists(f"{disk.vm_dir}/backup")
    assert host.world.leftovers() == []


def restored(host: Host, disk: s.DiskRef, backup: bytes) -> None:
    """Have a disk restored from the bytes of a backup."""
    chunks = [backup[at : at + MiB] for at in range(0, len(backup), MiB)]
    with Session("localhost", "restore", Config()) as session:
        session.run([s.RestoreDisk(disk, 0)], chunks, hashlib.sha256(backup).hexdigest(), answer=host.answer)


def test_restore_makes_room_for_what_arrives_and_for_the_new_content(host: Host) -> None:
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(9, 9 * MiB), 0))
    copy = backed_up(host, disk)
    backup = copy.read_bytes()
    host.on(s.EndBackup(5, disk.vm_dir, str(copy.parent), ""))
    qemu_io(os.path.realpath(disk.path), "raw", "write -P 0x31 2M 64k")
    for number in (1, 2):
        host.on(s.StageBase(str(host.world.root), host.image(number, 15 * MiB)))
        os.utime(next(host.bases(number)) / "leases", (number, number))
    assert host.free() < 9 * MiB
    restored(host, disk, backup)
    assert host.numbers() in ([2], []), "twice the disk is more than one base"
    assert Path(os.path.realpath(disk.path)).read_bytes() == (host.world.store / "image-9").read_bytes()
    assert host.world.leftovers() == []


def test_restore_that_does_not_fit_leaves_disk_and_space_alone(host: Host) -> None:
    disk = host.world.disk()
    host.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, host.image(9, 20 * MiB), 0))
    content = Path(os.path.realpath(disk.path)).read_bytes()
    made = host.world.store / "backup"
    subprocess.run(
        ["qemu-img", "convert", "-O", "qcow2", str(host.image(8, 20 * MiB).source), str(made)], check=True
    )
    free = host.free()
    with pytest.raises(NoSpace, match="are missing"):
        restored(host, disk, made.read_bytes())
    assert Path(os.path.realpath(disk.path)).read_bytes() == content
    assert host.free() >= free - MiB and host.world.leftovers() == []


# -- several devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "alone"])
def test_what_all_bases_may_take_they_may_on_all_devices_together(
    world: World, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    host, config = Host(world, str(tmp_path / "front-end")), Config(bases_size_limit="40M")
    monkeypatch.setattr(room, "_limits", lambda listed: eviction.limits_of(None, "40M", "5%", listed))

    def stage(number: int) -> None:
        image = host.image(number)
        ask = (lambda **asked: questions.answer(host.front_end, asked, "h1", config)) if is_answered else None
        room.for_base(str(world.root), image, IMAGE, ask, room.FOR_ALL)
        host.world.on(s.StageBase(str(world.root), image))
        os.utime(next(host.bases(number)) / "leases", (number, number))

    pool.set(str(pool.paths[0]))
    stage(1)
    stage(2)
    # From now on bases come to another device, where there is room for all three.
    pool.set(str(pool.paths[2]))
    stage(3)
    assert host.numbers() == [2, 3]
    listed = room.list_bases(str(world.root))
    assert len({base.device for base in listed.bases}) == 2
    limits = eviction.limits_of(None, "40M", "5%", listed)
    assert eviction.choose(listed.bases, limits, listed.free) == [], "base prune has nothing to remove"
    with pytest.raises(NoSpace, match="over its size limit"):
        room.for_base(str(world.root), host.image(4), 41 * MiB, None, room.FOR_ALL)


def test_disk_whose_removal_cannot_be_noted_is_not_called_removed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late action would make it anew. oned asks again, and what filled the device has gone by then."""
    disk, noted = world.disk(), []
    world.clone(world.image(), disk)
    note = epochs.note_deletion

    def full(*words: Any) -> None:
        noted.append(os.path.exists(disk.path))
        if len(noted) < 3:
            raise NoSpace("no space left")
        note(*words)

    monkeypatch.setattr(epochs, "note_deletion", full)
    with pytest.raises(NoSpace):
        vm_dir.remove_disk(disk, epochs.arrived(-1, [], {}))
    vm_dir.remove_disk(disk, epochs.arrived(-1, [], {}))
    assert noted == [True, False, False]
