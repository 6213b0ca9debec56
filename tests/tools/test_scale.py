# SPDX-License-Identifier: Apache-2.0
"""As much as a cloud may have: images of a datastore, VMs of a host, extents of an image, and the longest
names and paths.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Type, TypeVar

import pytest

from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import IN_PLACE
from semishared.model.disk.record import Record
from semishared.model.leftover_steps import (
    BaseStore,
    Domains,
    LookAround,
    Seen,
    SeenBase,
    SeenClone,
    SeenLease,
    SeenMachine,
    SeenSide,
    SeenStore,
    SeenVm,
    Staged,
)
from semishared.model.store import datastore_steps as d
from semishared.model.store import dir_names
from semishared.model.store import image_steps as i
from semishared.plan.care import gc
from semishared.store.dir import leftovers
from semishared.tools import extents, files
from tools.world import World

IMAGES, VMS, EXTENTS = 12_000, 2000, 100_000
LOCATION = "/ds"


def image_name(number: int) -> str:
    return f"{number:032x}"


@pytest.mark.fault(40, "gc sees all of 12,000 images in a datastore, and what lies beside each")
def test_a_datastore_with_many_images_is_looked_through(tmp_path: Path) -> None:
    side = tmp_path / dir_names.side()
    side.mkdir()
    for number in range(IMAGES):
        (tmp_path / image_name(number)).touch()
        (side / image_name(number)).mkdir()
    (side / image_name(7) / disk_names.staged("manifest", "x")).touch()
    found = leftovers.look(str(tmp_path))
    assert [len(rows) for rows in (found.images, found.sides, found.staged)] == [IMAGES, IMAGES, 1]
    assert found.staged[0].path == f"{side}/{image_name(7)}/{disk_names.staged('manifest', 'x')}"
    assert {row.path for row in found.sides} == {f"{side}/{image_name(number)}" for number in range(IMAGES)}


@pytest.mark.fault(40, "2,000 VMs of a host are all in its report, and all seen by gc")
def test_a_host_with_many_vms_reports_them_all(world: World) -> None:
    record = Record(0, IN_PLACE, "raw", "/images/x").to_data()
    for vm in range(VMS):
        vm_dir = str(world.system / str(vm))
        os.makedirs(disk_names.records(vm_dir))
        Path(disk_names.record(vm_dir, 0)).write_text(json.dumps(record))
    report, around = world.on(
        base_steps.ReportDisks(str(world.location), (101,)),
        LookAround(str(world.location), (101,), (str(world.store),), False),
    )
    assert {row["vm"] for row in report["vms"]} == set(range(VMS))  # type: ignore[index]
    assert {row["vm"] for row in around["vms"]} == set(range(VMS))  # type: ignore[index]


@pytest.mark.fault(
    40, "the manifest of an image of 100,000 extents, all with data, is written, sent and read again"
)
def test_a_manifest_of_many_extents(tmp_path: Path) -> None:
    made = extents.Manifest("raw", EXTENTS * extents.EXTENT, {at: f"{at:064x}" for at in range(EXTENTS)})
    path = str(tmp_path / "manifest")
    files.write(path, made.text())
    read = extents.parse(files.read(path, extents.MANIFEST_LIMIT))
    assert read == made and read.generation == made.generation


class Counted(str):
    """A path that counts how often it is compared with another one, or looked into."""

    asked = 0

    def __lt__(self, other: str) -> bool:
        Counted.asked += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        Counted.asked += 1
        return super().__eq__(other)

    def startswith(self, *words: Any) -> bool:
        Counted.asked += 1
        return super().startswith(*words)

    __hash__ = str.__hash__


Kind = TypeVar("Kind", bound=Seen)


def item(kind: Type[Kind], path: str, /, **more: Any) -> Kind:
    return kind(path=path, seen="1", age=9999, bytes=10, **more)


def left_over(images: int, vms: int) -> tuple[List[gc.Finding], int]:
    """Return what gc finds of so many images, each with a clone of a VM that is no more and a staged file,
    and VMs; and what it asked.
    """
    side, system = f"{LOCATION}/100/.semishared", f"{LOCATION}/101"
    sides = []
    for at in range(images):
        path = f"{side}/{image_name(at)}"
        clone = item(SeenClone, f"{path}/clones/{vms + at}-0", vm=vms + at, disk=0, cloud="")
        sides.append(item(SeenSide, path, name=image_name(at), clones=[clone], entries=[], image=True))
    staged = [item(Staged, f"{side}/{image_name(at)}/.staged-manifest.x") for at in range(images)]
    store = SeenStore(f"{LOCATION}/100", [], sides, staged, [], [])
    own = [
        item(SeenVm, f"{system}/{vm}", system=101, vm=vm, kind="dir", entries=["disk.0"], staged=[])
        for vm in range(vms)
    ]
    path = f"{LOCATION}/.semishared/bases/100-1-a"
    leases = [SeenLease(f"{path}/leases/{vm}-0", 9999, vm, 0) for vm in range(vms)]
    base = item(SeenBase, path, name="100-1-a", staged=[], leases=leases)
    used = [Counted(f"{system}/{vm}/disk.0") for vm in range(vms // 2)]
    root, domains = BaseStore([base], [], []), Domains(files=list(used))
    facts = SeenMachine(list(used), False, root, [], own, [], [], domains, [store], [])
    Counted.asked = 0
    return gc.find(
        [gc.Machine("h1", LOCATION, facts)], gc.Known({}, frozenset(), frozenset()), 0, True
    ), Counted.asked


@pytest.mark.fault(41, "what gc asks of what is in use grows no faster than what it finds")
def test_what_gc_asks_grows_as_what_it_finds() -> None:
    found, asked = left_over(IMAGES, VMS)
    assert Counter(item.kind for item in found) == {"clone": IMAGES, "staged": IMAGES, "vm": VMS}
    assert {item.keep for item in found if item.kind == "vm"} == {"", "a domain uses its files"}
    assert asked <= len(found)


def made(world: World, image: s.ImageRef) -> Dict[str, List[s.Step]]:
    """Return what happens to an image, one thing after the other."""
    store, copied = str(world.store), f"{world.store}/{'a' * 32}"
    return {
        "overlay": world.cloning(image, world.disk(5)),
        "clone on the store": [s.PrepareVm(8, world.disk(8).vm_dir), s.CloneOnStore(world.disk(8), image, 0)],
        "in place": [
            s.PrepareVm(7, world.disk(7).vm_dir),
            s.LinkInPlace(world.disk(7), image, False, session=True),
        ],
        "snapshot": [i.KeepSnapshot(image, 1)],
        "revert": [d.RevertImage(image, 1)],
        "copy": [d.CopyStored(image._replace(source=copied), image.source)],
        "save": [s.SaveDisk(world.disk(5), f"{store}/{'b' * 32}", "raw", "")],
        "removal of a clone": [s.RemoveDisk(world.disk(8), store)],
        "removal": [d.RemoveImage(image)],
    }


@pytest.mark.fault(
    40, "an image has the longest name beside which there is room for its snapshots, and all is done with it"
)
@pytest.mark.parametrize("length", [190, 250])
def test_the_longest_names(world: World, length: int) -> None:
    image = world.image("n" * length, size=8 << 20)
    for steps in made(world, image).values():
        world.on(*steps)
    assert world.leftovers() == [] and not Path(image.source).exists()


@pytest.mark.fault(
    40, "an image with a name of 255 bytes is refused in a line that says it, and stays as it is"
)
def test_a_name_that_is_too_long(world: World) -> None:
    image = world.image("n" * 255, size=8 << 20)
    before = world.content(image.source)
    steps = made(world, image)
    for name in ("overlay", "clone on the store", "in place", "snapshot", "revert", "copy"):
        with pytest.raises(SemisharedError, match="name too long") as refused:
            world.on(*steps[name])
        assert "Traceback" not in refused.value.detail
    assert world.content(image.source) == before and world.leftovers() == []


@pytest.mark.fault(
    40,
    "where a path is longer than qcow2 can name, an overlay is refused with that reason, and what "
    "needs none is made",
)
def test_a_path_that_no_overlay_can_name(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 220] * 16)
    world = World(Path(str(deep)[:3900].rstrip("/")))
    image = world.image(size=8 << 20)
    steps = made(world, image)
    with pytest.raises(SemisharedError, match="more than 1023 bytes"):
        world.on(*steps["overlay"])
    for name in ("in place", "snapshot", "revert", "copy", "removal"):
        world.on(*steps[name])
    assert world.leftovers() == []
