# SPDX-License-Identifier: Apache-2.0
"""Readers of records, notes, journals, labels and listings, and seven damages to what each reads; in one
process.

That these are all, and what readers of less weight make of it: tests/unit/test_readers.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

import pytest

from semishared.disk import epoch_check, history, records, recovery, report, retained_diffs, vm_dir
from semishared.errors import SemisharedError
from semishared.guest import active_layer, freeze
from semishared.model import steps as s
from semishared.model.base.steps import ReportDisks
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import DIFF
from semishared.model.disk.record import Record
from semishared.model.share import names as share_names
from semishared.model.share.share import Share, Tree
from semishared.model.store import dir_names
from semishared.named import to_data
from semishared.share import life
from semishared.store.dir import epochs as dir_epochs
from semishared.store.dir import image as dir_image
from semishared.store.dir import journal, marker
from semishared.store.dir.image import Stored
from semishared.tools import files, layers, locks
from semishared.vmm import records as at_start
from tools.unreadable import dead, eio
from tools.world import MiB, World, make_image

ID = "0123456789abcdef" * 2


class Reader(NamedTuple):
    """Where a file is, what reads it, and what that says of one that is gone though something names it."""

    path: Path
    read: Callable[[], object]
    root: Path
    """The mount point of what it is on."""
    gone: object = "refused"
    """What is returned; or `refused`: something names it, or it has to be there."""
    away: object = None
    """The same where nothing is mounted; None: as `gone`."""
    torn: object = "refused"
    """What is returned of one without sense: a token that is none of those that are asked for."""


def put(path: Path, data: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def made(world: World) -> Dict[str, Reader]:
    """Make one of each."""
    image = s.ImageRef(100, 7, "raw", f"{world.store}/image")
    disk, own = world.disk(), world.disk().vm_dir
    stored, tree = Stored(image.source), Tree("plain", str(world.top / "shares"), ID)
    side, folder, system = Path(stored.side), Path(disk_names.layers(disk.path)), world.system
    record = Record(
        1, DIFF, "qcow2", disk_names.layer(disk.path, 1), image=image._replace(generation="ab" * 16)
    )
    pulled = Path(disk_names.layers(stored.clone(5, 1)))
    for directory in (side, folder, pulled, Path(disk_names.records(own))):
        directory.mkdir(parents=True)
    make_image(folder / "1", "qcow2", MiB)
    os.symlink(disk_names.layer("disk.1", 1), disk.path)
    epochs = Path(f"{world.store}/{dir_names.epochs()}")
    put(Path(marker.path_in(str(world.store))), {"version": 1, "id": ID})
    job = {"version": 1, "run": "7"}
    of_share = {"version": 1, "source": f"{tree.root}/share-7", "share": Share(7, 3, 1, 16 * MiB).to_data()}
    of: Dict[str, Reader] = {
        "a disk's record": Reader(
            put(Path(disk_names.record(own, 1)), record.to_data()),
            lambda: records.as_found(own, 1),
            system,
            None,
        ),
        "the same at the start": Reader(
            Path(disk_names.record(own, 1)), lambda: at_start.read_records(own, [1]), system, []
        ),
        "a VM's history": Reader(
            put(Path(disk_names.history_note(own)), {"version": 1, "seq": 3}),
            lambda: history.refuse_late(5, own, 4),
            system,
            None,
        ),
        "deltas": Reader(
            put(Path(disk_names.go_over_note(own)), {"version": 1, "disks": []}),
            lambda: active_layer.noted(own),
            system,
            [],
        ),
        "deltas of an older version": Reader(
            put(Path(disk_names.delta_note(world.disk(6).vm_dir)), {"version": 1, "disks": []}),
            lambda: active_layer.noted(world.disk(6).vm_dir),
            system,
            [],
        ),
        "a job": Reader(
            put(Path(disk_names.job_note(own, 1)), job), lambda: recovery.check_there(own), system, None
        ),
        "a rest": Reader(
            put(Path(disk_names.rest_note(own)), {"how": "AGENT"}), lambda: freeze.wake(own, ""), system, True
        ),
        "a clone that is to be": Reader(
            put(Path(disk_names.clone_note(own, 1)), {"clone": ""}),
            lambda: vm_dir._clones(disk, None),
            system,
            [],
        ),
        "shares at the start": Reader(
            put(Path(share_names.clients(own)), {"version": 1, "disks": []}),
            lambda: at_start.share_note(own)[0],
            system,
            [],
        ),
        "a layer": Reader(folder / "1", lambda: layers.is_empty(str(folder / "1")), system),
        "a share": Reader(
            put(Path(f"{tree.root}/{share_names.record(7)}"), of_share),
            lambda: life.read(tree, 7),
            Path(tree.root),
            None,
        ),
        "a claim": Reader(
            put(Path(dir_names.owner(str(side))), "{}"),
            lambda: journal.claim(stored),
            world.store,
            None,
        ),
        "a journal": Reader(
            put(Path(dir_names.journal(dir_names.commit(str(side)))), "{}"),
            lambda: journal._read(dir_names.commit(str(side))),
            world.store,
        ),
        "a marker": Reader(
            Path(marker.path_in(str(world.store))), lambda: marker.check(str(world.store), ID), world.store
        ),
        "a pull": Reader(
            put(Path(dir_names.pull_note(str(pulled))), {"layer": ""}),
            lambda: files.read_json(dir_names.pull_note(str(pulled))),
            world.store,
            None,
        ),
        "a session": Reader(
            put(Path(dir_names.session(str(side))), f"{ID}\n"),
            lambda: dir_image.session(stored) == ID,
            world.store,
            False,
            torn=False,
        ),
        "a manifest": Reader(
            put(Path(dir_names.manifest(str(side))), "1"),
            lambda: dir_image.manifest(stored, ID),
            world.store,
        ),
        "epochs": Reader(
            put(epochs / dir_names.epoch_name(5, 4, ""), ""),
            lambda: dir_epochs.read(image, 5),
            world.store,
            -1,
            "refused",
            4,
        ),
        "a lock": Reader(
            put(world.root / "locks/vm-5", "{}"),
            lambda: locks.is_held(str(world.root / "locks/vm-5")),
            world.root,
            False,
            torn=False,
        ),
    }
    return of


READERS = (
    "a disk's record",
    "the same at the start",
    "a VM's history",
    "deltas",
    "deltas of an older version",
    "a job",
    "a rest",
    "a clone that is to be",
    "shares at the start",
    "a layer",
    "a share",
    "a claim",
    "a journal",
    "a marker",
    "a pull",
    "a session",
    "a manifest",
    "epochs",
    "a lock",
)


def outcome(read: Callable[[], object]) -> object:
    """Return what a reader returns, `refused` where it says what is wrong instead."""
    try:
        return read()
    except SemisharedError as e:
        assert "/" in e.detail, e.detail
    except OSError as e:
        assert e.filename or e.strerror
    return "refused"


def test_the_table_is_whole(world: World) -> None:
    assert tuple(made(world)) == READERS


@pytest.mark.fault(
    30,
    "no reader takes what is zeroed, cut, a directory, unreadable, not to be asked or not mounted for absent",
)
@pytest.mark.parametrize("name", READERS)
def test_seven_damages(world: World, name: str) -> None:
    reader = made(world)[name]
    path, text = reader.path, reader.path.read_bytes()
    found = {}
    if text:
        path.write_bytes(bytes(len(text)))
        found["zeroed"] = outcome(reader.read)
        path.write_bytes(text[: len(text) // 2])
        found["cut"] = outcome(reader.read)
        path.write_bytes(text)
    expected: Dict[str, Any] = dict.fromkeys(found, reader.torn)
    with eio(path):
        found["EIO"] = outcome(reader.read)
    expected["EIO"] = {"epochs": 4, "a lock": False}.get(
        name, "refused"
    )  # these are names: they are not read
    with dead(path):
        found["no answer"] = outcome(reader.read)
    expected["no answer"] = {"epochs": 4, "a lock": True}.get(name, "refused")
    path.unlink()
    found["gone"], expected["gone"] = outcome(reader.read), reader.gone
    path.mkdir()
    found["a directory"] = outcome(reader.read)
    expected["a directory"] = {"epochs": 4, "a lock": True}.get(name, "refused")
    reader.root.rename(world.top / "elsewhere")
    reader.root.mkdir(parents=True)
    found["not mounted"], expected["not mounted"] = (
        outcome(reader.read),
        reader.gone if reader.away is None else reader.away,
    )
    assert found == expected


@pytest.mark.fault(30, "doctor and status name what cannot be read, and go on to what can")
def test_what_cannot_be_read_is_shown(world: World) -> None:
    of = made(world)
    own, other = world.disk().vm_dir, world.disk(6)
    world.on(s.PrepareVm(6, other.vm_dir), s.CreateVolatile(other, MiB, "raw", ""))
    with eio(of["a disk's record"].path):
        found = to_data(report.report(ReportDisks(str(world.location), (101,))))
        rows = {row["vm"]: row for row in found["vms"]}
        assert [disk["disk"] for disk in rows[6]["disks"]] == [1] and "wrong" not in rows[6]
        assert "disk.1.json" in rows[5]["wrong"]["1"] and rows[5]["disks"] == []
        assert any("disk.1.json" in text for text in report.listed(own))
    of["a VM's history"].path.write_text("")
    of["a job"].path.write_text("")
    damaged = " ".join(report.listed(own))
    assert "vm.json" in damaged and "job.1.json" in damaged
    assert report.listed(other.vm_dir) == []
    record = records.as_found(own, 1)
    assert record and retained_diffs.may_wait(
        record._replace(path=disk_names.layer(disk_names.disk(own, 1), 9))
    )
    assert epoch_check.check(6, other.vm_dir) == ""
