# SPDX-License-Identifier: Apache-2.0
"""What a host that was given up for lost has of a VM, in real directories: known by the epoch in the VM's
stores.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from semishared.config import Config
from semishared.disk import epoch_check, retained_diffs
from semishared.errors import StaleDirectory
from semishared.front import action as front
from semishared.model import steps as s
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import IN_PLACE, OVERLAY
from semishared.model.disk.record import Record
from semishared.model.exchange import On, Plan
from semishared.model.refs import ImageRef
from semishared.model.store import dir_names
from semishared.model.store.access import Access
from semishared.opennebula.report import Report
from semishared.store.dir import epochs as dir_epochs
from semishared.wire.session import Session
from tools.slow_disk import SlowDisk
from tools.test_commit import active, attach
from tools.world import MiB, World, qemu_io

CLOUD = "c" * 32


@pytest.fixture
def stay(tmp_path: Path) -> tuple[str, ImageRef]:
    return made(tmp_path / "100", tmp_path / "101/7")


def made(store: Path, directory: Path) -> tuple[str, ImageRef]:
    """Return a VM directory of SEQ 3 with an overlay and a disk in place, and an image of the one store."""
    (store / ".semishared").mkdir(parents=True)
    (directory / ".semishared").mkdir(parents=True)
    of = ImageRef(100, 5, "raw", f"{store}/{'a' * 32}", "ab" * 16, Access(cloud=CLOUD))
    Path(disk_names.history_note(str(directory))).write_text(json.dumps({"version": 1, "seq": 3}))
    for number, place in ((0, IN_PLACE), (1, OVERLAY)):
        record = Record(number, place, "raw", f"{directory}/disk.{number}", image=of)
        Path(disk_names.record(str(directory), number)).write_text(json.dumps(record.to_data()))
    return str(directory), of


def test_a_directory_that_is_older_than_its_vms_epoch_is_refused(stay: tuple[str, ImageRef]) -> None:
    directory, of = stay
    assert epoch_check.check(7, directory) == ""
    for epoch in (2, 3):
        dir_epochs.note(of, 7, epoch)
        assert epoch_check.check(7, directory) == ""
    dir_epochs.note(of, 8, 9)
    dir_epochs.note(of._replace(access=Access(cloud="d" * 32)), 7, 9)
    assert epoch_check.check(7, directory) == "", "another VM's, another cloud's"
    dir_epochs.note(of, 7, 4)
    with pytest.raises(StaleDirectory, match="SEQ 3 .* SEQ 4"):
        epoch_check.check(7, directory)
    Path(disk_names.history_note(directory)).write_text("{")
    with pytest.raises(StaleDirectory):
        epoch_check.check(7, directory)


def test_a_record_that_nobody_understands_hides_no_other(stay: tuple[str, ImageRef]) -> None:
    directory, of = stay
    dir_epochs.note(of, 7, 4)
    Path(disk_names.record(directory, 0)).write_text("nonsense")
    with pytest.raises(StaleDirectory):
        epoch_check.check(7, directory)
    Path(disk_names.record(directory, 1)).unlink()
    assert "cannot be told" in epoch_check.check(7, directory) and not epoch_check.check(
        8, f"{directory}-none"
    )


def test_an_epoch_is_a_name_and_earlier_ones_go(stay: tuple[str, ImageRef]) -> None:
    _, of = stay
    for epoch in (4, 11, 9):
        dir_epochs.note(of, 7, epoch)
    names = [path.name for path in Path(of.root, dir_names.epochs()).iterdir()]
    assert names == [f"7-11-{CLOUD}"] and dir_epochs.read(of, 7) == 11
    assert dir_names.epoch_named(names[0]) == (7, 11, CLOUD)
    assert dir_names.epoch_named("7-11") == (7, 11, "")
    assert not dir_names.epoch_named("7") and not dir_names.epoch_named(".staged-7-1")


def test_a_store_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, 32 << 20, {})
    try:
        directory, of = made(disk.mount / "100", tmp_path / "101/7")
        dir_epochs.note(of, 7, 4)
        disk.forget_cached()
        disk.hang()
        assert "does not answer" in epoch_check.check(7, directory)
        disk.go_on()
        with pytest.raises(StaleDirectory):
            epoch_check.check(7, directory)
    finally:
        disk.end()


def taking(world: World) -> dict[str, s.Step]:
    """Return the steps by which what a host has of VM 5 becomes the VM's elsewhere, or somebody's image; its
    disk 0 is in place.
    """
    image, directory = world.image(), world.disk(5, 0).vm_dir
    world.clone(image, world.disk(5, 1))
    world.link(world.image("in-place"), world.disk(5, 0))
    return {
        "mv": s.SendVm(5, directory),
        "mv to another datastore": s.RenameVm(5, directory, world.disk(5, 0, 103).vm_dir, True, ""),
        "cpds": s.SaveDisk(world.disk(5, 1), str(world.store / "saved"), "qcow2", ""),
        "prebackup": s.BackUp(5, directory, f"{directory}/backup", ("0", "1"), "", "NONE", "PFZNPjwvVk0+"),
        "restore of a disk on the host": s.RestoreDisk(world.disk(5, 1), 64 * MiB),
        "restore of a disk in place": s.RestoreDisk(world.disk(5, 0), 64 * MiB),
    }


def files_of(world: World) -> dict[str, tuple[int, int]]:
    """Return size and time of all files that there are, but for locks."""
    found = (
        path
        for path in world.top.rglob("*")
        if path.is_file() and not path.is_symlink() and "locks" not in path.parts
    )
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_what_a_stale_directory_holds_is_neither_moved_nor_saved_backed_up_or_restored_into(
    world: World,
) -> None:
    steps = taking(world)
    dir_epochs.note(s.ImageRef(100, 7, "raw", f"{world.store}/image"), 5, 4)
    before = files_of(world)
    for name, step in steps.items():
        with pytest.raises(StaleDirectory) as caught:
            world.on(step, seq=3)
        assert "at SEQ 4 another host took the VM over" in caught.value.detail, name
    assert files_of(world) == before


def test_what_cannot_be_told_of_a_directory_is_in_the_log(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    """As deploy says it, and goes on."""
    steps = taking(world)
    epochs = f"{world.store}/{dir_names.epochs()}"
    os.symlink(os.path.basename(epochs), epochs)  # cannot be listed
    with Session("localhost", "test", Config()) as session:
        session.run([steps["cpds"]])
        assert ["cannot be told" in text for text in session.warnings] == [True]
        session.begin([steps["mv"]])
        assert isinstance(session.read(), bytes), "the warning is no part of what is sent"
    os.unlink(world.store / "saved")

    def plan() -> Plan:
        yield On("localhost", (steps["cpds"],))

    front.carry_out(plan(), front.Action("cpds", [], Report("cpds")))
    assert "WARN: cpds: whether another host has taken VM 5 over cannot be told" in capfd.readouterr().err


@pytest.mark.fault(
    30,
    "a store that is not mounted, and a record that cannot be read, do not say that nobody has "
    "taken the VM over",
)
@pytest.mark.parametrize("away", ["not mounted", "damaged record"])
def test_what_waits_in_a_directory_of_which_nothing_is_known_is_kept(world: World, away: str) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x77 3M 64k")
    inode = os.stat(active(disk)).st_ino
    outgoing = f"{world.system}/.outgoing-5-{'ab' * 6}"
    world.on(s.PrepareVm(5, world.disk(5, 0, 103).vm_dir))
    os.rename(disk.vm_dir, outgoing)
    os.makedirs(f"{disk.vm_dir}/.semishared")
    if away == "not mounted":
        world.store.rename(world.top / "elsewhere")
        world.store.mkdir()
    else:
        Path(disk_names.record(outgoing, 1)).write_bytes(b"")
    assert retained_diffs.keep_set_aside(5, outgoing) != []
    (found,) = [path for path in world.system.rglob("*") if path.is_file() and path.stat().st_ino == inode]
    assert ".kept-5-" in str(found)
