# SPDX-License-Identifier: Apache-2.0
"""What attributes of OpenNebula's own drivers ask for, in the kill suite: disks that are not sparse, images
in another format, the marker of a store that a bridge has.
"""

from __future__ import annotations

import os
from typing import Any, Callable, List
from unittest import mock
from xml.etree import ElementTree

from semishared.front import action as front
from semishared.model import steps as s
from semishared.model.exchange import Plan
from semishared.model.store.access import MOUNTED
from semishared.model.store.datastore_steps import CopyAcross, MarkStore
from semishared.opennebula import args
from semishared.opennebula.report import Report
from semishared.opennebula.xml import Disk
from semishared.plan.disk import disks

from .cases import (
    OPTIONS,
    QCOW2,
    RAW,
    VM,
    Case,
    Environment,
    MiB,
    Stored,
    facts,
    from_image,
    oned,
    plan,
    source,
    warm,
)
from .rig import Rig

STORE_ID = "ab" * 16
SIZE = 8 * MiB


def carried(rig: Rig, environment: Environment, whole: Plan) -> None:
    """Carry out a plan of several messages, as the front-end does."""
    action = front.Action("clone", [], Report("clone"))
    with rig.sessions(environment), mock.patch.object(front, "ask_oned", oned(rig)):
        front.carry_out(whole, action)


def has_all_blocks(rig: Rig, disk: int = 0) -> bool:
    """Tell whether all blocks of a disk's file are there."""
    path = rig.inside(f"101/{VM}/disk.{disk}")
    return int(rig.run("a", ["stat", "--dereference", "--format=%b", path]).stdout) * 512 >= SIZE


def _dense(name: str, made: Callable[[Rig], Plan], **rest: Any) -> Case:
    """Return the case of a disk that its plan makes and allocates: at its end all blocks are there."""

    def act(rig: Rig, environment: Environment) -> None:
        carried(rig, environment, made(rig))
        assert has_all_blocks(rig), f"{name}: blocks are missing"

    return Case(name, act, **rest)


def _cloned(image: Stored, **attributes: Any) -> Callable[[Rig], Plan]:
    told = facts(image, SPARSE="no", **attributes)
    return lambda rig: disks.clone(from_image(rig, source(rig, image)), *told, OPTIONS)


def _volatile(format: str) -> Callable[[Rig], Plan]:
    disk = Disk(ElementTree.fromstring("<DISK><DISK_ID>0</DISK_ID><SPARSE>no</SPARSE></DISK>"))
    return lambda rig: disks.mkimage(
        args.NewDisk.parse(["8", format, f"a:{rig.inside(f'101/{VM}/disk.0')}", str(VM), "101"]), disk
    )


def _converted(image: Stored, format: str) -> Case:
    def act(rig: Rig, environment: Environment) -> List[object]:
        new = s.ImageRef(100, 9, format, rig.inside(f"100/{os.urandom(16).hex()}"))
        step = CopyAcross(new, source(rig, image), image.format, MOUNTED, SIZE)
        return plan(rig, "a", [step], environment)

    return Case(f"datastore clone, {image.format} to {format}", act, orphans=1)


def mark(rig: Rig, environment: Environment) -> List[object]:
    """Have a bridge mark the store, as `setup --apply` does: its images say that this is the store."""
    step = MarkStore(rig.inside("100"), STORE_ID, (source(rig, RAW), source(rig, QCOW2)), False)
    found = plan(rig, "a", [step], environment)
    assert found == [STORE_ID]
    return found


STOCK_CASES = [
    _dense("clone overlay not sparse", _cloned(RAW), setup=warm(RAW)),
    _dense("clone overlay not sparse qcow2", _cloned(QCOW2), setup=warm(QCOW2)),
    _dense("clone copy not sparse", _cloned(RAW, SEMISHARED_LOCAL="copy"), setup=warm(RAW)),
    _dense("clone remote-first not sparse", _cloned(RAW, SEMISHARED_LOCAL="remote-first")),
    _dense("clone on store not sparse", _cloned(RAW, SEMISHARED_PLACE="shared")),
    _dense("mkimage raw not sparse", _volatile("raw")),
    _dense("mkimage qcow2 not sparse", _volatile("qcow2")),
    _converted(RAW, "qcow2"),
    _converted(QCOW2, "raw"),
    Case("datastore mark the store", mark),
]
