# SPDX-License-Identifier: Apache-2.0
"""Disks and bases go from device to device: file systems of their own, the real host side, killed wherever it
can be.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from semishared.config import Config
from semishared.errors import BadPool, SemisharedError
from semishared.model import steps as s
from semishared.model.base.steps import EvictBase
from semishared.model.device import steps as device_steps
from semishared.model.disk.commit_steps import CreateDiff
from semishared.model.leftover_steps import Discard, LookAround
from semishared.tools import qemu_img
from semishared.wire.session import Session
from tools.test_pool import Pool, carry, check_content, device_of, of_its_own, prepared
from tools.world import MiB, World, qemu_io


@pytest.fixture
def pool(pool: Pool) -> Pool:
    pool.set()
    return pool


def of_disk(world: World, vm: int, disk: int) -> device_steps.HeldItem:
    with Session("localhost", "pool", Config()) as session:
        held = session.ask(device_steps.ListHeld(str(world.root))).items
    (found,) = [item for item in held if (item.vm, item.disk) == (vm, disk)]
    return found


def uuid_of(pool: Pool, path: object) -> str:
    return str(pool.rows()[str(path)]["uuid"])


def elsewhere(pool: Pool, path: object) -> tuple[Path, str]:
    """Return another device than that on which a path ends, and its UUID."""
    other = next(device for device in reversed(pool.paths) if str(device) != device_of(path))
    return other, uuid_of(pool, other)


def move_disk(
    world: World, target: str, vm: int = 5, disk: int = 1, *, why: str = "", rate: int = 0
) -> device_steps.Moved:
    """Move the layers of a disk to a device; oned has the VM as it was, or `why` it has not."""
    item = of_disk(world, vm, disk)
    step = device_steps.MoveLayers(s.DiskRef(vm, disk, item.vm_dir), "", item.name, target, rate)
    with Session("localhost", "pool", Config()) as session:
        return session.ask(
            step, answer=lambda question: {"why": why if question["question"] == "vm" else "?"}
        )


def move_base(world: World, target: str, number: int = 0) -> device_steps.MovedBase:
    with Session("localhost", "pool", Config()) as session:
        return session.ask(device_steps.MoveBase(str(world.root), world.bases()[number].name, target, 0))


# -- disks ------------------------------------------------------------------------------------------


def test_layers_go_to_another_device_whole_and_their_paths_stay(world: World, pool: Pool) -> None:
    directory, _ = prepared(world)
    os.link(f"{directory}/disk.1.snap/0", f"{directory}/disk.1.snap/7")
    before = {name: os.stat(f"{directory}/disk.1.snap/{name}") for name in ("0", "1", "7")}
    record = Path(directory, ".semishared/disk.1.json").read_bytes()
    other, target = elsewhere(pool, f"{directory}/disk.1.snap")
    answer = move_disk(world, target)
    assert (answer.error, answer.bytes > 0) == ("", True)
    assert device_of(f"{directory}/disk.1.snap") == str(other)
    check_content(directory)
    after = {name: os.stat(f"{directory}/disk.1.snap/{name}") for name in ("0", "1", "7")}
    assert after["0"].st_ino == after["7"].st_ino != after["1"].st_ino
    for name, found in after.items():
        assert (found.st_mode, found.st_size, found.st_mtime_ns) == (
            before[name].st_mode,
            before[name].st_size,
            before[name].st_mtime_ns,
        )
        assert found.st_blocks * 512 < MiB, "holes stay holes"
    assert Path(directory, ".semishared/disk.1.json").read_bytes() == record
    assert len(pool.layers()) == 3 and not pool.leftovers()
    again = device_steps.MoveLayers(s.DiskRef(5, 1, directory), "", "5-1-0123456789ab", target, 0)
    (refused,) = world.on(again)
    assert isinstance(refused, dict) and refused["id"] == "SS164", (
        "what was planned of another place is not done"
    )


def test_a_volatile_disk_goes_too(world: World, pool: Pool) -> None:
    directory, _ = prepared(world)
    Path(f"{directory}/disk.2").write_bytes(b"v" * MiB)
    other, target = elsewhere(pool, f"{directory}/disk.2.snap")
    assert move_disk(world, target, disk=2).error == ""
    assert (
        device_of(f"{directory}/disk.2.snap") == str(other)
        and Path(f"{directory}/disk.2").read_bytes() == b"v" * MiB
    )
    assert len(pool.layers()) == 3 and not pool.leftovers()


def test_a_disk_stays_when_oned_has_its_vm_do_something_else(world: World, pool: Pool) -> None:
    directory, _ = prepared(world)
    was = os.readlink(f"{directory}/disk.1.snap")
    _, target = elsewhere(pool, f"{directory}/disk.1.snap")
    answer = move_disk(world, target, why="something is under way in it (LCM state 40)")
    assert answer.id == "SS164" and "LCM state 40" in answer.error
    assert os.readlink(f"{directory}/disk.1.snap") == was and len(pool.layers()) == 3


def test_a_disk_that_is_written_to_while_it_is_copied_stays_where_it_was(world: World, pool: Pool) -> None:
    """A restore publishes into the layers and asks nobody at work on the disks."""
    directory, _ = prepared(world)
    was = os.readlink(f"{directory}/disk.1.snap")
    _, target = elsewhere(pool, f"{directory}/disk.1.snap")
    held = of_disk(world, 5, 1)
    with Session("localhost", "pool", Config()) as session:
        session.begin(
            [device_steps.MoveLayers(s.DiskRef(5, 1, directory), "", held.name, target, 1 << 20)],
            answers=True,
        )
        assert session.read() == {"event": "ask", "question": "vm", "vm": 5}
        session.send(answer={})
        while len(pool.layers()) < 4:
            pass
        qemu_io(f"{directory}/disk.1.snap/1", "qcow2", "write -P 0x55 9M 64k")
        (answer,) = session.finish()
    assert "was changed while it was copied" in answer.error
    assert os.readlink(f"{directory}/disk.1.snap") == was and len(pool.layers()) == 3
    qemu_io(f"{directory}/disk.1.snap/1", "qcow2", "read -P 0x55 9M 64k")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_disk_that_a_guest_has_open_stays_though_oned_has_its_vm_off(
    world: World, pool: Pool, when: str
) -> None:
    """One that is idle changes nothing while its disk is copied: only QEMU's locks tell of it."""
    directory, _ = prepared(world)
    was = os.readlink(f"{directory}/disk.1.snap")
    held, (_, target) = of_disk(world, 5, 1), elsewhere(pool, f"{directory}/disk.1.snap")
    opening = ["qemu-io", "-f", "qcow2", f"{directory}/disk.1.snap/1"]
    with contextlib.ExitStack() as opened, Session("localhost", "pool", Config()) as session:

        def open_it() -> subprocess.Popen[bytes]:
            guest = opened.enter_context(
                subprocess.Popen(opening, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            assert guest.stdin and guest.stdout
            guest.stdin.write(b"read 0 512\n")
            guest.stdin.flush()
            assert b"read 512" in guest.stdout.readline()
            return guest

        guest = open_it() if when == "before" else None
        # Some seconds for what is copied in the second case.
        session.begin(
            [device_steps.MoveLayers(s.DiskRef(5, 1, directory), "", held.name, target, 8 << 20)],
            answers=True,
        )
        session.read()
        session.send(answer={"why": "", "is_off": True})
        while guest is None and len(pool.layers()) < 4:
            pass
        guest = guest or open_it()
        (answer,) = session.finish()
        guest.communicate(b"write -P 0x77 10M 64k\nflush\n")
    assert answer.id == "SS164" and "has disk 1 of VM 5 open, which is to be off" in answer.error
    assert os.readlink(f"{directory}/disk.1.snap") == was and len(pool.layers()) == 3
    qemu_io(f"{directory}/disk.1.snap/1", "qcow2", "read -P 0x77 10M 64k")
    assert move_disk(world, target).error == ""


@pytest.mark.parametrize("what", ["delete", "move", "datastore", "resize"])
def test_what_oned_begins_ends_a_move_and_is_done(world: World, pool: Pool, what: str) -> None:
    directory, elsewhere_dir = prepared(world)
    held, (_, target) = of_disk(world, 5, 1), elsewhere(pool, f"{directory}/disk.1.snap")
    with Session("localhost", "pool", Config()) as session:
        session.begin(
            [device_steps.MoveLayers(s.DiskRef(5, 1, directory), "", held.name, target, 8 << 10)],
            answers=True,
        )
        session.read()
        session.send(answer={})
        while len(pool.layers()) < 4:
            pass
        if what == "delete":
            world.on(s.RemoveVm(5, directory))
        elif what == "move":
            carry(directory, elsewhere_dir, 5, (0, 1, 2, 3))
        elif what == "datastore":
            (found,) = world.on(s.RenameVm(5, directory, elsewhere_dir, True, "", (0, 1, 2, 3)))
            assert isinstance(found, dict)
            assert world.on(s.ReleaseVm(5, directory, "", found["seen"])) == [{"kept": ""}]
        else:
            world.on(s.GrowDisk(world.disk(5, 1), 80 * MiB))
        with pytest.raises(SemisharedError):
            session.finish()
    if what == "resize":
        check_content(directory)
        assert qemu_img.virtual_size(f"{directory}/disk.1", "qcow2") == 80 * MiB
        world.on(s.RemoveVm(5, directory))
    if what in ("move", "datastore"):
        check_content(elsewhere_dir)
        assert move_disk(world, target).error == ""
        check_content(elsewhere_dir)
    assert not os.path.exists(directory)
    (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(seen, dict)
    for item in seen["unlinked"]:
        world.on(Discard("unlinked", item["path"], str(world.location), item["vm"], item["seen"]))
    assert len(pool.layers()) == (3 if what in ("move", "datastore") else 0)


def test_a_kept_diff_goes_too(world: World, pool: Pool) -> None:
    image, disk = world.image(), world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, image, 0, ""))
    qemu_io(f"{disk.path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
    world.on(s.RemoveVm(5, disk.vm_dir))
    (kept,) = world.system.glob(".kept-5-*")
    other, target = elsewhere(pool, f"{kept}/disk.1.snap")
    assert move_disk(world, target, why="OpenNebula has no VM 5").error == ""
    assert device_of(f"{kept}/disk.1.snap") == str(other)
    qemu_io(f"{kept}/disk.1.snap/0", "qcow2", "read -P 0x77 2M 64k")


def test_what_has_no_room_stays(world: World, pool: Pool) -> None:
    directory, _ = prepared(world)
    full, target = elsewhere(pool, f"{directory}/disk.1.snap")
    subprocess.run(
        ["fallocate", "-l", str(os.statvfs(full).f_bavail * 4096 - 65536), str(full / "full")], check=True
    )
    answer = move_disk(world, target)
    assert answer.id == "SS031" or "no space" in answer.error.lower()
    check_content(directory)
    assert len(pool.layers()) == 3


# -- bases ------------------------------------------------------------------------------------------


def test_a_base_goes_to_another_device_with_its_leases(world: World, pool: Pool) -> None:
    world.clone(world.image(), world.disk())
    world.clone(world.image(), world.disk(6))
    (base,) = world.bases()
    other, target = elsewhere(pool, base)
    was = Path(os.path.realpath(base))
    with open(base / "leases" / "5-1", "rb") as opened:
        answer = move_base(world, target)
        assert (answer.error, answer.leases) == ("", ("5-1", "6-1"))
        assert os.pread(opened.fileno(), 1, MiB) == b"\xa1", "who has it open reads on"
    assert device_of(base) == str(other) and not was.exists()
    assert (
        len({os.stat(path).st_ino for path in (base / "image", base / "leases/5-1", base / "leases/6-1")})
        == 1
    )
    for vm in (5, 6):
        qemu_io(world.disk(vm).path, "qcow2", "read -P 0xa1 1M 64k")
    world.clone(world.image(), world.disk(7))
    assert len(world.leases()) == 3 and len(world.bases()) == 1 and not pool.leftovers()
    assert move_base(world, target).bytes == 0, "it is there already"


def test_a_base_that_is_not_what_its_manifest_says_is_not_moved(world: World, pool: Pool) -> None:
    world.clone(world.image(), world.disk())
    (base,) = world.bases()
    was, (_, target) = os.readlink(base), elsewhere(pool, base)
    with open(base / "image", "r+b") as file:
        file.seek(MiB)
        file.write(b"rotten")
    answer = move_base(world, target)
    assert answer.id == "SS164" and "semishared base verify" in answer.error
    assert os.readlink(base) == was and not pool.leftovers()


def test_a_base_without_leases_goes_and_can_be_evicted_there(world: World, pool: Pool) -> None:
    world.clone(world.image(), world.disk())
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    (base,) = world.bases()
    assert move_base(world, elsewhere(pool, base)[1]).error == ""
    world.on(EvictBase(str(world.root), base.name))
    assert not world.bases() and not pool.leftovers()


# -- devices ----------------------------------------------------------------------------------------


def test_a_drained_device_takes_nothing_until_it_is_added_again(world: World, pool: Pool) -> None:
    first = pool.paths[0]
    uuid = uuid_of(pool, first)
    world.on(device_steps.CloseDevice(str(world.root), uuid))
    assert json.loads((world.root / "devices" / f"{uuid}.json").read_text())["weight"] == 0, "a fact on disk"
    for number in range(8):
        world.clone(world.image(), world.disk(6, number))
        assert device_of(f"{world.disk(6, number).path}.snap") != str(first)
    assert pool.rows()[str(first)]["weight"] == 0
    answer = move_disk(world, uuid_of(pool, first), 6, 0)
    assert "takes nothing" in answer.error
    pool.set()
    assert pool.rows()[str(first)]["weight"] == 1
    assert move_disk(world, uuid_of(pool, first), 6, 0).error == ""


def test_the_last_device_that_takes_anything_is_not_drained(world: World, pool: Pool) -> None:
    for path in pool.paths[:2]:
        world.on(device_steps.CloseDevice(str(world.root), uuid_of(pool, path)))
    with pytest.raises(BadPool, match="no other device"):
        world.on(device_steps.CloseDevice(str(world.root), uuid_of(pool, pool.paths[2])))
    assert pool.rows()[str(pool.paths[2])]["weight"] == 1


def test_two_that_move_in_one_pool_are_not_at_work_together(world: World, pool: Pool) -> None:
    directory, _ = prepared(world)
    held, (_, target) = of_disk(world, 5, 1), elsewhere(pool, f"{directory}/disk.1.snap")
    with Session("localhost", "pool", Config()) as session:
        session.begin(
            [device_steps.MoveLayers(s.DiskRef(5, 1, directory), "", held.name, target, 0)], answers=True
        )
        session.read()  # it asks, and waits
        assert move_disk(world, target, 5, 3).id == "SS163"
        (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
        assert isinstance(seen, dict) and seen["unlinked"] == []
        session.send(answer={})
        (answer,) = session.finish()
    assert answer.error == ""
    assert move_disk(world, elsewhere(pool, f"{directory}/disk.3.snap")[1], 5, 3).error == ""


# -- killed at every point ----------------------------------------------------------------------------


def disk_of(world: World, number: int) -> Path:
    return Path(f"{world.disk(number).path}.snap")


def base_of(world: World, number: int) -> Path:
    return next(base for base in world.bases() if base.name.startswith(f"100-{number}-"))


def act(world: World, pool: Pool, what: str, number: int, target: str) -> None:
    if what == "disk":
        move_disk(world, target, number)
    else:
        world.on(device_steps.MoveBase(str(world.root), base_of(world, number).name, target, 0))


@pytest.mark.parametrize("what", ["disk", "base"])
def test_killed_at_every_point_and_done_again(
    world: World, pool: Pool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, killed, number = world.top / "trace", [], 100
    while True:
        number += 1
        world.clone(of_its_own(world, number), world.disk(number))
        path = disk_of(world, number) if what == "disk" else base_of(world, number)
        other, target = elsewhere(pool, path)
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number - 100))
        monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
        trace.write_text("")
        died = False
        try:
            act(world, pool, what, number, target)
        except SemisharedError:
            died = True
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        monkeypatch.delenv("SEMISHARED_TRACE")
        name = trace.read_text().splitlines()[-1].split(" ", 1)[1]
        qemu_io(world.disk(number).path, "qcow2", f"read -P {number % 251} 1M 64k")
        if number % 2 == 0:
            # gc comes first, with nobody at work.
            (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
            assert isinstance(seen, dict)
            for item in seen["unlinked"]:
                assert item["vm"] == -1 or item["replaced"], f"killed at {name}"
                world.on(Discard("unlinked", item["path"], str(world.location), item["vm"], item["seen"]))
        if device_of(path) != str(other):
            act(world, pool, what, number, target)
        assert device_of(path) == str(other), f"killed at {name}"
        qemu_io(world.disk(number).path, "qcow2", f"read -P {number % 251} 1M 64k")
        if not died:
            break
        killed.append(name)
        (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
        assert isinstance(seen, dict)
        for item in seen["unlinked"]:
            assert name.startswith("published") or "switched" in name or "gone from" in name, (
                f"killed at {name}: the old place"
            )
            world.on(Discard("unlinked", item["path"], str(world.location), item["vm"], item["seen"]))
        world.on(
            s.RemoveVm(number, world.disk(number).vm_dir),
            EvictBase(str(world.root), base_of(world, number).name),
        )
        assert pool.leftovers() == [] and pool.layers() == []
        assert not [found for device in pool.paths for found in device.glob(".semishared/[bs]*/*")], (
            f"killed at {name}"
        )
    own = {
        "layers being copied",
        "file copied",
        "layers copied",
        "layers switched",
        "layers gone from their old device",
    }
    if what == "base":
        own = {
            "base being copied",
            "file copied",
            "base copied to its new device",
            "base renamed on its new device",
            "leases taken along",
            "base switched",
            "base gone from its old device",
        }
    assert own <= set(killed), killed
