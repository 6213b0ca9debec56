# SPDX-License-Identifier: Apache-2.0
"""What killed actions have left of a VM that is off, in a temporary directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

from semishared.disk import recovery, snapshots
from semishared.model.base import names as base_names
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import OVERLAY, REMOTE_FIRST
from semishared.model.disk.record import Record
from semishared.model.disk.snapshot_steps import LookAtDisk, UnsettledDisk
from semishared.model.refs import DiskRef, ImageRef
from semishared.tools import files


def test_lease_of_a_disk_goes_that_was_to_be_detached_when_it_only_had_its_delta(tmp_path: Path) -> None:
    vm_dir, image = f"{tmp_path}/101/42", ImageRef(100, 7, "raw", f"{tmp_path}/100/9b66", "3d" * 16)
    base = base_names.base(disk_names.base_store_of(vm_dir), image.base_name)
    os.makedirs(base_names.leases(base))
    os.makedirs(disk_names.records(vm_dir))
    noted = []
    for disk, place in ((1, REMOTE_FIRST), (2, OVERLAY), (3, REMOTE_FIRST)):
        record = Record(disk, place, "qcow2", f"{vm_dir}/disk.{disk}.snap/0", False, image)
        Path(disk_names.record(vm_dir, disk)).write_text(json.dumps(record.to_data()), encoding="utf-8")
        Path(base_names.lease(base, 42, disk)).write_text("", encoding="utf-8")
        os.makedirs(os.path.dirname(record.path))
        Path(record.path).write_text("", encoding="utf-8")
        os.symlink(record.path, f"{vm_dir}/disk.{disk}")
        noted += [record.to_data()] if disk < 3 else []
    Path(disk_names.delta_note(vm_dir)).write_text(
        json.dumps({"version": 1, "disks": noted}), encoding="utf-8"
    )
    recovery.recover(vm_dir, "")
    assert not os.path.exists(disk_names.delta_note(vm_dir))
    assert sorted(os.listdir(base_names.leases(base))) == ["42-2", "42-3"], (
        "of an overlay, and of one that nothing was begun with"
    )


def test_disk_of_which_something_is_begun_is_not_looked_at_and_nothing_is_ended(tmp_path: Path) -> None:
    vm_dir = f"{tmp_path}/101/42"
    record = Record(
        0,
        OVERLAY,
        "qcow2",
        f"{vm_dir}/disk.0.snap/0",
        False,
        ImageRef(100, 7, "raw", f"{tmp_path}/100/9b66", "3d" * 16),
    )
    os.makedirs(disk_names.records(vm_dir))
    files.write_json(disk_names.record(vm_dir, 0), record.to_data())
    note = disk_names.job_note(vm_dir, 0)
    files.write_json(note, {})
    assert snapshots.look_at(LookAtDisk(DiskRef(42, 0, vm_dir), "")) == UnsettledDisk(True)
    assert os.path.exists(note)
