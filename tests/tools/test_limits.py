# SPDX-License-Identifier: Apache-2.0
"""What is longer, deeper or another thing than what a reader expects: it is judged, and stops nobody's
report.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from semishared.disk import epoch_check
from semishared.errors import BadRecord, StoreUnavailable, TooLarge, UnknownClaim
from semishared.host import probe
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import IN_PLACE
from semishared.model.disk.record import Record
from semishared.model.refs import ImageRef
from semishared.model.store import dir_names
from semishared.store.commit import claims
from semishared.store.dir import marker
from semishared.tools import files, locks, signatures
from semishared.vmm import records as at_start
from tools.world import World

DEEP = "[" * 100_000


@pytest.mark.fault(
    40,
    "a plain file with a number for its name in a system datastore is nobody's VM, and the host's "
    "status goes on",
)
def test_a_file_among_vms_stops_no_report(world: World) -> None:
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir))
    system = Path(disk.vm_dir).parent
    (system / "77").write_text("")
    (system / "6" / ".semishared").mkdir(parents=True)
    (system / "6" / ".semishared" / "disk.0.json").mkdir()
    (found,) = world.on(base_steps.ReportDisks(str(system.parent), (int(system.name),)))
    assert {row["vm"]: bool(row["error"]) for row in found["vms"]} == {5: False, 6: True}  # type: ignore[index]


@pytest.mark.fault(
    40,
    "what is nested 100,000 deep is no record, no claim, no marker, no note and no signature, and "
    "nobody's traceback",
)
def test_what_is_nested_without_end_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "disk.0.json"
    path.write_text(DEEP)
    assert probe._source(str(path)) == "" and files.hint(str(path)) == {}
    with pytest.raises(BadRecord):
        Record.parse(0, DEEP.encode())
    with pytest.raises(UnknownClaim):
        claims.parse("/store/image", DEEP)
    with open(path, encoding="utf-8") as file:
        assert locks.noted(file) == {}
    side = tmp_path / dir_names.side()
    side.mkdir()
    (side / dir_names.MARKER).write_text("[" * 4000)
    with pytest.raises(StoreUnavailable):
        marker.read(str(tmp_path))
    (tmp_path / f"{signatures.SIGNATURE}{'a' * 16}").write_text(DEEP)
    assert signatures.signature(str(tmp_path), "a" * 16)["count"] == 0


@pytest.mark.fault(
    40, "a record, marker or note that its reader would cut off is not written, and what was there stays"
)
def test_what_would_be_cut_off_is_not_written(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    fits = {"x": "y" * (disk_names.JSON_BYTES - 10)}
    files.write_json(path, fits)
    assert Path(path).stat().st_size == disk_names.JSON_BYTES and files.read_json(path) == fits
    with pytest.raises(TooLarge):
        files.write_json(path, {"x": "y" * (disk_names.JSON_BYTES - 9)})
    assert files.read_json(path) == fits
    with open(tmp_path / "lock", "w+", encoding="utf-8") as file:
        with pytest.raises(TooLarge):
            locks.note(file, {"x": "y" * locks.LONGEST_NOTE})
        locks.note(file, {"x": "y"})
        assert locks.noted(file) == {"x": "y"}
    with pytest.raises(TooLarge):
        marker.write(str(tmp_path), "a" * 32, "b" * marker.LIMIT)
    assert marker.read(str(tmp_path)) == ""


@pytest.mark.fault(
    40, "a record with paths of 4,096 bytes, in any alphabet, is read by whoever reads records"
)
def test_the_longest_paths_of_a_record(tmp_path: Path) -> None:
    source = "/" + "/".join(["\u00e4" * 127] * 16)
    assert 4000 < len(source.encode()) <= 4096
    image = ImageRef(100, 7, "raw", source, "a" * 32)
    record = Record(0, IN_PLACE, "raw", source, image=image)
    vm_dir = tmp_path / "5"
    Path(disk_names.records(str(vm_dir))).mkdir(parents=True)
    # What a later version may add is read as well, up to what a record may have.
    files.write_json(disk_names.record(str(vm_dir), 0), {**record.to_data(), "later": "x" * 70_000})
    assert len(Path(disk_names.record(str(vm_dir), 0)).read_bytes()) > 1 << 16
    assert probe._source(disk_names.record(str(vm_dir), 0)) == source
    assert [it and it.source for it in epoch_check._images(str(vm_dir), None)] == [source]
    assert [it.image and it.image.source for it in at_start.read_records(str(vm_dir), [0])] == [source]
