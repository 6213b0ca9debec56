# SPDX-License-Identifier: Apache-2.0
"""What a host that was given up for lost has of a VM, in real directories: known by the epoch in the VM's stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semishared.disk import overtaken
from semishared.errors import StaleDirectory
from semishared.model import layout, layout_store
from semishared.model.place import IN_PLACE, OVERLAY
from semishared.model.record import Record
from semishared.model.refs import ImageRef
from semishared.model.stores import Access
from semishared.store import dir_epochs
from tools.slow_disk import SlowDisk

CLOUD = "c" * 32


@pytest.fixture
def stay(tmp_path: Path) -> tuple[str, ImageRef]:
    return made(tmp_path / "100", tmp_path / "101/7")


def made(store: Path, directory: Path) -> tuple[str, ImageRef]:
    """Return a VM directory of SEQ 3 with an overlay and a disk in place, and an image of the one store."""
    store.mkdir()
    (directory / ".semishared").mkdir(parents=True)
    of = ImageRef(100, 5, "raw", f"{store}/{'a' * 32}", "ab" * 16, Access(cloud=CLOUD))
    Path(layout.history_note(str(directory))).write_text(json.dumps({"version": 1, "seq": 3}))
    for number, place in ((0, IN_PLACE), (1, OVERLAY)):
        record = Record(number, place, "raw", f"{directory}/disk.{number}", image=of)
        Path(layout.record(str(directory), number)).write_text(json.dumps(record.to_data()))
    return str(directory), of


def test_a_directory_that_is_older_than_its_vms_epoch_is_refused(stay: tuple[str, ImageRef]) -> None:
    directory, of = stay
    assert overtaken.check(7, directory) == ""
    for epoch in (2, 3):
        dir_epochs.note(of, 7, epoch)
        assert overtaken.check(7, directory) == ""
    dir_epochs.note(of, 8, 9)
    dir_epochs.note(of._replace(access=Access(cloud="d" * 32)), 7, 9)
    assert overtaken.check(7, directory) == "", "another VM's, another cloud's"
    dir_epochs.note(of, 7, 4)
    with pytest.raises(StaleDirectory, match="SEQ 3 .* SEQ 4"):
        overtaken.check(7, directory)
    Path(layout.history_note(directory)).write_text("{")
    with pytest.raises(StaleDirectory):
        overtaken.check(7, directory)


def test_a_record_that_nobody_understands_hides_no_other(stay: tuple[str, ImageRef]) -> None:
    directory, of = stay
    dir_epochs.note(of, 7, 4)
    Path(layout.record(directory, 0)).write_text("nonsense")
    with pytest.raises(StaleDirectory):
        overtaken.check(7, directory)
    Path(layout.record(directory, 1)).unlink()
    assert overtaken.check(7, directory) == "" == overtaken.check(8, f"{directory}-none")


def test_an_epoch_is_a_name_and_earlier_ones_go(stay: tuple[str, ImageRef]) -> None:
    _, of = stay
    for epoch in (4, 11, 9):
        dir_epochs.note(of, 7, epoch)
    names = [path.name for path in Path(of.root, layout_store.epochs()).iterdir()]
    assert names == [f"7-11-{CLOUD}"] and dir_epochs.read(of, 7) == 11
    assert layout_store.epoch_named(names[0]) == (7, 11, CLOUD)
    assert layout_store.epoch_named("7-11") == (7, 11, "")
    assert not layout_store.epoch_named("7") and not layout_store.epoch_named(".staged-7-1")


def test_a_store_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path, 32 << 20, {})
    try:
        directory, of = made(disk.mount / "100", tmp_path / "101/7")
        dir_epochs.note(of, 7, 4)
        disk.forget_cached()
        disk.hang()
        assert "does not answer" in overtaken.check(7, directory)
        disk.go_on()
        with pytest.raises(StaleDirectory):
            overtaken.check(7, directory)
    finally:
        disk.end()
