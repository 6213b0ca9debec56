# SPDX-License-Identifier: Apache-2.0
"""Disks and bases on the devices of a host's pool, through the real host side: file systems of their own,
mounted here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Iterator

import pytest

import pool_devices
from semishared.config import Config
from semishared.device import devices, folders, ledger
from semishared.disk import on_devices, vm_dir
from semishared.disk.epochs import Planned
from semishared.errors import (
    BadPool,
    DeviceMissing,
    NoDevice,
    NoDeviceOfClass,
    NoSpace,
    NotSupported,
    SemisharedError,
    UnexpectedLink,
)
from semishared.host import probe as host_probe
from semishared.model import answers as answers_of
from semishared.model import steps as s
from semishared.model.base.steps import DescribeBase, EvictBase, FetchBases, Part
from semishared.model.device import names as device_names
from semishared.model.device import steps as device_steps
from semishared.model.device.classes import Want
from semishared.model.disk.commit_steps import CreateDiff, FinishDisk
from semishared.model.leftover_steps import Discard, LookAround
from semishared.named import to_data
from semishared.opennebula import args
from semishared.plan.base import eviction
from semishared.plan.disk import snapshots
from semishared.plan.vm import checklist
from semishared.wire.session import Session
from tools.world import MiB, World, qemu_io


class Pool:
    """Devices of 1:2:4, each a file system of its own."""

    def __init__(self, world: World, sizes: tuple[int, ...] = (64, 128, 256)) -> None:
        self.world = world
        self.paths = [world.top / f"device{number}" for number in range(len(sizes))]
        self.sizes = sizes
        for path, size in zip(self.paths, sizes):
            path.mkdir()
            self.mount(path, size)

    def mount(self, path: Path, size: int) -> None:
        pool_devices.mount(path, size)

    def close(self) -> None:
        for path in (*self.paths, self.world.top / "aside"):
            while os.path.ismount(path):
                pool_devices.unmount(path)

    def aside(self) -> str:
        """Return where a device can be mounted that is to be away."""
        path = self.world.top / "aside"
        path.mkdir(exist_ok=True)
        return str(path)

    def set(self, *words: str) -> dict[str, list[str]]:
        (answer,) = self.world.on(
            device_steps.SetDevices(str(self.world.root), words or tuple(map(str, self.paths)))
        )
        assert isinstance(answer, dict)
        return answer

    def devices(self) -> list[device_steps.PoolDevice]:
        with Session("localhost", "test", Config()) as session:
            return session.ask(device_steps.ListDevices(str(self.world.root))).devices

    def rows(self) -> dict[str, dict[str, object]]:
        """Return them as a program is told of them, by their paths."""
        return {device.path: to_data(device) for device in self.devices()}

    def layers(self) -> list[str]:
        """Return the directories of layers on all devices."""
        return sorted(str(found) for path in self.paths for found in path.glob(".semishared/layers/*"))

    def leftovers(self) -> list[str]:
        return [
            str(found) for path in self.paths for found in path.rglob("*") if ".staged-" in found.name
        ] + self.world.leftovers()


def device_of(path: object) -> str:
    """Return the device on which a path ends."""
    return os.path.realpath(str(path)).split("/.semishared/")[0]


def test_a_disk_and_its_base_lie_on_a_device_and_by_their_paths_where_they_always_do(
    world: World, pool: Pool
) -> None:
    pool.set()
    disk = world.disk()
    top = world.clone(world.image(), disk)
    folder = Path(f"{disk.path}.snap")
    assert os.readlink(top) == "disk.1.snap/0"
    assert Path(device_of(folder)) in pool.paths
    (base,) = world.bases()
    assert device_of(base) == device_of(folder), "near what it lies over"
    record = json.loads(Path(disk.vm_dir, ".semishared/disk.1.json").read_text())
    assert (record["version"], record["path"]) == (1, f"{disk.path}.snap/0")
    named = json.loads(
        subprocess.run(
            ["qemu-img", "info", "--output=json", str(top)], check=True, stdout=subprocess.PIPE
        ).stdout
    )
    assert named["backing-filename"] == f"{base}/leases/5-1"
    qemu_io(top, "qcow2", "read -P 0xa1 1M 64k")
    assert not pool.leftovers()
    world.clone(world.image(), disk)
    assert len(pool.layers()) == 1, "once more is as good as once"
    world.on(s.RemoveVm(5, disk.vm_dir))
    assert not pool.layers()
    assert not world.leases()


def test_a_removed_disk_leaves_nothing_on_its_device(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    world.on(s.RemoveDisk(world.disk(), ""))
    assert not pool.layers()
    assert os.listdir(world.disk().vm_dir) == [".semishared"]


def test_without_a_pool_nothing_lies_elsewhere(world: World) -> None:
    world.clone(world.image(), world.disk())
    assert not os.path.islink(f"{world.disk().path}.snap")
    assert not any(base.is_symlink() for base in world.bases())
    assert not (world.root / "devices").exists()


# -- moves ------------------------------------------------------------------------------------------


def carry(
    source_dir: str,
    target_dir: str,
    vm: int,
    disks: tuple[int, ...],
    wants: dict[str, object] | None = None,
) -> None:
    """Relay a VM directory as `tm/mv` does, each end with its own session; `wants`: of devices there."""
    with Session("localhost", "mv", Config()) as source, Session("localhost", "mv", Config()) as target:
        (found,) = source.run([s.MarkVm(vm, source_dir)])
        source.begin([s.SendVm(vm, source_dir, found.token)])
        target.begin([s.ReceiveVm(vm, target_dir, True, "", disks, wants=wants or {})])
        first = source.read()
        while isinstance(first, bytes):
            target.send_data(first)
            first = source.read()
        assert isinstance(first, dict)
        source.finish()
        target.send(end=True, sha256=first["sha256"])
        target.finish()
        assert source.run([s.ReleaseVm(vm, source_dir, "", str(first["seen"]))]) == [s.KeptVm("")]


def prepared(world: World) -> tuple[str, str]:
    """Make VM 5 with two overlays, one of them with a snapshot, a disk in place and a volatile one; return
    where it is and goes.
    """
    image = world.image()
    for number in (1, 3):
        qemu_io(world.clone(image, world.disk(5, number)), "qcow2", f"write -P 0x3{number} 2M 64k")
    world.on(s.AddLayer(world.disk(5, 1), 1, 0, "qcow2"), s.ActivateLayer(world.disk(5, 1), 1, "qcow2"))
    qemu_io(f"{world.disk(5, 1).path}.snap/1", "qcow2", "write -P 0x41 3M 64k")
    world.link(world.image("in-place"), world.disk(5, 0))
    world.on(s.CreateVolatile(world.disk(5, 2), MiB, "raw", ""))
    return world.disk(5).vm_dir, str(world.location / "103" / "5")


def check_content(directory: str) -> None:
    qemu_io(
        f"{directory}/disk.1.snap/1",
        "qcow2",
        "read -P 0x31 2M 64k",
        "read -P 0x41 3M 64k",
        "read -P 0xa1 1M 64k",
    )
    qemu_io(f"{directory}/disk.3", "qcow2", "read -P 0x33 2M 64k")
    assert os.path.isfile(f"{directory}/disk.2") and os.path.islink(f"{directory}/disk.0")


def test_a_directory_is_carried_from_a_pool_to_a_pool(world: World, pool: Pool) -> None:
    pool.set()
    source, target = prepared(world)
    before = pool.layers()
    carry(source, target, 5, (0, 1, 2, 3))
    check_content(target)
    after = pool.layers()
    assert len(after) == 3 and not set(before) & set(after), "places of its own, and those of before are gone"
    assert all(os.path.islink(f"{target}/disk.{number}.snap") for number in (1, 2, 3))
    assert not pool.leftovers() and not os.path.exists(source)


def test_a_directory_is_carried_into_a_pool_and_out_of_it(world: World, pool: Pool) -> None:
    source, target = prepared(world)
    pool.set()
    carry(source, target, 5, (0, 1, 2, 3))
    check_content(target)
    assert len(pool.layers()) == 2 and not os.path.islink(f"{target}/disk.2"), (
        "a volatile disk of before stays a plain file"
    )
    devices = world.root / "devices"
    aside = {name: os.readlink(devices / name) for name in os.listdir(devices) if not name.endswith(".json")}
    # As on a host that has no pool: but its own links still lead somewhere.
    world.on(s.RenameVm(5, target, source, True, "", (0, 1, 2, 3)))
    check_content(source)
    check_content(target)
    assert len(pool.layers()) == 4 and aside


def test_a_killed_receiver_leaves_nothing_that_the_next_one_does_not_take_away(
    world: World, pool: Pool
) -> None:
    pool.set()
    source, target = prepared(world)
    with Session("localhost", "mv", Config()) as host:
        host.begin([s.ReceiveVm(5, target, True, "", (0, 1, 2, 3))])
        host.send_data(b"no tar")
    carry(source, target, 5, (0, 1, 2, 3))
    check_content(target)
    assert len(pool.layers()) == 3


def test_a_link_that_arrives_is_none_of_ours(world: World, pool: Pool) -> None:
    """Another host says what is in its stream: a link into the layers of another VM would cost that VM its
    disk.
    """
    pool.set()
    victim = world.disk(6)
    world.clone(world.image(), victim)
    carry_in = world.top / "made"
    (carry_in / ".semishared").mkdir(parents=True)
    (carry_in / "disk.1.snap").symlink_to(os.readlink(f"{victim.path}.snap"))
    stream = subprocess.run(
        ["tar", "-C", str(carry_in), "-cf", "-", "."], check=True, stdout=subprocess.PIPE
    ).stdout
    with pytest.raises(UnexpectedLink):
        world.on(
            s.ReceiveVm(5, world.disk(5).vm_dir, True, "", (1,)),
            data=[stream],
            sha256=hashlib.sha256(stream).hexdigest(),
        )
    qemu_io(victim.path, "qcow2", "read -P 0xa1 1M 64k")
    assert len(pool.layers()) == 1 and not pool.leftovers()


# -- devices come and go ------------------------------------------------------------------------------


def test_an_unmounted_directory_is_no_device_and_nothing_is_written_below_it(
    world: World, pool: Pool
) -> None:
    pool.set()
    disk = world.disk()
    world.clone(world.image(), disk)
    lost = Path(device_of(f"{disk.path}.snap"))
    subprocess.run(["umount", "-l", str(lost)], check=True)
    assert pool.rows()[str(lost)]["state"] == "not there"
    with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {lost} .* is not there"):
        world.on(s.SendVm(5, disk.vm_dir, ""))
    for number in range(8):
        world.clone(world.image(), world.disk(6, number))
        assert device_of(f"{world.disk(6, number).path}.snap") != str(lost)
    assert os.listdir(lost) == []
    (base,) = world.bases()
    assert device_of(base) != str(lost), "its base is made again elsewhere"
    assert "100-7" in base.name and f"{base.name}/5-1" in world.leases(), (
        "and who lay over it still does, when its device is back"
    )
    world.on(s.RemoveVm(5, disk.vm_dir))
    assert not os.path.exists(disk.vm_dir)
    for path in pool.paths:
        subprocess.run(["umount", "-l", str(path)], check=False)
    with pytest.raises(NoDevice):
        world.clone(world.image(), world.disk(7))
    assert not any(os.listdir(path) for path in pool.paths)


def test_a_diff_whose_device_is_away_is_kept_when_its_vm_is_deleted(world: World, pool: Pool) -> None:
    pool.set()
    image, disk = world.image(), world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, image, 0, ""))
    folder = f"{disk.path}.snap"
    qemu_io(f"{folder}/0", "qcow2", "write -P 0x77 2M 64k")
    lost = device_of(folder)
    subprocess.run(["mount", "--move", lost, pool.aside()], check=True)
    world.on(s.RemoveVm(5, disk.vm_dir))
    (kept,) = world.system.glob(".kept-5-*")
    subprocess.run(["mount", "--move", pool.aside(), lost], check=True)
    (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(seen, dict) and all(item["vm"] == -1 for item in seen["unlinked"]), "no layers"
    world.on(FinishDisk(s.DiskRef(5, 1, str(kept))))
    qemu_io(image.source, "raw", "read -P 0x77 2M 64k")
    assert not pool.layers()


def test_the_hosts_monitoring_tells_of_its_pool(world: World, pool: Pool) -> None:
    assert "POOL" not in host_probe.report(str(world.location))
    pool.set()
    told = dict(re.findall(r'([A-Z_]+) = "([^"]*)"', host_probe.report(str(world.location))))
    sizes = (int(told["POOL_LARGEST_MB"]), int(told["POOL_FREE_MB"]), int(told["POOL_TOTAL_MB"]))
    assert (
        told["HEALTH"] == "OK"
        and told["POOL"] == "3"
        and 250 < sizes[0] <= 256 < sizes[1] <= sizes[2] == sum(pool.sizes)
    )
    subprocess.run(["umount", str(pool.paths[2])], check=True)
    told = dict(re.findall(r'([A-Z_]+) = "([^"]*)"', host_probe.report(str(world.location))))
    assert told["HEALTH"] == f"device {pool.paths[2]} is not there" and (
        told["POOL"],
        told["POOL_TOTAL_MB"],
    ) == ("2", "192")


PROBE = Path(__file__).resolve().parents[2] / "im/semishared"


def probe(location: Path) -> list[str]:
    """Run the probe as OpenNebula's monitoring does; return the lines that it prints, and are of capacity."""
    told = f"<OPENNEBULA><DATASTORE_LOCATION>{location}</DATASTORE_LOCATION></OPENNEBULA>".encode()
    at = PROBE.parents[1]
    with contextlib.ExitStack() as undo:
        place = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        (place / "lib").symlink_to(at / "lib")
        (place / "im/kvm-probes.d/host/system").mkdir(parents=True)
        shutil.copy(PROBE, place / "im/kvm-probes.d/host/system/semishared")
        done = subprocess.run(
            [str(place / "im/kvm-probes.d/host/system/semishared")],
            input=told,
            check=True,
            stdout=subprocess.PIPE,
        )
    health, first, *others = done.stdout.decode().splitlines()
    assert first.startswith("SEMISHARED = [ ")
    assert health.partition(" = ")[::2] == (
        "HEALTH_SEMISHARED",
        first.split("HEALTH = ")[1].split(", STORES")[0],
    )
    return others


def test_oned_is_told_what_is_free_on_the_pool_for_each_system_datastore_of_ours(
    world: World, pool: Pool
) -> None:
    for system, driver in (("101", "semishared"), ("103", "semishared"), ("104", "ssh")):
        (world.location / system).mkdir(exist_ok=True)
        (world.location / system / ".monitor").write_text(f"{driver}\n")
    assert probe(world.location) == [], "no pool: as ever"
    pool.set()
    (pool.paths[2] / "filler").write_bytes(b"x" * 32 * MiB)
    form = re.compile(r"DS = \[ ID = (\d+), USED_MB = (\d+), TOTAL_MB = (\d+), FREE_MB = (\d+) \]")
    lines = [form.fullmatch(line) for line in probe(world.location)]
    found = [tuple(map(int, line.groups())) for line in lines if line]
    assert len(found) == len(lines) and [row[0] for row in found] == [101, 103]
    for _, used, total, free in found:
        assert total == sum(pool.sizes) and used + free == total and 32 <= used < 36
    (world.location / "103").rename(world.top / "away")
    (world.location / "103").symlink_to(world.top / "away")
    assert [line.split(",")[0] for line in probe(world.location)] == ["DS = [ ID = 101"], (
        "of a link monitor_ds.rb says what is true"
    )
    (world.location / "103").unlink()
    (world.top / "away").rename(world.location / "103")
    for path in pool.paths:
        subprocess.run(["umount", str(path)], check=True)
    assert [line.split(", ")[1:] for line in probe(world.location)] == [
        ["USED_MB = 0", "TOTAL_MB = 0", "FREE_MB = 0 ]"]
    ] * 2


def test_the_probe_comes_after_that_of_opennebula_whose_figures_it_corrects() -> None:
    from semishared.install.tree import PROBES

    for path in PROBES:
        assert (
            os.path.basename(path) > "monitor_ds.rb" and os.path.basename(os.path.dirname(path)) == "system"
        )


def test_a_device_that_cannot_be_written_to_takes_nothing(world: World, pool: Pool) -> None:
    pool.set()
    for path in pool.paths[1:]:
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    for number in range(6):
        world.clone(world.image(size=MiB * 2), world.disk(6, number))
        assert device_of(f"{world.disk(6, number).path}.snap") == str(pool.paths[0])
    rows = pool.rows()
    assert [rows[str(path)]["state"] for path in pool.paths] == ["", "read-only", "read-only"]


def test_a_device_whose_label_only_somebody_else_may_write_is_not_read_only(world: World, pool: Pool) -> None:
    """As one that root has set up is for oneadmin: here for a root who may no more than others."""
    pool.set()
    rows = pool.rows()
    uuid = str(rows[str(pool.paths[0])]["uuid"])
    (pool.paths[0] / ".semishared" / "device.json").chmod(0o444)
    code = "import sys; from semishared.device import offline; print(offline.state(*sys.argv[1:]))"
    words = ["setpriv", "--bounding-set=-dac_override", "/usr/bin/python3", "-c", code, str(world.root), uuid]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2] / "lib")
    assert done.stdout == b"\n"


def test_what_a_device_held_while_it_was_away_is_found_when_it_is_back(world: World, pool: Pool) -> None:
    pool.set()
    disk = world.disk()
    world.clone(world.image(), disk)
    lost = Path(device_of(f"{disk.path}.snap"))
    aside = world.root / "devices" / "aside"
    link = next(
        entry
        for entry in (world.root / "devices").glob("*-*[!n]")
        if os.readlink(entry).startswith(f"{lost}/")
    )
    link.rename(aside)
    world.on(s.RemoveVm(5, disk.vm_dir))
    world.clone(world.image(), world.disk(6))
    aside.rename(link)
    (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(seen, dict)
    found = {item["path"]: item for item in seen["unlinked"]}
    assert sorted(item["vm"] for item in found.values()) == [-1, 5]
    for path, item in found.items():
        (done,) = world.on(Discard("unlinked", path, str(world.location), item["vm"], item["seen"]))
        assert done == {"removed": True} and not os.path.exists(path)
    qemu_io(world.disk(6).path, "qcow2", "read -P 0xa1 1M 64k")


def test_what_killed_actions_left_in_a_base_on_a_device_is_removed_there(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    (base,) = world.bases()
    left = [base / "leases" / "9-1", base / "leases" / ".staged-5-2.x"]
    for path in left:
        os.link(base / "image", path)
    (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(seen, dict)
    (found,) = seen["root"]["bases"]
    lease = next(item for item in found["leases"] if item["vm"] == 9)
    for kind, item in [("lease", lease), *(("staged", item) for item in found["staged"])]:
        vm = 9 if kind == "lease" else -1
        assert world.on(Discard(kind, item["path"], str(world.location), vm, item.get("seen", ""))) == [
            {"removed": True}
        ]
    assert not any(map(os.path.lexists, left)) and world.leases() == [f"{base.name}/5-1"]
    # Any other link there is followed by nobody.
    elsewhere = world.top / "elsewhere"
    (elsewhere / "leases").mkdir(parents=True)
    (elsewhere / "leases" / "9-1").touch()
    base.with_name("100-9-x").symlink_to(elsewhere)
    with pytest.raises(UnexpectedLink):
        world.on(Discard("lease", f"{base.with_name('100-9-x')}/leases/9-1", str(world.location), 9, ""))
    assert (elsewhere / "leases" / "9-1").exists()


def test_an_unpublished_link_to_a_base_goes_alone(world: World, pool: Pool) -> None:
    """Who is killed between making a link and naming it leaves one more that leads to what another is
    making.
    """
    pool.set()
    world.clone(world.image(), world.disk())
    (base,) = world.bases()
    left = [base.with_name(f".staged-{base.name}.x"), world.root / "staging" / ".staged-100-7.x"]
    for path in left:
        path.symlink_to(os.readlink(base))
    (seen,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(seen, dict) and seen["root"]["staging"] == [] and len(seen["root"]["bases"]) == 1
    assert sorted(item["path"] for item in seen["staged"]) == sorted(map(str, left))
    for item in seen["staged"]:
        world.on(Discard("staged", item["path"], str(world.location), -1, item["seen"]))
    assert not pool.leftovers()
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")


def test_bases_of_one_session_come_to_the_devices_whose_room_was_judged(world: World, pool: Pool) -> None:
    pool.set()
    images = []
    for number, size in enumerate((72, 24, 24, 24), 20):
        path = world.store / f"image{number}"
        path.write_bytes(os.urandom(size * MiB))
        image = s.ImageRef(100, number, "raw", str(path))
        (made,) = world.on(s.StageBase(str(world.root), image))
        assert isinstance(made, dict)
        images.append(image._replace(generation=made["generation"]))
        world.on(EvictBase(str(world.root), images[-1].base_name))
    assert not world.bases()
    said = world.on(*(DescribeBase(str(world.root), image) for image in images))
    answers = [answers_of.one("h1", DescribeBase, answer) for answer in said]
    small = uuid_of(world, pool.paths[0])
    assert answers[0].where != small, "it has no room for that"
    judged = eviction.of_session(answers)
    assert sum(needed for _, needed in judged) == sum(answer.needed for answer in answers)
    for listed, needed in judged:
        same = [answer for answer in answers if answer.where == getattr(listed, "where", "")]
        assert needed == sum(answer.needed for answer in same) and all(
            answer.free == listed.free for answer in same
        )
    assert {listed.total for listed, _ in judged} <= {size * MiB for size in pool.sizes}
    parts = tuple(Part(image, device=answer.where) for image, answer in zip(images, answers))
    world.on(FetchBases(str(world.root), parts, (), "rest", "", "none", 0, 0, (), ()))
    placed = {base.name: os.readlink(base).split("/")[2] for base in world.bases()}
    assert placed == {image.base_name: answer.where for image, answer in zip(images, answers)}


def uuid_of(world: World, path: Path) -> str:
    return next(
        entry.name
        for entry in (world.root / "devices").glob("*-*[!n]")
        if os.readlink(entry) == f"{path}/.semishared"
    )


# -- what is declared ---------------------------------------------------------------------------------


def test_one_that_cannot_be_a_device_is_refused_and_none_is_labelled(world: World, pool: Pool) -> None:
    plain = world.top / "plain"
    plain.mkdir()
    again = world.top / "again"
    again.mkdir()
    subprocess.run(["mount", "--bind", str(pool.paths[0]), str(again)], check=True)
    try:
        for word, why in ((plain, "is not mounted"), (again, "are one file system")):
            with pytest.raises(BadPool, match=why):
                pool.set(str(pool.paths[0]), str(word))
            assert not (pool.paths[0] / ".semishared").exists() and not pool.rows()
    finally:
        subprocess.run(["umount", str(again)], check=True)


def test_a_copy_of_a_device_is_refused(world: World, pool: Pool) -> None:
    pool.set(str(pool.paths[0]))
    (pool.paths[1] / ".semishared").mkdir()
    label = pool.paths[0] / ".semishared" / "device.json"
    (pool.paths[1] / ".semishared" / "device.json").write_bytes(label.read_bytes())
    with pytest.raises(BadPool, match="label of another device"):
        pool.set()


def test_a_device_that_is_not_declared_any_more_takes_nothing_and_goes_when_it_is_empty(
    world: World, pool: Pool
) -> None:
    assert sorted(pool.set()["labelled"]) == sorted(map(str, pool.paths))
    disk = world.disk()
    world.clone(world.image(), disk)
    closed = device_of(f"{disk.path}.snap")
    others = [str(path) for path in pool.paths if str(path) != closed]
    assert pool.set(*others) == {"labelled": [], "closed": [closed], "gone": []}
    for number in range(6):
        world.clone(world.image(), world.disk(6, number))
        assert device_of(f"{world.disk(6, number).path}.snap") != closed
    qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")
    world.on(s.RemoveVm(5, disk.vm_dir), s.RemoveVm(6, world.disk(6).vm_dir))
    world.on(EvictBase(str(world.root), world.bases()[0].name))
    assert pool.set(*others)["gone"] == [closed]
    assert sorted(pool.rows()) == sorted(others)


# -- killed at every point ----------------------------------------------------------------------------

OWN = {
    "staged disk.1.snap",
    "published disk.1.snap",
    "directory on a device made",
    "base linked",
    "base renamed on its device",
    "leased",
    "directory on a device removed",
    "disk.1 layer renamed",
    "base published",
    "incoming adopted",
    "vm directory published",
    "removed directory gone",
    "partial made",
    "partial finished",
    "base unlinked",
    "base forgotten",
}
"""Points between which something of a pool may be half made."""


def cloning(world: World, number: int) -> None:
    world.clone(of_its_own(world, number), world.disk(number))


def cloning_again(world: World, number: int) -> None:
    """Its image is known by content: it comes extent by extent."""
    world.clone(of_its_own(world, number), world.disk(number))


def deleting(world: World, number: int) -> None:
    world.on(s.RemoveVm(number, world.disk(number).vm_dir))


def removing(world: World, number: int) -> None:
    world.on(s.RemoveDisk(world.disk(number), ""))


def moving(world: World, number: int) -> None:
    if os.path.exists(world.disk(number).vm_dir):
        carry(world.disk(number).vm_dir, str(world.location / "103" / str(number)), number, (1,))


def renaming(world: World, number: int) -> None:
    world.on(
        s.RenameVm(
            number, world.disk(number).vm_dir, str(world.location / "103" / str(number)), True, "", (1,)
        )
    )


def evicting(world: World, number: int) -> None:
    world.on(EvictBase(str(world.root), base_name(world, number)))


KILLED = {
    function.__name__: function
    for function in (cloning, cloning_again, deleting, removing, moving, renaming, evicting)
}


def of_its_own(world: World, number: int) -> s.ImageRef:
    """Return an image of other content than all others: what bases have in common is not copied again."""
    path, pattern = world.store / f"image{number}", number % 251
    made = s.ImageRef(100, number, "raw", str(path))
    return (
        made if path.exists() else world.image(path.name, size=4 * MiB, pattern=pattern)._replace(id=number)
    )


def base_name(world: World, number: int) -> str:
    return next(base.name for base in world.bases() if base.name.startswith(f"100-{number}-"))


def ready(world: World, what: str, number: int) -> None:
    """Make what the action finds."""
    of_its_own(world, number)
    if what != "cloning":
        cloning(world, number)
    if what in ("cloning_again", "evicting"):
        deleting(world, number)
    if what == "cloning_again":
        evicting(world, number)


@pytest.mark.parametrize("what", KILLED)
def test_killed_at_every_point_and_done_again(
    world: World, pool: Pool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    act, trace = KILLED[what], world.top / "trace"
    for number in (999, 1000):  # what the first one makes for all is not made again
        ready(world, what, number)
        monkeypatch.setenv("SEMISHARED_TRACE", str(trace.with_name(f"trace-{number}")))
        act(world, number)
        monkeypatch.delenv("SEMISHARED_TRACE")
    passed = [line.split(" ", 1) for line in trace.with_name("trace-1000").read_text().splitlines()]
    points = {int(number): name for number, name in passed if name in OWN}
    assert points, passed
    for number, name in points.items():
        ready(world, what, number)
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        monkeypatch.setenv("SEMISHARED_TRACE", str(trace.with_name(f"trace-{number}")))
        with contextlib.suppress(SemisharedError):  # of two machines it may be the one or the other
            act(world, number)
        monkeypatch.delenv("SEMISHARED_TRACE")
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        assert (
            "moving" in what
            or trace.with_name(f"trace-{number}").read_text().splitlines()[-1] == f"{number} {name}"
        )
        act(world, number)
        there = [world.disk(number, system=system).vm_dir for system in (101, 103)]
        found = [path for path in there if os.path.exists(f"{path}/disk.1")]
        wanted = {"deleting": 0, "removing": 0, "evicting": 0, "renaming": 2}.get(what, 1)
        assert len(found) == wanted, f"killed at {name}"
        for path in found:
            qemu_io(f"{path}/disk.1.snap/0", "qcow2", f"read -P {number % 251} 1M 64k")
        assert len([path for path in pool.layers() if f"/{number}-1-" in path]) == wanted, f"killed at {name}"
        *_, seen = world.on(
            *(s.RemoveVm(number, path) for path in there),
            LookAround(str(world.location), (101, 103), (), False),
        )
        assert isinstance(seen, dict) and seen["unlinked"] == [], f"killed at {name}"
        for item in seen["root"]["staging"]:
            assert name in ("base linked", "base renamed on its device"), "its link is left, for gc"
            world.on(Discard("staging", item["path"], str(world.location), -1, item["seen"]))
        assert not pool.leftovers(), f"killed at {name}"


def test_labelling_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 40):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        try:
            pool.set(*map(str, pool.paths[number % 2 :]))
            break
        except SemisharedError:
            pass
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
        pool.set()
        assert [row["state"] for row in pool.rows().values()] == [""] * 3 and not pool.leftovers()
    assert 3 < number < 39


def test_closing_a_device_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    closed = device_of(f"{world.disk().path}.snap")
    others = [str(path) for path in pool.paths if str(path) != closed]
    passed = []
    for number in range(1, 20):
        trace = world.top / f"trace-{number}"
        monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        try:
            pool.set(*others)
            break
        except SemisharedError:
            passed.append(trace.read_text().splitlines()[-1].split(" ", 1)[1])
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
            monkeypatch.delenv("SEMISHARED_TRACE")
        row = pool.rows()[closed]
        assert row["state"] == "" and row["weight"] == (
            0 if "device closed" in passed or f"published {row['uuid']}.json" in passed else 1
        )
        qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
        assert pool.set(*others) == {"labelled": [], "closed": [closed], "gone": []}
        assert pool.rows()[closed]["weight"] == 0 and not pool.leftovers()
        # As it was.
        pool.set()
        assert pool.rows()[closed]["weight"] == 1
        passed = passed[-1:]
    assert number > 2 and passed == ["device closed"], "the last of its effects"


def test_who_arrives_is_placed_by_what_comes_with_each_disk(world: World, pool: Pool) -> None:
    pool.set()
    small, middle, large = map(str, pool.paths)
    for vm in range(40):
        directory = world.disk(vm).vm_dir
        os.makedirs(directory)
        on_devices.prepare(directory, vm, (1,), sizes={1: 70 * MiB})
        assert device_of(f"{directory}/disk.1.snap") != small
    directory = world.disk(50).vm_dir
    os.makedirs(directory)
    on_devices.prepare(directory, 50, (1, 2, 3), sizes=dict.fromkeys((1, 2, 3), 100 * MiB))
    assert sorted(device_of(f"{directory}/disk.{number}.snap") for number in (1, 2, 3)) == [
        middle,
        large,
        large,
    ]
    sizes = {"1": 100 * MiB, "2": 100 * MiB, "3": 100 * MiB}
    world.on(s.MakeRoom(60, world.disk(60).vm_dir, 300 * MiB, (), sizes))
    for too_much in ({"1": 260 * MiB}, {**sizes, "4": 100 * MiB}):
        with pytest.raises(NoSpace, match=r"disk 60-\d in the pool .*: on \S+ \S+ MiB are missing"):
            world.on(s.MakeRoom(60, world.disk(60).vm_dir, sum(too_much.values()), (), too_much))


@pytest.mark.parametrize(
    ("format", "fs"), [("raw", ""), ("qcow2", ""), ("raw", "ext4"), ("qcow2", "xfs"), ("raw", "swap")]
)
def test_a_volatile_disk_lies_on_a_device(world: World, pool: Pool, format: str, fs: str) -> None:
    pool.set()
    disk, size = world.disk(), 400 * MiB
    make = s.CreateVolatile(disk, size, format, fs)
    # What holds records and checkpoints is not filled by it.
    with of_size(world.system, "2M"):
        world.on(s.PrepareVm(5, disk.vm_dir), make)
        assert len(pool.layers()) == 1 and device_of(disk.path) in map(str, pool.paths[1:]), (
            "where a tenth of it has room"
        )
        assert os.readlink(disk.path) == "disk.1.snap/0" and os.path.islink(f"{disk.path}.snap")
        record = json.loads(Path(disk.vm_dir, ".semishared/disk.1.json").read_text())
        assert (record["how"], record["format"], record["path"]) == (
            "volatile",
            format,
            f"{disk.path}.snap/0",
        )
        told = subprocess.run(
            ["qemu-img", "info", "-f", format, "--output=json", disk.path], check=True, stdout=subprocess.PIPE
        ).stdout
        assert json.loads(told)["virtual-size"] == size and os.stat(disk.path).st_mode & 0o777 == 0o660
        world.on(make)
        assert len(pool.layers()) == 1 and not pool.leftovers(), "once more is as good as once"
        (said,) = world.on(s.DescribeDisk(disk, ""))
        facts = snapshots.Facts.parse(answers_of.one("h1", s.DescribeDisk, said))
        with pytest.raises(NotSupported, match="volatile"):
            snapshots.create(args.SnapshotPlace.parse([f"h:{disk.path}", "0", "5", "100"]), facts, "")
        world.on(s.RemoveDisk(disk, ""))
        assert not pool.layers() and os.listdir(disk.vm_dir) == [".semishared"]


def test_a_volatile_disk_of_before_the_pool_is_made_anew_on_a_device(world: World, pool: Pool) -> None:
    disk = world.disk()
    make = s.CreateVolatile(disk, MiB, "raw", "")
    world.on(s.PrepareVm(5, disk.vm_dir), make)
    assert sorted(os.listdir(disk.vm_dir)) == [".semishared", "disk.1"] and not os.path.islink(disk.path)
    pool.set()
    world.on(s.GrowDisk(disk, 2 * MiB))
    assert os.path.getsize(disk.path) == 2 * MiB and not pool.layers(), "a plain file as before"
    world.on(make)
    assert os.readlink(disk.path) == "disk.1.snap/0" and len(pool.layers()) == 1 and not pool.leftovers()
    world.on(s.GrowDisk(disk, 2 * MiB))
    assert os.path.getsize(disk.path) == 2 * MiB


@contextlib.contextmanager
def of_size(directory: Path, size: str) -> Iterator[None]:
    """Have a directory be a file system of its own."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "own", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_what_comes_to_no_device_is_to_fit_where_the_directory_is(world: World, pool: Pool) -> None:
    pool.set()
    vm_dir, more = world.disk(60).vm_dir, sum(pool.sizes) * MiB
    sizes = {"1": 8 * MiB, "2": more}
    seen = s.MarkedVm(True, True, 2, 0, "", "", 2 * more + 8 * MiB, (), False, {"2": ["ram"]}, sizes)
    asked = checklist.room_for_arrival(args.VmPlace("h1", vm_dir, 60), seen)
    assert (asked.sizes, asked.apart) == ({"1": 8 * MiB}, more)
    with of_size(world.system, "1G"):
        # A checkpoint that is larger than the pool; and a disk that wants memory has a place there, or is
        # refused by itself.
        world.on(s.MakeRoom(60, vm_dir, more + 8 * MiB, (), {"1": 8 * MiB}), asked)
    with of_size(world.system, "32M"):
        world.on(
            s.MakeRoom(60, vm_dir, 80 * MiB, (), {"1": 60 * MiB}),
            s.MakeRoom(60, vm_dir, 100 * MiB, (), {"1": 60 * MiB}, 20 * MiB),
        )
        for too_much in (s.MakeRoom(60, vm_dir, 100 * MiB, (), {"1": 60 * MiB}), asked):
            with pytest.raises(NoSpace, match=f"no space for .* in {vm_dir} on"):
                world.on(too_much)


def test_in_a_datastore_that_is_a_link_all_that_arrives_is_to_fit_there(world: World, pool: Pool) -> None:
    pool.set()
    away, vm_dir = world.top / "away", world.disk(60).vm_dir
    world.system.rename(away)
    world.system.symlink_to(away)
    with of_size(away, "32M"), pytest.raises(NoSpace, match=f"no space for 60.* in {vm_dir} on"):
        world.on(s.MakeRoom(60, vm_dir, 60 * MiB, (), {"1": 58 * MiB}))


def test_files_of_one_number_on_two_devices_are_two(world: World, pool: Pool) -> None:
    pool.set()
    directory = world.disk(60).vm_dir
    os.makedirs(directory)
    on_devices.prepare(directory, 60, (1, 2), sizes={1: 150 * MiB, 2: 100 * MiB})
    paths = [f"{directory}/disk.{number}.snap/0" for number in (1, 2)]
    assert device_of(paths[0]) != device_of(paths[1])
    for path in paths:
        Path(path).write_bytes(os.urandom(MiB))
    while os.stat(paths[0]).st_ino != os.stat(paths[1]).st_ino:
        behind = min(paths, key=lambda path: os.stat(path).st_ino)
        shutil.copyfile(behind, f"{behind}1")
        os.replace(f"{behind}1", behind)
    (found,) = world.on(s.LookAtVm(60, directory))
    assert isinstance(found, dict) and found["sizes"] == {"1": MiB, "2": MiB} and found["bytes"] == 2 * MiB


def test_in_a_datastore_that_is_a_link_disks_lie_as_without_a_pool(world: World, pool: Pool) -> None:
    pool.set()
    away = world.top / "away"
    world.system.rename(away)
    world.system.symlink_to(away)
    top = world.clone(world.image(), world.disk())
    qemu_io(top, "qcow2", "read -P 0xa1 1M 64k")
    world.on(s.CreateVolatile(world.disk(5, 2), MiB, "raw", ""))
    assert (
        not pool.layers()
        and not os.path.islink(f"{world.disk().path}.snap")
        and not os.path.islink(world.disk(5, 2).path)
    )
    with pytest.raises(NoDeviceOfClass, match="is a symbolic link"):
        on_devices.place(world.disk().vm_dir, 5, 7, MiB, want=Want(("slow",), MiB))


def test_a_burst_from_one_image_is_spread_over_the_devices(world: World) -> None:
    pool = Pool(world, (256, 256, 256, 256))
    try:
        pool.set()
        image = world.image()
        for vm in range(8):
            # Expected to take 80 MiB each, and empty: three fit on a device.
            world.clone(image, world.disk(vm), 800 * MiB)
        lie = Counter(device_of(f"{world.disk(vm).path}.snap") for vm in range(8))
        assert len(lie) == 4 and max(lie.values()) <= 3, lie
        (base,) = world.bases()
        assert lie[device_of(base)] >= 1, "near what it lies over, as long as there is room"
        assert sum(pending(world).values()) > 8 * 79 * MiB
        world.on(*[s.RemoveVm(vm, world.disk(vm).vm_dir) for vm in range(8)])
        assert not any(pending(world).values())
    finally:
        pool.close()


def pending(world: World) -> dict[str, int]:
    root = str(world.root)
    return {
        devices.mount(root, uuid): size
        for uuid, size in ledger.pending(root, devices.registered(root)).items()
    }


def test_what_is_pending_is_what_is_not_there_yet(world: World, pool: Pool) -> None:
    pool.set()
    assert pending(world) == {}
    vm_dir = world.disk().vm_dir
    os.makedirs(vm_dir)
    (world.root / "locks").mkdir(exist_ok=True)
    folder = on_devices.place(vm_dir, 5, 1, 8 * MiB).path
    where = device_of(folder)
    assert pending(world) == {where: 8 * MiB}
    Path(folder, "0").write_bytes(os.urandom(3 * MiB))
    assert pending(world) == {where: 5 * MiB}
    assert on_devices.place(vm_dir, 5, 1, 8 * MiB).path == folder and pending(world) == {where: 5 * MiB}, (
        "once more is as good as once"
    )
    Path(folder, "1").write_bytes(os.urandom(9 * MiB))
    assert pending(world) == {where: 0}
    file = world.root / "locks" / "placed"
    Path(folder, "1").unlink()
    line = file.read_text().splitlines()[-1].split(" ", 1)
    assert abs(time.time() - int(line[0])) < 60
    file.write_text(f"{int(line[0]) - ledger.YOUNG_S} {line[1]}\nno line\n")
    assert pending(world) == {}, "of an hour ago, and what is none"
    for _ in range(1000):
        ledger.note(str(world.root), folder, 4 * MiB)
    assert pending(world) == {where: MiB} and ledger.MOST * 60 < file.stat().st_size < ledger.LONG + 200
    file.unlink()
    file.symlink_to("elsewhere")
    ledger.note(str(world.root), folder, 4 * MiB)
    assert not (world.root / "locks" / "elsewhere").exists()
    with pytest.raises(UnexpectedLink):
        pending(world)


def test_no_device_is_to_blame_for_a_vm_directory_that_is_gone(world: World, pool: Pool) -> None:
    pool.set()
    name = device_names.layers_name(5, 1, "0" * 12)
    with pytest.raises(FileNotFoundError):
        folders.place(f"{world.disk().path}.snap", "layers", name, "5-1", MiB)
    assert not pool.layers()


def test_a_place_that_has_no_room_after_all_is_given_up(world: World, pool: Pool) -> None:
    pool.set()
    disk = world.disk()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir))
    with (
        pytest.raises(NoSpace),
        vm_dir.published(
            disk.vm, disk.vm_dir, "disk.1", Planned(), layered=vm_dir.Layered(MiB, "")
        ) as staged,
    ):
        assert device_of(os.path.dirname(staged)) in map(str, pool.paths)
        Path(staged).write_bytes(bytes(300 * MiB))
    assert not pool.layers() and not os.path.lexists(f"{disk.path}.snap") and not pool.leftovers()
