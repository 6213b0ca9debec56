# SPDX-License-Identifier: Apache-2.0
"""Attributes of OpenNebula's own drivers, through the executables as oned calls them: what cannot work is
refused by name where it is first read, and stops nothing from going; what can work does.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import pytest

import pool_devices
from lab.oned import IMAGE_DS, ActionFailed, objects
from semishared.config import Config
from semishared.errors import BadAttribute, SemisharedError, StoreAbsent
from semishared.front import stock_conf, stores
from semishared.model.device.steps import SetDevices
from semishared.opennebula.xml import Datastore
from semishared.plan.disk.backup import Priority, priority
from semishared.store.dir import marker
from semishared.tools import qemu_img
from semishared.wire.session import Session
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite
from tools.world import MiB, allocated, qemu_io

REFUSED_OF_DATASTORES = {
    "NFS_AUTO_ENABLE": "YES",
    "CACHE_ENABLE": "yes",
    "RBD_FORMAT": "1",
    "DISK_TYPE": "BLOCK",
    "LVM_THIN_ENABLE": "YES",
    "CEPH_KEY": "/etc/key",
}
REFUSED_OF_DISKS = {
    "QCOW2_STANDALONE": "YES",
    "RECOVERY_SNAPSHOT_FREQ": "3600",
    "RBD_FORMAT": "1",
    "LVM_THIN_ENABLE": "yes",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


def vm_with(site: ActionSite, **disk: Any) -> int:
    return site.oned.vm_create({"NAME": "vm", "DISK": [{key: str(value) for key, value in disk.items()}]})


@pytest.mark.fault(57, "an action that would read such an attribute refuses it by name, and no other does")
@pytest.mark.parametrize("name", REFUSED_OF_DATASTORES)
def test_a_datastore_with_what_cannot_work_makes_nothing_and_lets_all_go(site: ActionSite, name: str) -> None:
    value = REFUSED_OF_DATASTORES[name]
    image, kept = site.image("one"), site.image("kept", persistent=True)
    vm, other = site.vm(image), site.vm(kept)
    site.make("clone", vm)
    site.make("ln", other)
    site.oned.datastore_update(STORE, {name: value})
    words = f"{name} = {value!r} of datastore {STORE} is refused: "
    for action, number in (("clone", vm), ("ln", other)):
        assert words in site.refused("SS002", site.make, action, number)
    before = sorted(path.name for path in site.store.iterdir())
    with pytest.raises(ActionFailed, match=words.split(" ", 1)[0]):
        site.image("two")
    assert sorted(path.name for path in site.store.iterdir()) == before
    for number in (vm, other):
        site.tm("delete", f"{HERE}:{site.system}/{number}", number, SYSTEM)
        assert not (site.system / str(number)).exists()


@pytest.mark.parametrize("name", REFUSED_OF_DISKS)
def test_a_disk_with_what_cannot_work_is_not_made(site: ActionSite, name: str) -> None:
    value = REFUSED_OF_DISKS[name]
    words = f"disk 0: {name} = {value!r} is refused: "
    vm = vm_with(site, IMAGE_ID=site.image(), **{name: value})
    assert words in site.refused("SS002", site.make, "clone", vm)
    empty = vm_with(site, TYPE="FS", SIZE=8, FORMAT="raw", **{name: value})
    asked = ("mkimage", 8, "raw", f"{HERE}:{site.disk(empty)}", empty, SYSTEM)
    assert words in site.refused("SS002", site.tm, *asked)
    assert not site.disk(vm).exists() and not site.disk(empty).exists()


def test_harmless_words_of_stock_are_taken(site: ActionSite) -> None:
    harmless: Dict[str, Any] = {
        **{"NFS_AUTO_ENABLE": "NO", "RBD_FORMAT": "2", "CACHE_ENABLE": "no", "DISK_TYPE": "file"},
        **{"CEPH_TRASH": "no", "SPARSE": "yes"},
    }
    site.oned.datastore_update(STORE, harmless)
    vm = vm_with(site, IMAGE_ID=site.image(), SPARSE="YES", QCOW2_STANDALONE="NO")
    assert site.make("clone", vm).exists()


# -- SPARSE --------------------------------------------------------------------------------------------


def active(site: ActionSite, vm: int) -> Path:
    return site.disk(vm).resolve()


@pytest.fixture(params=["plain", "pool"])
def devices(request: pytest.FixtureRequest, site: ActionSite) -> Iterator[str]:
    """Let the host have a device for its disks, or none."""
    if request.param == "plain":
        yield "plain"
        return
    device = site.top / "device"
    device.mkdir()
    pool_devices.mount(device, 256)
    try:
        with Session("localhost", "test", Config()) as session:
            session.ask(SetDevices(f"{site.location}/.semishared", (str(device),)))
        yield "pool"
    finally:
        for vm in [vm.id for vm in site.oned.vms.values()]:
            site.tm("delete", f"{HERE}:{site.system}/{vm}", vm, SYSTEM)
        pool_devices.unmount(device)


def lies_on(site: ActionSite, devices: str, place: str, vm: int) -> None:
    """See that a disk lies where its host has devices for it."""
    is_there = str(active(site, vm)).startswith(f"{site.top}/device/")
    assert is_there == (devices == "pool" and place != "shared")


@pytest.mark.fault(57, "SPARSE = no of a DISK or its image allocates all that its guest may write")
@pytest.mark.parametrize(("of", "format"), [("disk", "raw"), ("image", "qcow2")])
@pytest.mark.parametrize("place", ["overlay", "copy", "remote-first", "shared", "diff"])
def test_a_disk_that_is_not_to_be_sparse_has_all_its_blocks(
    site: ActionSite, devices: str, place: str, of: str, format: str, cell: Callable[..., None]
) -> None:
    words = {"SEMISHARED_PLACE": "local"} if place == "diff" else {"SEMISHARED_LOCAL": place}
    words = {"SEMISHARED_PLACE": "shared"} if place == "shared" else words
    said = {"SPARSE": "NO"}
    image = site.image(format=format, persistent=place == "diff", **words, **(said if of == "image" else {}))
    vm = vm_with(site, IMAGE_ID=image, **(said if of == "disk" else {}))
    site.make("ln" if place == "diff" else "clone", vm)
    lies_on(site, devices, place, vm)
    assert allocated(active(site, vm)) >= 8 * MiB
    made = format if place == "copy" else "qcow2"
    qemu_io(active(site, vm), made, "read -P 0xa1 1M 64k")
    other = vm_with(
        site,
        IMAGE_ID=site.image("sparse", format=format, persistent=place == "diff", **words),
        SPARSE="yes",
    )
    site.make("ln" if place == "diff" else "clone", other)
    assert allocated(active(site, other)) < 2 * MiB
    if place != "shared":
        cell("allocate", place, format, "off", devices)
    elif devices == "plain":
        cell("allocate", "store-clone", format, "off")


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_a_volatile_disk_that_is_not_to_be_sparse_has_all_its_blocks(
    site: ActionSite, devices: str, format: str, cell: Callable[..., None]
) -> None:
    vm = vm_with(site, TYPE="FS", SIZE=16, FORMAT=format, FS="ext4", SPARSE="no")
    site.tm("mkimage", 16, format, f"{HERE}:{site.disk(vm)}", vm, SYSTEM)
    lies_on(site, devices, "volatile", vm)
    assert allocated(active(site, vm)) >= 16 * MiB
    assert tag(content(site, active(site, vm), format), "TYPE") == "ext4"
    cell("allocate", "volatile", format, "off", devices)


def test_a_disk_that_grows_has_all_its_blocks(site: ActionSite) -> None:
    vm = vm_with(site, IMAGE_ID=site.image(), SPARSE="no")
    site.make("clone", vm)
    site.tm("resize", f"{HERE}:{site.disk(vm)}", 32, vm, SYSTEM)
    assert allocated(active(site, vm)) >= 32 * MiB


@pytest.mark.parametrize(
    ("image", "store", "whole"), [("no", "", True), ("", "no", True), ("yes", "no", False)]
)
def test_an_image_says_it_before_its_datastore(site: ActionSite, image: str, store: str, whole: bool) -> None:
    site.oned.datastore_update(STORE, {"SPARSE": store})
    found = allocated(site.source(site.image(SPARSE=image)))
    assert (found >= 8 * MiB) == whole and (found < 2 * MiB) == (not whole)


# -- configuration -----------------------------------------------------------------------------------


def configure(site: ActionSite, name: str, text: str) -> None:
    """Write one of the files that the site's administrator has for OpenNebula's own drivers.

    Actions are started, not forked: where they lie decides where they look for it.
    """
    site.oned.runner.through = ()  # type: ignore[attr-defined]
    path = site.top / "fe/var/lib/one/remotes/etc/datastore" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def content(site: ActionSite, path: Path, format: str) -> Path:
    raw = site.top / "raw"
    raw.unlink(missing_ok=True)
    qemu_img.convert(str(path), format, str(raw), "raw")
    return raw


def tag(raw: Path, name: str) -> str:
    argv = ["blkid", "-p", "-s", name, "-o", "value", str(raw)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def volatile(site: ActionSite, fs: str, format: str = "raw", size: int = 320) -> Path:
    vm = vm_with(site, TYPE="FS", SIZE=size, FORMAT=format, FS=fs)
    site.tm("mkimage", size, format, f"{HERE}:{site.disk(vm)}", vm, SYSTEM)
    return content(site, site.disk(vm), format)


CONF = """# comments stay comments
SUPPORTED_FS="ext3,ext4,xfs,btrfs"   # and so do these
export FS_OPTS_ext4='-L data -m 0 -O ^has_journal'
FS_OPTS_xfs=-Lbulk
FS_OPTS_btrfs="-L pool"
"""


def test_swap_areas_have_the_label_of_stock(site: ActionSite) -> None:
    vm = vm_with(site, TYPE="SWAP", SIZE=8)
    site.tm("mkswap", 8, f"{HERE}:{site.disk(vm)}", vm, SYSTEM)
    assert (tag(site.disk(vm), "TYPE"), tag(site.disk(vm), "LABEL")) == ("swap", "swap")


@pytest.mark.fault(57, "mkfs is run as datastore.conf says")
@pytest.mark.parametrize(
    ("fs", "label"), [("ext4", "data"), ("xfs", "bulk"), ("btrfs", "pool"), ("ext3", "")]
)
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_file_systems_are_made_as_the_site_says(site: ActionSite, fs: str, label: str, format: str) -> None:
    configure(site, "datastore.conf", CONF)
    raw = volatile(site, fs, format)
    assert (tag(raw, "TYPE"), tag(raw, "LABEL")) == (fs, label)
    if fs == "ext4":
        told = subprocess.run(["dumpe2fs", "-h", str(raw)], check=True, capture_output=True, text=True).stdout
        assert "has_journal" not in told and "Reserved block count:     0" in told
    image = site.oned.image_create(
        STORE, f"of-{fs}", size=320, type="DATABLOCK", format=format, attributes={"FS": fs}
    )
    raw = content(site, site.source(image), format)
    assert (tag(raw, "TYPE"), tag(raw, "LABEL")) == (fs, label)


def test_a_file_system_that_the_site_does_not_support_is_refused(site: ActionSite) -> None:
    configure(site, "datastore.conf", CONF)
    vm = vm_with(site, TYPE="FS", SIZE=8, FORMAT="raw", FS="ext2")
    asked = ("mkimage", 8, "raw", f"{HERE}:{site.disk(vm)}", vm, SYSTEM)
    assert "disk 0: FS is 'ext2', not one of btrfs, ext3, ext4, swap, xfs" in site.refused(
        "SS003", site.tm, *asked
    )
    with pytest.raises(ActionFailed, match="image .*: FS is 'ext2', not one of"):
        site.oned.image_create(STORE, "x", size=8, type="DATABLOCK", format="raw", attributes={"FS": "ext2"})
    configure(site, "datastore.conf", "")
    site.tm(*asked)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            'FS_OPTS_ext4="$(hostname)"',
            "FS_OPTS_ext4 of datastore.conf is .*nothing but a plain value is read",
        ),
        ('FS_OPTS_ext4="-L x', "nothing but a plain value is read"),
        ("FS_OPTS_ext4=-L x", "nothing but a plain value is read"),
        ("FS_OPTS_ext4=a'b'", "nothing but a plain value is read"),
        ("SUPPORTED_FS=ext4,zfs", "SUPPORTED_FS of datastore.conf has zfs, none of"),
    ],
)
def test_what_cannot_be_followed_in_the_sites_file_is_refused_by_name(
    site: ActionSite, text: str, why: str
) -> None:
    configure(site, "datastore.conf", text)
    with pytest.raises(ActionFailed, match=why):
        volatile(site, "ext4", size=8)
    configure(site, "datastore.conf", f"OTHER={text.partition('=')[2]}\n")
    volatile(site, "ext4", size=8)


@pytest.mark.fault(57, "overlays are made with the site's QCOW2_OPTIONS")
@pytest.mark.parametrize(
    ("options", "clusters", "more"),
    [
        ("-o cluster_size=2M,lazy_refcounts=on", 2 * MiB, {"lazy-refcounts": True}),
        ("-o compat=0.10", 64 << 10, {"compat": "0.10"}),
        ("-o refcount_bits=8 -o cluster_size=32k", 32 << 10, {"refcount-bits": 8}),
        ("", 64 << 10, {"compat": "1.1"}),
    ],
)
def test_overlays_have_the_options_of_tmrc(
    site: ActionSite, options: str, clusters: int, more: Dict[str, Any]
) -> None:
    site.oned.runner.extra["QCOW2_OPTIONS"] = options  # type: ignore[attr-defined]
    vms = site.vm(site.image()), site.vm(site.image("kept", persistent=True, SEMISHARED_PLACE="local"))
    for action, vm in zip(("clone", "ln"), vms):
        site.make(action, vm)
        told = qemu_img.info(str(active(site, vm)), "qcow2")
        assert told["cluster-size"] == clusters
        assert more.items() <= told["format-specific"]["data"].items()  # type: ignore[index]
        qemu_io(active(site, vm), "qcow2", "read -P 0xa1 1M 64k")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("-o backing_file=x", "QCOW2_OPTIONS of tmrc has backing_file, none of"),
        ("-o encryption=on,size=1", "QCOW2_OPTIONS of tmrc has encryption, size, none of"),
        ("-b /etc/shadow", "QCOW2_OPTIONS of tmrc is '-b /etc/shadow', not"),
        ("-o", "not `-o key=value"),
    ],
)
def test_options_that_would_make_another_file_are_refused_and_stop_no_removal(
    site: ActionSite, options: str, why: str
) -> None:
    vm = site.vm(site.image())
    site.make("clone", vm)
    site.oned.runner.extra["QCOW2_OPTIONS"] = options  # type: ignore[attr-defined]
    assert why in site.refused("SS002", site.make, "clone", vm)
    site.tm("delete", f"{HERE}:{site.system}/{vm}", vm, SYSTEM)


# -- clones of images ----------------------------------------------------------------------------------


@pytest.mark.fault(57, "a clone has the format that its datastore's DRIVER says")
@pytest.mark.parametrize(
    ("format", "driver", "convert", "found"),
    [
        ("raw", "qcow2", "", "qcow2"),
        ("qcow2", "raw", "", "raw"),
        ("qcow2", "qcow2", "", "qcow2"),
        ("raw", "qcow2", "no", "raw"),
        ("qcow2", "", "", "qcow2"),
    ],
)
def test_a_clone_is_converted_to_the_format_of_its_datastore(
    site: ActionSite, format: str, driver: str, convert: str, found: str
) -> None:
    image = site.image(format=format)
    site.oned.datastore_create(
        f'{IMAGE_DS} NAME="other" SAFE_DIRS="{site.top}" DRIVER="{driver}" CONVERT="{convert}"', 102
    )
    made = site.oned.image(site.oned.image_clone(image, "copy", 102))
    assert made.format == found and Path(made.source).parent == site.location / "102"
    assert inspected(made.source) == found
    qemu_io(made.source, found, "read -P 0xa1 1M 64k", "read -P 0 2M 64k")
    assert qemu_img.virtual_size(made.source, found) == 8 * MiB
    vm = site.vm(made.id)
    site.tm("clone", f"fe:{made.source}", f"{HERE}:{site.disk(vm)}", vm, 102)
    qemu_io(active(site, vm), "qcow2", "read -P 0xa1 1M 64k")


def inspected(path: str) -> str:
    said = subprocess.run(["qemu-img", "info", "--output=json", path], check=True, capture_output=True)
    return str(json.loads(said.stdout)["format"])


# -- bridges of mounted stores -----------------------------------------------------------------------


def store(driver: str = "semishared", kind: str = "FILE", more: str = "") -> Datastore:
    inside = f"<TEMPLATE><DISK_TYPE>{kind}</DISK_TYPE>{more}</TEMPLATE>"
    return Datastore.parse(
        f"<DATASTORE><ID>7</ID><TYPE>0</TYPE><DS_MAD>{driver}</DS_MAD>{inside}</DATASTORE>"
    )


@pytest.mark.fault(63, "doctor names what a file of the site's says in vain, or what an action would refuse")
def test_doctor_reads_the_files_of_the_site(tmp_path: Path) -> None:
    def doubts(*ours: Datastore, others: Sequence[Datastore] = (), **files: Any) -> stock_conf.Doubts:
        for name in ("ceph", "fs"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{name}.conf").write_text(files.get(name, ""))
        (tmp_path / "datastore.conf").write_text(files.get("datastore", ""))
        (tmp_path / "tmrc").write_text(files.get("tmrc", ""))
        return stock_conf.doubts(str(tmp_path), str(tmp_path / "tmrc"), ours, others)

    file, ceph = store(), store(kind="RBD")
    shipped = "POOL_NAME=one\nSTAGING_DIR=/var/tmp\nRBD_FORMAT=2\nDD_BLOCK_SIZE=64k\nCEPH_TRASH=no\n"
    asked: Dict[str, Any] = {
        "ceph": shipped,
        "fs": "DD_BLOCK_SIZE=64k",
        "datastore": 'SUPPORTED_FS="ext2,ext3,ext4,xfs"',
    }
    assert doubts(file, ceph, **asked) == ((), ()), "what OpenNebula's packages bring asks for nothing"
    said = "POOL_NAME=other\nSTAGING_DIR=/data\nRBD_FORMAT=1\nDD_BLOCK_SIZE=1M\n"
    refused, in_vain = doubts(file, ceph, ceph=said, fs="DD_BLOCK_SIZE=2M")
    assert [text.split(" of ")[0] for text in in_vain] == [
        *("STAGING_DIR = '/data'", "DD_BLOCK_SIZE = '1M'", "RBD_FORMAT = '1'", "DD_BLOCK_SIZE = '2M'")
    ]
    assert all("has no effect here" in text for text in in_vain)
    assert len(refused) == 1 and "POOL_NAME of ceph.conf is 'other'" in refused[0]
    # What another driver reads is that driver's, and what none of ours would read is nobody's.
    others = (store("ceph"), store("fs"))
    assert doubts(file, ceph, others=others, ceph=said, fs="DD_BLOCK_SIZE=2M").in_vain == ()
    assert doubts(file, ceph=said) == ((), ())
    wrong = doubts(file, datastore="SUPPORTED_FS=reiserfs", tmrc="QCOW2_OPTIONS='-b /etc/shadow'").refused
    files = [text.partition(" has ")[0].partition(" is ")[0] for text in wrong]
    assert files == ["SUPPORTED_FS of datastore.conf", "QCOW2_OPTIONS of tmrc"]
    (odd,) = doubts(file, tmrc="QCOW2_OPTIONS=$(cat x)").refused
    assert "nothing but a plain value is read" in odd


@pytest.fixture
def bridged(site: ActionSite) -> ActionSite:
    """Return a site whose datastore has a bridge: this machine, spoken to as a host."""
    site.oned.datastore_update(STORE, {"BRIDGE_LIST": HERE, "STAGING_DIR": str(site.top / "staging")})
    (site.top / "staging").mkdir()
    return site


@pytest.mark.fault(57, "BRIDGE_LIST of a mounted store names the machine that changes it")
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_the_bridge_of_a_mounted_store_does_all_to_its_images(bridged: ActionSite, format: str) -> None:
    site = bridged
    marker_id = mark(site)
    image = site.image(format=format)
    sessions = [call.stderr for call in site.oned.calls if call.action == "cp"]
    assert f"stored as {site.source(image)}" in sessions[-1] and " of data)" in sessions[-1]
    assert inspected(str(site.source(image))) == format
    qemu_io(site.source(image), format, "read -P 0xa1 1M 64k")
    assert list((site.top / "staging/.semishared/.uploads").iterdir()) == []
    copy = site.oned.image_clone(image, "copy")
    qemu_io(site.source(copy), format, "read -P 0xa1 1M 64k")
    empty = site.oned.image_create(
        STORE, "empty", size=32, type="DATABLOCK", format=format, attributes={"FS": "ext4"}
    )
    assert tag(content(site, site.source(empty), format), "TYPE") == "ext4"
    site.oned.datastore_monitor(STORE)
    vm = site.vm(image)
    site.make("clone", vm)
    for number in (copy, empty):
        path = site.source(number)
        site.oned.image_delete(number)
        assert not path.exists()
    assert marker.read(str(site.store)) == marker_id


def mark(site: ActionSite) -> str:
    """Have the bridge mark the store, as `setup --apply` does; return the marker's id."""
    store = "ab" * 16
    marker.mark(str(site.store), store, (), True)
    site.oned.datastore_update(STORE, {"SEMISHARED_STORE": store})
    return store


def test_a_bridge_whose_store_is_not_marked_or_not_mounted_changes_nothing(bridged: ActionSite) -> None:
    with pytest.raises(ActionFailed, match="BRIDGE_LIST of datastore 100 needs its SEMISHARED_STORE"):
        bridged.image()
    bridged.oned.datastore_update(STORE, {"SEMISHARED_STORE": "cd" * 16})
    with pytest.raises(ActionFailed, match="is not the datastore's store"):
        bridged.image("other")
    assert list(bridged.store.iterdir()) == []


def test_a_bridge_marks_what_is_the_store(tmp_path: Path) -> None:
    store, id_ = tmp_path / "100", "ab" * 16
    store.mkdir()
    with pytest.raises(StoreAbsent, match="nothing is mounted at"):
        marker.mark(str(store), id_, (), False)
    with pytest.raises(StoreAbsent, match="1 of 1 images are not in it"):
        marker.mark(str(store), id_, (f"{store}/image",), False)
    (store / "image").touch()
    assert marker.mark(str(store), id_, (f"{store}/image",), False) == id_
    assert marker.mark(str(store), "cd" * 16, (), False) == id_, "it has one"


class Told:
    """What setup asks of oned to mark a store."""

    lines = ""

    def update_datastore(self, number: int, lines: str) -> None:
        self.lines += lines


def test_setup_marks_a_store_through_its_bridge(tmp_path: Path) -> None:
    inside = f"<BRIDGE_LIST>{HERE}</BRIDGE_LIST><SEMISHARED_CLOUD>{'ee' * 16}</SEMISHARED_CLOUD>"
    text = f"<DATASTORE><ID>5</ID><BASE_PATH>{tmp_path}</BASE_PATH><TEMPLATE>{inside}</TEMPLATE></DATASTORE>"
    datastore, told = Datastore.parse(text), Told()
    assert "nothing is mounted at" in stores.mark(told, datastore, [], [], False, lambda _: True).why_not  # type: ignore[arg-type]
    assert not told.lines and not list(tmp_path.iterdir())
    marked = stores.mark(told, datastore, [], [], True, lambda _: False)  # type: ignore[arg-type]
    assert marked.store == marker.read(str(tmp_path)) and marked.store in told.lines
    taken = f"<TEMPLATE><SEMISHARED_STORE>{marked.store}</SEMISHARED_STORE>"
    other = Datastore.parse(text.replace("<ID>5", "<ID>6").replace("<TEMPLATE>", taken))
    with pytest.raises(SemisharedError, match="is that of datastore 6"):
        stores.mark(told, datastore, [other], [], True, lambda _: False)  # type: ignore[arg-type]


BACKUPS, SHIM = (
    102,
    """#!/bin/bash
[ "$1" != convert ] || { cut -d " " -f 19 /proc/$$/stat; ionice -p $$; } >> %s
exec /usr/bin/qemu-img "$@"
""",
)


def backup(site: ActionSite, **template: str) -> List[str]:
    """Have a VM that is off backed up, as a datastore's template says; return how qemu-img ran."""
    said, shim = site.top / "ran", site.top / "bin/qemu-img"
    shim.parent.mkdir()
    shim.write_text(SHIM % said)
    shim.chmod(0o755)
    site.oned.runner.extra["PATH"] = f"{shim.parent}:{os.environ['PATH']}"  # type: ignore[attr-defined]
    path = f"{site.location}/{BACKUPS}"
    site.oned.datastores[BACKUPS] = objects.Datastore(
        BACKUPS, "backups", 3, "rsync", "-", path, {"TYPE": "BACKUP_DS", **template}
    )
    vm = site.vm(site.image())
    site.make("clone", vm)
    config = f"<BACKUP_CONFIG><LAST_DATASTORE_ID>{BACKUPS}</LAST_DATASTORE_ID></BACKUP_CONFIG>"
    xml = site.oned.vm(vm).to_xml().replace("<BACKUPS>", f"<BACKUPS>{config}", 1)
    assert config in xml
    where = f"{HERE}:{site.disk(vm).parent}"
    site.tm("prebackup", where, 0, f"one-{vm}", "-", vm, SYSTEM, stdin=xml)
    assert (site.disk(vm).parent / "backup/disk.0.0").exists()
    return said.read_text().splitlines()


@pytest.mark.fault(63, "copies for a backup of a VM that is off run as RSYNC_NICE and RSYNC_IONICE say")
def test_copies_for_a_backup_run_as_its_datastore_says(site: ActionSite) -> None:
    found = backup(site, RSYNC_NICE="7", RSYNC_IONICE="5", RSYNC_CPU_QUOTA="50", RESTIC_NICE="9")
    nice = min(os.nice(0) + 7, 19)
    assert found == [str(nice), "best-effort: prio 5"]
    assert "has no systemd of oneadmin's" in site.oned.calls[-1].stderr
    assert "run without CPUQuota=50%" in site.oned.calls[-1].stderr


def test_without_a_word_they_run_in_the_idle_class(site: ActionSite) -> None:
    assert backup(site, RSYNC_NICE="-1", RESTIC_IONICE="5") == [str(os.nice(0)), "idle"]
    assert "systemd" not in site.oned.calls[-1].stderr


def test_what_a_backup_datastore_says_in_vain_is_said_by_name() -> None:
    def found(live: bool, **template: str) -> Tuple[Priority, str]:
        inside = "".join(f"<{name}>{value}</{name}>" for name, value in template.items())
        text = f"<DATASTORE><ID>102</ID><DS_MAD>rsync</DS_MAD><TEMPLATE>{inside}</TEMPLATE></DATASTORE>"
        return priority(Datastore.parse(text), live=live)

    assert found(False, RSYNC_NICE="5", RSYNC_IONICE="3") == (Priority(5, 3), "")
    assert found(False, RSYNC_NICE="-1", RSYNC_IONICE="-1") == (Priority(0, -1), "")
    at, said = found(
        False, RSYNC_NICE="5", RSYNC_MAX_RIOPS="100", RSYNC_CPU_QUOTA="250", RSYNC_MAX_WIOPS="-1"
    )
    assert at == Priority(5, -1, 0, "backup.102.slice", ("CPUQuota=250%", "IOReadIOPSMax=100")) and not said
    at, said = found(True, RSYNC_NICE="5", RSYNC_MAX_RIOPS="100")
    assert said.startswith("RSYNC_NICE, RSYNC_MAX_RIOPS of datastore 102: ") and "a running VM" in said
    for wrong in (
        {"RSYNC_NICE": "20"},
        {"RSYNC_IONICE": "8"},
        {"RSYNC_NICE": "low"},
        {"RSYNC_IONICE": "\u0663"},
        {"RSYNC_CPU_QUOTA": "0"},
        {"RSYNC_MEMORY_MAX_MB": "1G"},
        {"RSYNC_MAX_RIOPS": "-2"},
    ):
        with pytest.raises(BadAttribute, match=f"{next(iter(wrong))} of datastore 102 is"):
            found(False, **wrong)
