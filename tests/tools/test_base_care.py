# SPDX-License-Identifier: Apache-2.0
"""Bases at rest: listed, verified against what is on the disk, taken out of use and mended, evicted but never
under a lease.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from semishared.base import cache, room
from semishared.errors import BadArguments, ImageChanged, MissingImage
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.stage import fetch_from_sources, rotten
from semishared.stage.ensure import ensure
from semishared.tools import extents, files, locks
from tools.world import MiB, World, qemu_io

IMAGE = 64 * MiB


def root(world: World) -> str:
    return str(world.root)


def listed(world: World) -> list[dict[str, Any]]:
    (found,) = world.on(base_steps.ListBases(root(world)))
    assert isinstance(found, dict) and found["total"] >= found["free"] > 0
    return list(found["bases"])


def verify(world: World, name: str, rate: int = 0, only: tuple[int, ...] = ()) -> dict[str, Any]:
    (found,) = world.on(base_steps.VerifyBase(root(world), name, rate, only))
    assert isinstance(found, dict)
    return found


def evict(world: World, name: str) -> bool:
    (found,) = world.on(base_steps.EvictBase(root(world), name))
    assert isinstance(found, dict)
    return bool(found["evicted"])


def flip(path: Path, at: int) -> None:
    """Change one bit at rest, as a failing disk does: neither size nor time change."""
    stat = path.stat()
    path.chmod(0o640)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o440)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_list_tells_size_leases_and_use(world: World) -> None:
    assert listed(world) == []
    image = world.image()
    world.on(s.StageBase(root(world), image))
    (base,) = listed(world)
    assert base["name"] == world.bases()[0].name
    assert base["size"] == IMAGE and 128 << 10 <= base["bytes"] < 1 * MiB
    assert (base["leases"], base["damaged"]) == ([], False)
    world.clone(image, world.disk(5))
    (after,) = listed(world)
    assert after["leases"] == ["5-1"] and after["used"] > base["used"]
    (world.root / "bases" / "of-the-operator").mkdir()
    assert len(listed(world)) == 1


def test_eviction_spares_leased_bases_and_takes_the_others_whole(world: World) -> None:
    image = world.image()
    top = world.clone(image, world.disk())
    (base,) = world.bases()
    assert not evict(world, base.name)
    assert (base / "image").exists(), "a leased base stays where it is"
    qemu_io(top, "qcow2", "read -P 0xa1 1M 64k")
    world.on(s.RemoveDisk(world.disk(), ""))
    assert evict(world, base.name)
    assert world.bases() == []
    assert evict(world, base.name), "what is not there is evicted"


def test_a_base_that_somebody_is_about_to_use_stays_and_makes_no_room(world: World) -> None:
    base = ensure(root(world), world.image(), None).base
    name = os.path.basename(base.directory)
    with locks.exclusive(cache.lock_path(root(world), base)):
        assert room.evict(root(world), name) == base_steps.EvictedBase(False, 0)
        assert cache.is_published(base)
    gone = room.evict(root(world), name)
    assert gone.evicted and gone.bytes


@pytest.mark.parametrize("name", ["", "x", "../100-7", f"100-7-{'0' * 32}/..", f"100-7-{'0' * 31}"])
def test_only_bases_can_be_named(world: World, name: str) -> None:
    for step in (base_steps.EvictBase(root(world), name), base_steps.VerifyBase(root(world), name, 0)):
        with pytest.raises(BadArguments):
            world.on(step)


def test_lease_taken_while_its_base_is_being_evicted_brings_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.image()
    base = ensure(root(world), image, None).base
    real = files.unlink

    def unlink(path: str) -> bool:
        # The moment between the look at the leases and the first effect.
        if path == base.image:
            ensure(root(world), image, None, (5, 1))
        return real(path)

    monkeypatch.setattr(files, "unlink", unlink)
    assert not cache.forget(base)
    assert os.path.samefile(base.image, base.lease(5, 1))


def test_clone_that_comes_to_an_evicted_base_waits_and_stages_it_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.image()
    base = ensure(root(world), image, None).base
    leased: list[str] = []
    clone = threading.Thread(target=lambda: leased.append(ensure(root(world), image, None, (5, 1))[1]))
    seen = []

    def point(name: str) -> None:
        seen.append(name)
        if name == "base unlinked":
            clone.start()
            clone.join(0.3)
            assert not leased, "a base that is being evicted gives no lease"

    for module in (cache, fetch_from_sources):
        monkeypatch.setattr(module, "point", point)
    assert room.evict(root(world), os.path.basename(base.directory)).evicted
    clone.join(20)
    assert leased == [base.lease(5, 1)]
    assert {"base unlinked", "base forgotten", "base copied"} <= set(seen)
    assert os.path.samefile(base.image, base.lease(5, 1)) and os.path.exists(f"{base.directory}/manifest")


def test_clones_and_evictions_at_random_never_meet(world: World) -> None:
    image = world.image()
    name = os.path.basename(ensure(root(world), image, None).base.directory)
    stop, errors = threading.Event(), []

    def clones(first: int) -> None:
        try:
            for vm in range(first, first + 60):
                base, path = ensure(root(world), image, None, (vm, 0))
                # What a clone does next: it opens the lease.
                with open(path, "rb") as file:
                    file.seek(1 * MiB)
                    assert file.read(16) == b"\xa1" * 16
                assert extents.copy(path, None, "raw", "test").generation == base.generation
                cache.release(root(world), vm, 0)
        except BaseException as e:
            errors.append(e)
            raise

    def evictions() -> None:
        while not stop.is_set():
            room.evict(root(world), name)

    workers = [threading.Thread(target=clones, args=(first,)) for first in (0, 1000, 2000)]
    evictor = threading.Thread(target=evictions)
    for thread in (*workers, evictor):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    evictor.join()
    assert errors == []
    assert world.leases() == [] and world.leftovers() == []


@pytest.mark.parametrize("kill_at", range(1, 4))
def test_eviction_killed_anywhere_is_followed_by_a_clone_and_by_another_eviction(
    world: World, kill_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.image()
    world.on(s.StageBase(root(world), image))
    (base,) = world.bases()
    monkeypatch.setenv("SEMISHARED_KILL_AT", str(kill_at))
    try:
        killed = not evict(world, base.name)
    except BadArguments:
        raise
    except Exception:  # noqa: BLE001 - it was killed
        killed = True
    monkeypatch.delenv("SEMISHARED_KILL_AT")
    assert killed == (kill_at < 3), "the points are: base unlinked, base forgotten"
    qemu_io(world.clone(image, world.disk()), "qcow2", "read -P 0xa1 1M 64k")
    assert extents.generation_of((base / "manifest").read_bytes()) == base.name.split("-")[2]
    world.on(s.RemoveDisk(world.disk(), ""))
    assert evict(world, base.name) and world.bases() == []


def test_good_base_is_found_good_and_what_was_read_is_what_it_holds(world: World) -> None:
    world.on(s.StageBase(root(world), world.image()))
    (base,) = world.bases()
    found = verify(world, base.name)
    assert (found["bad"], found["damaged"]) == ([], False)
    assert found["bytes"] == 8 * MiB, "two extents with data"
    with pytest.raises(MissingImage):
        verify(world, f"100-8-{'0' * 32}")


@pytest.mark.fault(77, "a base says when all of it was read last, and which disks have read a damaged one")
def test_reading_and_mending_a_base_are_noted(world: World) -> None:
    image, before = world.image(), time.time()
    world.clone(image, world.disk())
    (base,) = world.bases()
    (row,) = listed(world)
    assert not {"verified", "mended", "reread"} & set(row), "nothing was read since it came"
    assert not verify(world, base.name, only=(0, 1))["damaged"]
    assert "verified" not in listed(world)[0], "that was a part of it"
    verify(world, base.name)
    first = listed(world)[0]["verified"]
    assert before - 1 <= first <= time.time() and "mended" not in listed(world)[0]
    flip(base / "image", 1 * MiB)
    assert verify(world, base.name)["damaged"] and listed(world)[0]["verified"] == first
    world.clone(image, world.disk(6))
    generation = base.name.split("-")[2]
    step = base_steps.MendBase(root(world), image._replace(generation=generation))
    world.on(step)
    (row,) = listed(world)
    assert before - 1 <= row["mended"] <= time.time() and row["reread"] == ["5-1"]
    world.on(step)
    assert listed(world)[0]["reread"] == ["5-1"], "nothing was mended the second time"
    verify(world, base.name)
    assert listed(world)[0]["verified"] > first
    # What a killed run, or another version, has left of the note says nothing, and is in no way.
    for text in ("", "{", '{"at": NaN, "leases": 5}', '{"at": 1e300, "leases": ["../x", 5]}', "[1]"):
        (base / "mended").write_text(text)
        assert not {"mended", "reread"} & set(listed(world)[0]), text
    world.on(s.RemoveDisk(world.disk(), ""), s.RemoveDisk(world.disk(6), ""))
    assert evict(world, base.name) and world.bases() == []


def test_verify_keeps_to_its_rate(world: World) -> None:
    world.on(s.StageBase(root(world), world.image()))
    (base,) = world.bases()
    assert verify(world, base.name, rate=8 * MiB)["seconds"] >= 0.8


@pytest.mark.parametrize("at", [1 * MiB + 77, 30 * MiB, IMAGE - 1], ids=["data", "hole", "end"])
def test_flipped_bit_is_found_taken_out_of_use_and_mended(world: World, at: int) -> None:
    image = world.image()
    disk = world.disk()
    world.clone(image, disk)
    (base,) = world.bases()
    flip(base / "image", at)
    found = verify(world, base.name)
    assert (found["bad"], found["damaged"], found["leases"]) == ([at // extents.EXTENT], True, ["5-1"])
    assert not (base / "image").exists() and (base / "damaged").exists()
    assert listed(world)[0]["damaged"]
    bad = (base / "damaged").stat().st_ino
    # A clone in between must not get the damaged content back from the lease: it stages anew.
    other = world.clone(image, world.disk(6))
    qemu_io(other, "qcow2", "read -P 0xa1 1M 64k")
    assert (base / "image").stat().st_ino != bad
    assert (base / "leases" / "5-1").stat().st_ino == bad
    generation = base.name.split("-")[2]
    (mended,) = world.on(base_steps.MendBase(root(world), image._replace(generation=generation)))
    assert mended == {"relinked": ["5-1"]}
    assert not (base / "damaged").exists()
    assert (base / "leases" / "5-1").stat().st_ino == (base / "image").stat().st_ino
    assert not verify(world, base.name)["damaged"]
    qemu_io(Path(disk.path), "qcow2", "read -P 0xa1 1M 64k", f"read -P 0xa1 {IMAGE - 65536} 64k")
    assert world.leftovers() == []


def test_of_doubted_extents_only_those_that_are_wrong_are_told(world: World) -> None:
    world.on(s.StageBase(root(world), world.image()))
    (base,) = world.bases()
    found = verify(world, base.name, only=(0, 1))
    assert (found["bad"], found["damaged"]) == ([], False)
    flip(base / "image", extents.EXTENT + 77)
    found = verify(world, base.name, only=(0, 1))
    assert (found["bad"], found["damaged"]) == ([1], True) and (base / "damaged").exists()


def test_damaged_base_that_cannot_be_fetched_stays_out_of_use(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk())
    (base,) = world.bases()
    flip(base / "image", 1 * MiB)
    verify(world, base.name)
    qemu_io(image.source, "raw", "write -P 0xb2 1M 64k")
    wanted = image._replace(generation=base.name.split("-")[2])
    with pytest.raises(ImageChanged):
        world.on(base_steps.MendBase(root(world), wanted))
    with pytest.raises(ImageChanged):
        world.on(s.StageBase(root(world), wanted))
    assert not (base / "image").exists() and (base / "damaged").exists()
    assert verify(world, base.name)["damaged"], "still known to be damaged"


def test_damaged_base_without_leases_can_be_evicted(world: World) -> None:
    world.on(s.StageBase(root(world), world.image()))
    (base,) = world.bases()
    flip(base / "image", 1 * MiB)
    verify(world, base.name)
    assert evict(world, base.name) and world.bases() == []


def test_lost_or_damaged_manifest_is_damage(world: World) -> None:
    image = world.image()
    for harm in (lambda path: path.unlink(), lambda path: flip(path, 30)):
        world.on(s.StageBase(root(world), image))
        (base,) = world.bases()
        harm(base / "manifest")
        assert verify(world, base.name)["bad"] == [-1]
        world.on(base_steps.MendBase(root(world), image._replace(generation=base.name.split("-")[2])))
        assert verify(world, base.name)["bad"] == []


def test_base_that_is_evicted_while_it_is_found_damaged_does_not_come_back(world: World) -> None:
    base = ensure(root(world), world.image(), None, (5, 1)).base
    inode = os.stat(base.image).st_ino
    os.unlink(base.image)
    for _ in range(2):
        rotten.take_out(root(world), base, inode)
        assert os.path.samefile(base.damaged, base.lease(5, 1)) and not cache.is_published(base)
