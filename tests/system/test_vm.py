# SPDX-License-Identifier: Apache-2.0
"""VMs with real guests: each place and format of a disk, and what is left of it afterwards."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Callable, Iterator

import pytest

import matrix
from lab.cloud import DATASTORES, STORE, Cloud
from lab.guest import LINUX, Guest, GuestError, content
from lab.oned import ActionFailed
from semishared.config import Config
from trimming import trimmed

KIB = 64
DATA = content("base", 0, KIB)
SLOW: dict[str, Any] = {"SEMISHARED_IO_CLASS": "scratch"}
SCRATCH = Config().io_limits["scratch"]
CELLS: list[tuple[str, bool, dict[str, Any]]] = [
    # (place, persistent, attributes)
    ("in-place", True, {}),
    ("diff", True, {"SEMISHARED_PLACE": "local"}),
    ("overlay", False, {}),
    ("copy", False, {"SEMISHARED_LOCAL": "copy"}),
    ("remote-first", False, {"SEMISHARED_LOCAL": "remote-first"}),
    ("store-clone", False, {"SEMISHARED_PLACE": "shared"}),
]


def sha(cloud: Cloud, path: str) -> str:
    return hashlib.sha256(cloud.lab.fe.path(path).read_bytes()).hexdigest()


def record(cloud: Cloud, vm: int, disk: int) -> dict[str, object]:
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    found = json.loads(node.path(f"{cloud.vm_dir(vm)}/.semishared/disk.{disk}.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.fixture()
def scratch_system(cloud: Cloud) -> Iterator[None]:
    """Have volatile disks be of the class scratch."""
    cloud.oned.datastore_update(101, SLOW)
    yield
    cloud.oned.datastore_update(101, {"SEMISHARED_IO_CLASS": "normal"})


@pytest.fixture(scope="module")
def hot(cloud: Cloud) -> Guest:
    """One long-lived guest to which disks are attached, as Linux takes them (a boot per cell would cost
    minutes).
    """
    vm = cloud.deploy("hot", [{"IMAGE_ID": str(cloud.os_image("hot-os", system=LINUX))}])
    guest = cloud.guest(vm)
    guest.vm = vm  # type: ignore[attr-defined]
    return guest


@pytest.mark.parametrize("format", ["raw", "qcow2"])
@pytest.mark.parametrize(("place", "persistent", "attributes"), CELLS, ids=[cell[0] for cell in CELLS])
def test_disk_when_attached_holds_the_image_and_keeps_what_is_written(
    cloud: Cloud,
    hot: Guest,
    place: str,
    persistent: bool,
    attributes: dict[str, Any],
    format: str,
    cell: Callable[..., None],
) -> None:
    vm = hot.vm  # type: ignore[attr-defined]
    image = cloud.data_image(
        f"{place}-{format}", DATA, persistent=persistent, format=format, **SLOW, **attributes
    )
    before = sha(cloud, cloud.source(image))
    disk = cloud.oned.disk_attach(vm, image)
    assert record(cloud, vm, disk)["how"] == place
    hot.wait_disk("vdb")
    assert cloud.limits(vm, "vdb") == SCRATCH
    hot.check("vdb", "base", 0, KIB)
    hot.write("vdb", "new", 8192, 256)
    hot.check("vdb", "new", 8192, 256)
    trimmed(cloud, vm, "vdb")
    cloud.oned.disk_detach(vm, disk)
    hot.wait_disk("vdb", present=False)
    if persistent:
        assert cloud.read(cloud.source(image), format, 256 << 10, 8192 << 10) == content("new", 8192, 256)
        assert cloud.read(cloud.source(image), format, KIB << 10) == DATA
    else:
        assert sha(cloud, cloud.source(image)) == before
    left = [name for name in cloud.files(hot.node, cloud.vm_dir(vm)) if f"disk.{disk}" in name]
    assert not left
    assert not [name for name in cloud.leftovers() if name.endswith(f"{vm}-{disk}")]
    cloud.oned.image_delete(image)
    cell(("clone", "delete", "limit"), place, format, "live")


@pytest.mark.parametrize(
    ("type", "format", "fs"), [("fs", "raw", ""), ("fs", "qcow2", "ext4"), ("swap", "raw", "")]
)
def test_volatile_disk_when_attached_is_there_and_gone_after(
    cloud: Cloud, hot: Guest, type: str, format: str, fs: str, scratch_system: None, cell: Callable[..., None]
) -> None:
    vm = hot.vm  # type: ignore[attr-defined]
    template = {"TYPE": type, "SIZE": "32", "FORMAT": format}
    if fs:
        template["FS"] = fs
    disk = cloud.oned.disk_attach(vm, attributes=template)
    hot.wait_disk("vdb")
    assert cloud.limits(vm, "vdb") == SCRATCH
    assert hot.disks()["vdb"] == 32 << 20
    path = f"{cloud.vm_dir(vm)}/disk.{disk}"
    signature = cloud.read(path, format, 4096, node=hot.node)
    if type == "swap":
        assert signature[-10:] == b"SWAPSPACE2"
    if fs:
        assert signature[1080:1082] == b"\x53\xef"
    hot.write("vdb", 7, 1024, 64)
    hot.check("vdb", 7, 1024, 64)
    cloud.oned.disk_detach(vm, disk)
    hot.wait_disk("vdb", present=False)
    assert not hot.node.path(path).exists()
    cell(("clone", "delete", "limit"), "volatile", format, "live")


def test_terminated_vm_leaves_nothing_behind(cloud: Cloud, hot: Guest) -> None:
    cloud.terminate(hot.vm)  # type: ignore[attr-defined]
    assert cloud.leftovers() == []


def test_mixed_vm_through_power_off_undeploy_and_migration(
    cloud: Cloud, os_image: int, scratch_system: None, cell: Callable[..., None]
) -> None:
    """One VM, all kinds of disk in both formats: every byte where it belongs after each way of not
    running.
    """
    formats = ("raw", "qcow2")
    places: list[tuple[str, dict[str, Any]]] = [("mine", {}), ("local", {"SEMISHARED_PLACE": "local"})]
    mine = [
        cloud.data_image(f"{place}-{format}", DATA, persistent=True, format=format, **SLOW, **attributes)
        for place, attributes in places
        for format in formats
    ]
    others: list[int] = []
    for format in formats:
        others.append(cloud.data_image(f"cow-{format}", DATA, format=format, **SLOW))
        others.append(
            cloud.data_image(f"full-{format}", DATA, format=format, **SLOW, SEMISHARED_LOCAL="copy")
        )
        others.append(
            cloud.data_image(f"beside-{format}", DATA, format=format, **SLOW, SEMISHARED_PLACE="shared")
        )
        others.append(
            cloud.data_image(f"remote-{format}", DATA, format=format, **SLOW, SEMISHARED_LOCAL="remote-first")
        )
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, *mine, *others)]
    disks += [{"TYPE": "fs", "SIZE": "16", "FORMAT": format} for format in formats]
    vm = cloud.deploy("mixed", disks)
    # The target of each disk after the first, and what is written there.
    names = {f"vd{letter}": f"seed-{letter}" for letter in "bcdefghijklmno"}
    guest = cloud.guest(vm)
    assert guest.context()["SEMI"] == "mixed"
    assert len([name for name in guest.disks() if name.startswith("vd")]) == 15
    assert [cloud.limits(vm, name) for name in names] == [SCRATCH] * len(names)
    for name in list(names)[:-2]:
        guest.check(name, "base", 0, KIB)
    for name, seed in names.items():
        guest.write(name, seed, 4096, 128)
    trimmed(cloud, vm, *names)

    def verify() -> None:
        now = cloud.guest(vm)
        for name, seed in names.items():
            now.check(name, seed, 4096, 128)

    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.oned.vm_resume(vm)
    verify()
    cloud.oned.vm_undeploy(vm, hard=True)
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    assert not [name for name in cloud.leftovers() if "/leases/" in name and f"/{vm}-" in name]
    cloud.oned.vm_deploy(vm, "h2", 101)
    verify()
    cloud.oned.vm_migrate(vm, "h1", how="poweroff-hard", datastore_id=102)
    verify()
    assert cloud.files(cloud.lab.node("h2"), f"{DATASTORES}/101/{vm}") == []
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    for image, seed in zip(mine, ("seed-b", "seed-c", "seed-d", "seed-e")):
        format = cloud.oned.image(image).format
        assert cloud.read(cloud.source(image), format, 128 << 10, 4096 << 10) == content(seed, 4096, 128)
    for image in others:
        format = cloud.oned.image(image).format
        assert cloud.read(cloud.source(image), format, 128 << 10, 4096 << 10) == bytes(128 << 10)
    cell(("clone", "mv", "delete", "limit"), matrix.PLACES, formats, "off")


@pytest.mark.long  # test_snapshots.py stops one with disks of each place, and resumes it elsewhere
def test_stopped_vm_when_resumed_goes_on_where_it_was(cloud: Cloud, os_image: int) -> None:
    vm = cloud.deploy("stopped", [{"IMAGE_ID": str(os_image)}, {"TYPE": "fs", "SIZE": "16", "FORMAT": "raw"}])
    guest = cloud.guest(vm)
    guest.write("vdb", 3, 0, 64)
    cloud.oned.vm_stop(vm)
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_deploy(vm, "h2", 101)
    cloud.guest(vm).check("vdb", 3, 0, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def test_image_when_flipped_is_a_new_generation_and_never_an_old_base(cloud: Cloud, os_image: int) -> None:
    """persistent -> non-persistent -> persistent: no write lost, no stale base (one#6207)."""
    image = cloud.data_image("flip", DATA)
    host = cloud.lab.node("h1")

    def bases() -> list[str]:
        return [
            name
            for name in cloud.files(host, f"{DATASTORES}/.semishared/bases")
            if name.startswith(f"{STORE}-{image}-") and "/" not in name
        ]

    vm = cloud.deploy("flip", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], context=False)
    guest = cloud.guest(vm)
    guest.check("vdb", "base", 0, KIB)
    guest.write("vdb", "lost", 0, KIB)
    cloud.terminate(vm)
    assert len(bases()) == 1
    cloud.oned.image_persistent(image, True)
    vm = cloud.deploy("flip", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], context=False)
    guest = cloud.guest(vm)
    guest.check("vdb", "base", 0, KIB)
    guest.write("vdb", "kept", 0, KIB)
    cloud.terminate(vm)
    cloud.oned.image_persistent(image, False)
    vm = cloud.deploy("flip", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], context=False)
    cloud.guest(vm).check("vdb", "kept", 0, KIB)
    assert len(bases()) == 2
    cloud.terminate(vm)
    assert cloud.read(cloud.source(image), "raw", KIB << 10) == content("kept", 0, KIB)
    assert cloud.leftovers() == []


def test_saved_disk_when_running_or_off_is_what_the_guest_wrote(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int], cell: Callable[..., None]
) -> None:
    formats = ("raw", "qcow2") * len(CELLS)
    images = [
        cloud.data_image(f"save-{place}-{format}", DATA, persistent=True, format=format, **attributes)
        if persistent
        else image_for(place, format)
        for place, persistent, attributes in CELLS
        for format in ("raw", "qcow2")
    ]
    vm = cloud.deploy("save", [{"IMAGE_ID": str(image)} for image in (os_image, *images)], context=False)
    guest = cloud.guest(vm)
    disks = range(1, len(images) + 1)
    for disk in disks:
        guest.write(f"vd{'abcdefghijklm'[disk]}", "one", 1024, 64)
    saved = [cloud.oned.disk_saveas(vm, disk, f"live-{disk}") for disk in disks]
    for disk in disks:
        guest.write(f"vd{'abcdefghijklm'[disk]}", "two", 1024, 64)
    cloud.oned.vm_poweroff(vm, hard=True)
    saved += [cloud.oned.disk_saveas(vm, disk, f"off-{disk}") for disk in disks]
    for image, format, seed in zip(saved, formats * 2, ["one"] * len(images) + ["two"] * len(images)):
        info = json.loads(cloud.lab.fe.run(["qemu-img", "info", "--output=json", cloud.source(image)]).stdout)
        assert info["format"] == format
        assert "backing-filename" not in info
        assert cloud.read(cloud.source(image), format, 64 << 10, 1024 << 10) == content(seed, 1024, 64)
        assert cloud.read(cloud.source(image), format, KIB << 10) == DATA
    cloud.terminate(vm)
    # A saved image never passed through cp: its first use makes its generation.
    vm = cloud.deploy("again", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(saved[0])}], context=False)
    cloud.guest(vm).check("vdb", "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    cell("cpds", [place for place, _, _ in CELLS], ("raw", "qcow2"), ("off", "live"))


def test_vm_with_all_disks_in_place_when_migrated_live_loses_nothing(
    cloud: Cloud, figure: Callable[[str, object], None], cell: Callable[..., None]
) -> None:
    system = cloud.os_image("os-mine", persistent=True)
    mine = cloud.data_image("live-mine", DATA, persistent=True, format="qcow2")
    vm = cloud.deploy("live", [{"IMAGE_ID": str(system)}, {"IMAGE_ID": str(mine)}])
    guest = cloud.guest(vm)
    guest.check("vdb", "base", 0, KIB)
    guest.loop("vdb", "loop", 4096, 4096)
    for target in ("h2", "h1"):
        cloud.oned.vm_migrate(vm, target, how="live")
        assert cloud.oned.state(vm)[1] == 3
        guest = cloud.guest(vm)
    counts = guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0)
    assert counts["writes"] > 10
    figure("live migration: longest gap ms", counts["maxgap_ms"])
    assert cloud.files(cloud.lab.node("h2"), cloud.vm_dir(vm)) == []
    assert guest.context()["SEMI"] == "live"
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    cell("migrate", "in-place", ("raw", "qcow2"), "live")


def test_probe_when_asked_on_the_host_tells_allocated_sizes(cloud: Cloud, os_image: int) -> None:
    vm = cloud.deploy("probe", [{"IMAGE_ID": str(os_image)}, {"TYPE": "fs", "SIZE": "512", "FORMAT": "raw"}])
    host = cloud.lab.node("h1")
    assert host.path(f"{DATASTORES}/101/.monitor").read_text() == "semishared\n"
    text = host.run(["/var/tmp/one/tm/semishared/monitor_ds", f"{DATASTORES}/101"]).stdout.decode()
    assert text.startswith(f'VM = [ ID = {vm}, MONITOR = "')
    import base64

    lines = base64.b64decode(text.split('"')[1]).decode()
    assert "DISK_SIZE = [ ID=1, SIZE=1 ]" in lines
    assert "ID=0, SIZE=" in lines
    cloud.terminate(vm)


@pytest.mark.parametrize(
    ("attributes", "persistent", "words"),
    [
        ({"SEMISHARED_PLACE": "cloudy"}, False, "SEMISHARED_PLACE of image"),
        ({"SEMISHARED_PLACE": "cloudy"}, True, "SEMISHARED_PLACE of image"),
        ({"SEMISHARED_PLACE": "shared", "SEMISHARED_LOCAL": "copy"}, False, "contradicts"),
    ],
)
def test_attribute_when_it_cannot_be_followed_is_refused_in_one_line(
    cloud: Cloud, attributes: dict[str, Any], persistent: bool, words: str
) -> None:
    image = cloud.data_image("refused", DATA, persistent=persistent, **attributes)
    vm = cloud.create("refused", [{"IMAGE_ID": str(image)}])
    with pytest.raises(ActionFailed) as failure:
        cloud.oned.vm_deploy(vm, "h1", 101)
    assert words in str(failure.value)
    cloud.oned.vm_recover(vm, "delete")
    assert cloud.leftovers() == []
    cloud.oned.image_enable(image)
    cloud.oned.image_delete(image)


@pytest.mark.long  # test_lab.py has a corrupted sector
def test_verifier_would_notice_a_wrong_byte(cloud: Cloud, os_image: int) -> None:
    """The proofs above rest on the guest's check: it must be able to fail."""
    image = cloud.data_image("wrong", DATA[:100] + b"x" + DATA[101:])
    vm = cloud.deploy("wrong", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    with pytest.raises(GuestError):
        cloud.guest(vm).check("vdb", "base", 0, KIB)
    cloud.terminate(vm)


def test_image_from_another_machine_only_where_the_datastore_says_so(cloud: Cloud) -> None:
    host = cloud.lab.node("h1")
    path = host.path("/var/tmp/there.img")
    path.write_bytes(DATA + bytes(1 << 20))
    cloud.give(path)
    with pytest.raises(ActionFailed, match="may not be read by this datastore"):
        cloud.oned.image_create(STORE, "there", path="ssh://h1:/var/tmp/there.img", prefix="vd")
    cloud.oned.datastore_update(STORE, {"SAFE_DIRS": "/var/tmp ssh://h1:/var/tmp"})
    image = cloud.oned.image_create(STORE, "there-2", path="ssh://h1:/var/tmp/there.img", prefix="vd")
    assert cloud.read(cloud.source(image), "raw", len(DATA)) == DATA
    for other in (
        "ssh://h2:/var/tmp/there.img",
        "ssh://h1:/var/tmp/../lib/one/.ssh/id_ecdsa",
        "ssh://h1:/var/tmpx/there.img",
    ):
        with pytest.raises(ActionFailed):
            cloud.oned.image_create(STORE, "there-3", path=other, prefix="vd")
    cloud.oned.datastore_update(STORE, {"SAFE_DIRS": "/var/tmp"})
