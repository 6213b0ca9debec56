# SPDX-License-Identifier: Apache-2.0
"""The marker of a store: a directory without it is where a store is to be mounted, and no store.

The actions are the executables of this checkout; the store is a file system that is mounted and unmounted.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import pytest

from lab.oned import ActionFailed
from semishared.errors import OtherStore, StoreAbsent
from semishared.model.refs import ImageRef
from semishared.model.store.access import Access
from semishared.store.dir import marker
from semishared.store.dir.store import DirStore
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite

A, B = "a" * 32, "b" * 32


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up, mounted(up):
        yield up


@contextmanager
def mounted(site: ActionSite) -> Iterator[None]:
    """Have a file system of its own as the store; it survives its unmounting, beside the datastores."""
    disk = site.top / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "store", str(disk)], check=True)
    subprocess.run(["mount", "--bind", str(disk), str(site.store)], check=True)
    try:
        yield
    finally:
        for path in (site.store, disk):
            subprocess.run(["umount", "--lazy", str(path)], check=False, stderr=subprocess.DEVNULL)


def unmount(site: ActionSite) -> None:
    subprocess.run(["umount", str(site.store)], check=True)


def mark(site: ActionSite, store: str = A, said: str = A) -> None:
    """Write a marker, and what oned has of it, as `setup --apply` does."""
    side = site.store / ".semishared"
    side.mkdir(exist_ok=True)
    (side / "store").write_text(json.dumps({"version": 1, "id": store}))
    site.oned.datastore_update(STORE, {"SEMISHARED_STORE": said})


def everything(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.fault(9, "monitor of an unmounted store is an error, not the root file system's numbers")
def test_monitor_of_an_unmounted_store(site: ActionSite) -> None:
    mark(site)
    site.oned.datastore_monitor(STORE)
    assert site.oned.datastore(STORE).total_mb == 64 and site.warnings() == []
    unmount(site)
    said = site.refused("SS084", site.oned.datastore_monitor, STORE)
    assert str(site.store) in said and HERE in said
    assert everything(site.store) == []


@pytest.mark.fault(
    9, "nothing is uploaded, made or removed below the mount point of a store that is not mounted"
)
def test_datastore_actions_on_an_unmounted_store(site: ActionSite) -> None:
    image = site.image()
    mark(site)
    source = site.source(image)
    kept = everything(site.top / "disk")
    unmount(site)
    site.refused("SS084", site.image, "another")
    site.refused("SS084", site.oned.image_create, STORE, "empty", "", 4, "DATABLOCK", "raw")
    site.refused("SS084", site.oned.image_clone, image, "copy")
    # Before this, `rm` said that the image was gone.
    site.refused("SS084", site.oned.image_delete, image)
    assert everything(site.store) == []
    assert everything(site.top / "disk") == kept
    subprocess.run(["mount", "--bind", str(site.top / "disk"), str(site.store)], check=True)
    site.oned.image_enable(image)
    site.oned.image_delete(image)
    assert not source.exists()


@pytest.mark.fault(
    9, "no disk is linked, cloned or saved below the mount point of a store that is not mounted"
)
@pytest.mark.parametrize("action", ["ln", "clone", "clone shared", "clone copy", "cpds"])
def test_transfer_actions_on_an_unmounted_store(site: ActionSite, action: str) -> None:
    attributes = {"clone shared": {"SEMISHARED_PLACE": "shared"}, "clone copy": {"SEMISHARED_LOCAL": "copy"}}
    image = site.image(persistent=action == "ln", **attributes.get(action, {}))
    mark(site)
    vm = site.vm(image)
    source = site.source(image)
    disk = site.disk(vm)
    if action == "cpds":
        site.make("clone", vm)
    words = ("cpds", f"{HERE}:{disk}", site.store / ("c" * 32), -1, vm, STORE)

    def act() -> None:
        site.tm(*words) if action == "cpds" else site.make(action.split()[0], vm)

    unmount(site)
    # What somebody put below the mount point is no image of this datastore.
    (site.store / source.name).write_bytes(b"\0" * (8 << 20))
    before = everything(site.store)
    said = site.refused("SS084", act)
    assert str(site.store) in said
    assert everything(site.store) == before
    if action != "cpds":
        assert not os.path.lexists(disk)
    subprocess.run(["mount", "--bind", str(site.top / "disk"), str(site.store)], check=True)
    act()


@pytest.mark.fault(9, "a snapshot and a revert of a disk in place look for the store first")
def test_snapshots_on_an_unmounted_store(site: ActionSite) -> None:
    image = site.image(persistent=True)
    mark(site)
    vm = site.vm(image)
    disk = site.make("ln", vm)
    site.tm("snap_create", f"{HERE}:{disk}", 0, vm, STORE)
    source = site.source(image)
    unmount(site)
    (site.store / source.name).write_bytes(b"\0" * (8 << 20))
    before = everything(site.store)
    site.refused("SS084", site.tm, "snap_create", f"{HERE}:{disk}", 1, vm, STORE)
    site.refused("SS084", site.tm, "snap_delete", f"{HERE}:{disk}", 0, vm, STORE)
    site.refused("SS084", site.tm, "snap_revert", f"{HERE}:{disk}", 0, vm, STORE)
    assert everything(site.store) == before


@pytest.mark.fault(9, "the clone of a disk on a store that is not there is not said to be removed")
def test_delete_of_a_clone_on_an_unmounted_store(site: ActionSite) -> None:
    image = site.image(SEMISHARED_PLACE="shared")
    mark(site)
    vm = site.vm(image, image)
    disk = site.make("clone", vm)
    unmount(site)
    site.refused("SS084", site.tm, "delete", f"{HERE}:{disk}", vm, STORE)
    subprocess.run(["mount", "--bind", str(site.top / "disk"), str(site.store)], check=True)
    site.tm("delete", f"{HERE}:{disk}", vm, STORE)
    assert not [path for path in site.store.rglob("clones/*")]
    # What is the VM's own on its host goes though the store is away.
    persistent = site.image("mine", persistent=True)
    other = site.vm(persistent)
    disk = site.make("ln", other)
    unmount(site)
    site.tm("delete", f"{HERE}:{disk}", other, STORE)
    assert not os.path.lexists(disk)


@pytest.mark.fault(9, "the store of another datastore is refused")
def test_another_store(site: ActionSite) -> None:
    image = site.image(persistent=True)
    mark(site, store=B, said=A)
    vm = site.vm(image)
    for work in (
        lambda: site.make("ln", vm),
        lambda: site.oned.datastore_monitor(STORE),
        lambda: site.image("other"),
    ):
        assert B in site.refused("SS085", work)
    (site.store / ".semishared/store").write_text("not a marker")
    site.refused("SS024", site.oned.datastore_monitor, STORE)


def test_store_without_a_marker_works_and_warns(site: ActionSite) -> None:
    image = site.image(persistent=True)
    assert "SEMISHARED_STORE" in site.warnings()[0]
    disk = site.make("ln", site.vm(image))
    assert disk.exists() and "setup --apply" in site.warnings()[0]


@pytest.mark.fault(
    49,
    "also without a marker nothing is uploaded or removed where a store with images of ours is not mounted",
)
def test_a_store_without_a_marker_that_is_not_mounted(site: ActionSite) -> None:
    one, other = site.image("one"), site.image("other")
    kept = everything(site.top / "disk")
    unmount(site)
    for work in (
        lambda: site.image("third"),
        lambda: site.oned.image_create(STORE, "empty", "", 4, "DATABLOCK", "raw"),
        lambda: site.oned.image_clone(one, "copy"),
        lambda: site.oned.image_delete(one),
        lambda: site.oned.image_delete(other),
    ):
        assert "to be mounted" in site.refused("SS084", work)
    assert everything(site.store) == [] and everything(site.top / "disk") == kept


def test_the_first_upload_to_a_datastore_without_a_marker_is_taken(site: ActionSite) -> None:
    with pytest.raises(ActionFailed):
        site.oned.image_create(STORE, "bad", str(site.top / "nowhere"))
    site.image("good")


def test_setup_marks_a_mounted_store_once(site: ActionSite) -> None:
    assert "The store is marked" in site.cli("setup", "--apply").stdout
    store = site.oned.datastore(STORE).template["SEMISHARED_STORE"]
    assert json.loads((site.store / ".semishared/store").read_text()) == {"version": 1, "id": store}
    assert json.loads(site.cli("setup", "--apply", "--json").stdout)["store"] == store
    assert len(str(site.oned.datastore(STORE).template["SEMISHARED_CLOUD"])) == 32
    site.image()
    assert site.warnings() == []
    # A store that lost it gets it again, if it is the store.
    (site.store / ".semishared/store").unlink()
    site.refused("SS084", site.oned.datastore_monitor, STORE)
    site.cli("setup", "--apply")
    assert json.loads((site.store / ".semishared/store").read_text())["id"] == store


def test_setup_never_marks_a_mount_point(site: ActionSite) -> None:
    unmount(site)
    said = site.cli("setup", "--apply").stdout
    assert "not marked yet: nothing is mounted" in said and everything(site.store) == []
    site.cli("setup", "--apply", "--is-store")
    assert (site.store / ".semishared/store").exists()


def test_setup_adopts_a_store_with_the_images_that_oned_knows(site: ActionSite) -> None:
    """A store of 0.1.0; that it is no mount point makes no difference, the front-end may export it."""
    unmount(site)
    image, gone = site.image("one"), site.image("two")
    os.rename(site.source(gone), site.store / "aside")
    assert "1 of 2 images are not in it" in site.cli("setup", "--apply").stdout
    assert "SEMISHARED_STORE" not in site.oned.datastore(STORE).template
    os.rename(site.store / "aside", site.source(gone))
    assert "The store is marked" in site.cli("setup", "--apply").stdout
    disk = site.make("clone", site.vm(image))
    record = json.loads((disk.parent / ".semishared/disk.0.json").read_text())
    assert record["image"]["access"]["marker"] == site.oned.datastore(STORE).template["SEMISHARED_STORE"]


def test_setup_refuses_the_store_of_another_datastore(site: ActionSite) -> None:
    mark(site)
    other = site.location / "102"
    (other / ".semishared").mkdir(parents=True)
    (other / ".semishared/store").write_text(json.dumps({"version": 1, "id": A}))
    site.oned.datastore_create('NAME="second" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared"', 102)
    said = site.cli("setup", "--apply", "--image", "second", code=1).stderr
    assert "holds the store of datastore 100" in said
    assert SYSTEM in site.oned.datastores


def test_records_of_before_work(site: ActionSite) -> None:
    """A disk whose record says nothing of a marker: nothing is known, nothing is refused."""
    image = site.image(persistent=True)
    disk = site.make("ln", site.vm(image))
    assert "access" not in json.loads((disk.parent / ".semishared/disk.0.json").read_text())["image"]
    mark(site)
    site.tm("snap_create", f"{HERE}:{disk}", 0, 0, STORE)
    assert (Path(f"{site.source(image)}.snap") / "0").exists()


def test_write_to_a_store_that_is_another_is_said_by_each(site: ActionSite, capfd: Any) -> None:
    mark(site, said=B)
    with pytest.raises(ActionFailed, match="another datastore's store"):
        site.image()


def test_nothing_that_comes_from_elsewhere_is_written_to_where_the_store_is_not(tmp_path: Path) -> None:
    access = Access("dir", marker=A)
    image = ImageRef(STORE, 7, "raw", f"{tmp_path}/{'c' * 32}", access=access)
    with pytest.raises(StoreAbsent):
        DirStore(access).receive(image, 4096, [(0, b"x" * 4096)], str)
    assert everything(tmp_path) == []
    marker.write(str(tmp_path), B)
    with pytest.raises(OtherStore):
        DirStore(access).receive(image, 4096, [(0, b"x" * 4096)], str)
    assert everything(tmp_path) == [".semishared", ".semishared/store"]
