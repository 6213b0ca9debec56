# SPDX-License-Identifier: Apache-2.0
"""What is taken for a device of a pool: whose it is, of which there is a copy, what is one file system; and
how one is closed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import threading
from pathlib import Path

import pytest

from semishared.device import label as device_label
from semishared.device import offline
from semishared.errors import BadPool, NoSpace, SemisharedError
from semishared.host import probe
from semishared.model.device import names as device_names
from semishared.model.device import steps as device_steps
from semishared.model.leftover_steps import LookAround
from semishared.plan.device import choose as plan
from semishared.pool import labels
from tools.test_pool import Pool, device_of
from tools.world import MiB, World


def label(path: Path) -> Path:
    return path / ".semishared" / "device.json"


def unlinked(world: World) -> list[str]:
    (seen,) = world.on(LookAround(str(world.location), (101,), (), False))
    assert isinstance(seen, dict)
    return [str(item["path"]) for item in seen["unlinked"]]


def test_a_device_of_another_host_is_refused_and_nothing_of_it_is_removed(world: World, pool: Pool) -> None:
    pool.set()
    said = json.loads(label(pool.paths[0]).read_text())
    left = pool.paths[0] / ".semishared/layers/7-0-0123456789ab"
    left.mkdir(parents=True)
    assert unlinked(world) == [str(left)], "its own"
    label(pool.paths[0]).write_text(json.dumps({**said, "owner": "0", "host": "h9:/ds"}))
    assert unlinked(world) == [] and "in the pool of h9:/ds" in str(pool.rows()[str(pool.paths[0])]["state"])
    with pytest.raises(BadPool, match="is in the pool of h9:/ds: take it out there"):
        pool.set()
    # As this host has left it, when its own notes were lost.
    label(pool.paths[0]).write_text(json.dumps({**said, "owner": "0"}))
    pool.set()
    assert pool.rows()[str(pool.paths[0])]["state"] == "" and unlinked(world) == [str(left)]


@pytest.mark.fault(31, "a device of another host that calls itself alike is refused")
def test_a_device_of_a_host_with_the_same_name_is_refused(world: World, pool: Pool) -> None:
    words = tuple(map(str, pool.paths))
    world.on(device_steps.SetDevices(str(world.root), words, 5))
    said = json.loads(label(pool.paths[0]).read_text())
    note = world.root / "devices" / f"{said['uuid']}.json"
    note.unlink()  # so it is on a host to which the device has come
    with pytest.raises(
        BadPool, match=r"is in the pool of \S+:\S+ \(host 5 in OpenNebula\): take it out there"
    ):
        world.on(device_steps.SetDevices(str(world.root), words, 6))
    assert not note.exists() and json.loads(label(pool.paths[0]).read_text()) == said
    world.on(device_steps.SetDevices(str(world.root), words, 5))
    assert pool.rows()[str(pool.paths[0])]["state"] == "", "its own, when its notes were lost"


@pytest.mark.fault(31, "a host that was renamed keeps the devices that it has noted")
def test_a_renamed_host_keeps_its_devices(world: World, pool: Pool) -> None:
    world.on(device_steps.SetDevices(str(world.root), tuple(map(str, pool.paths)), 5))
    said = json.loads(label(pool.paths[0]).read_text())
    label(pool.paths[0]).write_text(json.dumps({**said, "host": "before:/ds"}))
    assert pool.rows()[str(pool.paths[0])]["state"] == ""
    world.on(device_steps.SetDevices(str(world.root), tuple(map(str, pool.paths)), 5))
    now = json.loads(label(pool.paths[0]).read_text())
    assert (now["owner"], now["host"], now["host_id"]) == (said["owner"], said["host"], 5)


@pytest.mark.parametrize("lost", [False, True])
def test_a_label_that_says_no_id_is_its_hosts_and_says_one_from_then_on(
    world: World, pool: Pool, lost: bool
) -> None:
    pool.set()
    said = json.loads(label(pool.paths[0]).read_text())
    assert "host_id" not in said
    if lost:
        (world.root / "devices" / f"{said['uuid']}.json").unlink()
    world.on(device_steps.SetDevices(str(world.root), tuple(map(str, pool.paths)), 5))
    now = json.loads(label(pool.paths[0]).read_text())
    assert (now["host_id"], now["uuid"]) == (5, said["uuid"]) and pool.rows()[str(pool.paths[0])][
        "state"
    ] == ""


@pytest.mark.parametrize("without", [("host_id",), ("host_id", "host", "owner")], ids=["no id", "no owner"])
def test_a_full_device_keeps_a_label_of_before(
    world: World, pool: Pool, without: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    side = label(pool.paths[0]).parent
    said = device_label.without_padding(json.loads(label(pool.paths[0]).read_text())) | {"host_id": 5}
    label(pool.paths[0]).write_text(
        json.dumps({key: value for key, value in said.items() if key not in without})
    )

    def full(*_: object) -> None:
        raise NoSpace("no space left")

    monkeypatch.setattr(device_label, "write", full)
    labels._write(str(side), said)
    with pytest.raises(NoSpace):
        labels._write(str(side), {**said, "weight": 7.0})


def test_a_label_of_before_is_taken_over_and_let_go_of_with_its_device(world: World, pool: Pool) -> None:
    pool.set()
    said = json.loads(label(pool.paths[0]).read_text())
    old = {key: said[key] for key in ("version", "uuid", "class", "weight")}
    label(pool.paths[0]).write_text(json.dumps(old))
    (world.root / "devices" / f"{said['uuid']}.json").unlink()
    assert pool.rows()[str(pool.paths[0])]["state"] == ""
    pool.set()
    now = json.loads(label(pool.paths[0]).read_text())
    assert now["uuid"] == said["uuid"] and now["owner"] and label(pool.paths[0]).stat().st_size > 4096
    assert pool.set(*map(str, pool.paths[1:]))["gone"] == [str(pool.paths[0])]
    assert "owner" not in json.loads(label(pool.paths[0]).read_text()), "another host may have it now"


@pytest.mark.parametrize(
    "weight",
    ["1" + "0" * 400, "NaN", "Infinity", "-1", "1000", '{"a":' * 5000 + "1" + "}" * 5000],
    ids=["overflows", "nan", "infinite", "negative", "more than is declared", "nested"],
)
def test_a_label_with_what_is_no_weight_is_none_and_all_else_goes_on(
    world: World, pool: Pool, weight: str
) -> None:
    pool.set(*map(str, pool.paths[:2]))
    broken, declared = label(pool.paths[0]), plan.declared(f"{pool.paths[0]} {pool.paths[1]}")
    said = json.loads(broken.read_text())
    broken.write_text(json.dumps({**said, "weight": 0}).replace('"weight": 0', f'"weight": {weight}'))
    row = pool.rows()[str(pool.paths[0])]
    assert row["state"] and [wrong.text for wrong in plan.differences(declared, pool.devices())]
    world.clone(world.image(), world.disk())
    assert device_of(f"{world.disk().path}.snap") == str(pool.paths[1])
    assert "POOL" in probe.report(str(world.location))
    with pytest.raises(BadPool, match="cannot be understood"):
        pool.set(*map(str, pool.paths[:2]))
    broken.write_text(json.dumps({**said, "weight": 999.999}))
    assert pool.rows()[str(pool.paths[0])]["state"] == ""


def test_a_directory_in_the_place_of_a_link_is_named_and_stays(world: World, pool: Pool) -> None:
    pool.set()
    link = world.root / "devices" / json.loads(label(pool.paths[0]).read_text())["uuid"]
    link.unlink()
    (link / "layers/7-0-0123456789ab").mkdir(parents=True)
    with pytest.raises(BadPool, match="is a directory, where the link to .* is to be: move it away"):
        pool.set()
    assert (link / "layers/7-0-0123456789ab").is_dir()
    os.rename(link, world.root / "found")
    pool.set()
    assert pool.rows()[str(pool.paths[0])]["state"] == ""


def test_a_copy_in_the_place_of_its_original_is_refused_while_that_is_mounted(
    world: World, pool: Pool
) -> None:
    pool.set(*map(str, pool.paths[:2]))
    label(pool.paths[2]).parent.mkdir()
    label(pool.paths[2]).write_bytes(label(pool.paths[0]).read_bytes())
    words = str(pool.paths[1]), str(pool.paths[2])
    with pytest.raises(BadPool, match=f"has the label of {pool.paths[0]}, which is mounted too"):
        pool.set(*words)
    assert pool.rows()[str(pool.paths[0])]["state"] == ""
    subprocess.run(["mount", "--move", str(pool.paths[0]), pool.aside()], check=True)
    pool.set(*words)
    assert sorted(pool.rows()) == sorted(words)


def test_a_device_is_closed_that_is_full_or_away(world: World, pool: Pool) -> None:
    pool.set()
    uuids = [str(pool.rows()[str(path)]["uuid"]) for path in pool.paths]
    (pool.paths[0] / "fill").touch()
    with pytest.raises(OSError), open(pool.paths[0] / "fill", "wb", buffering=0) as file:
        while file.write(bytes(MiB)) == MiB:
            pass
        os.write(file.fileno(), bytes(MiB))
    world.on(device_steps.CloseDevice(str(world.root), uuids[0]))
    assert pool.rows()[str(pool.paths[0])]["weight"] == 0
    layers = device_names.Link(uuids[1], "layers", "7-0-0123456789ab")
    os.makedirs(pool.paths[1] / ".semishared/layers" / layers.name)
    os.makedirs(world.system / "7")
    os.symlink(device_names.target_of(layers), world.system / "7/disk.0.snap")
    subprocess.run(["mount", "--move", str(pool.paths[1]), pool.aside()], check=True)
    others = str(pool.paths[0]), str(pool.paths[2])
    assert pool.set(*others)["closed"] == [str(pool.paths[1])]
    subprocess.run(["mount", "--move", pool.aside(), str(pool.paths[1])], check=True)
    row = pool.rows()[str(pool.paths[1])]
    assert (row["state"], row["weight"]) == ("", 0), "it is back, and takes nothing"
    pool.set()
    assert [row["weight"] for row in pool.rows().values()] == [1.0] * 3


def test_two_subvolumes_of_btrfs_are_one_file_system(world: World, pool: Pool) -> None:
    image, whole = world.top / "btrfs", pool.paths[0]
    image.touch()
    os.truncate(image, 160 * MiB)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True)
    subprocess.run(["umount", str(whole)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(whole)], check=True)
    source = (
        subprocess.run(["findmnt", "-n", "-o", "SOURCE", str(whole)], check=True, stdout=subprocess.PIPE)
        .stdout.decode()
        .strip()
    )
    for path in pool.paths[1:]:
        subprocess.run(
            ["btrfs", "subvolume", "create", str(whole / path.name)], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(["umount", str(path)], check=True)
        subprocess.run(["mount", "-o", f"subvol={path.name}", source, str(path)], check=True)
    with pytest.raises(BadPool, match="are one file system"):
        pool.set(*map(str, pool.paths[1:]))
    pool.set(str(pool.paths[1]))
    assert label(pool.paths[1]).stat().st_size > 4096, "not in the metadata: who reads it asks the disk"


QUIET = "no_prefetch_block_bitmaps"
"""Option without which ext4 itself reads from the disk, some seconds after it was mounted (ext4(5))."""


def mounted(world: World, path: Path, make: tuple[str, ...], options: str) -> Path:
    """Have a file system of its own instead of a device; return what the kernel says of the disk below it."""
    image = world.top / "disk"
    image.touch()
    os.truncate(image, 160 * MiB)
    subprocess.run([*make, str(image)], check=True)
    subprocess.run(["umount", str(path)], check=True)
    subprocess.run(["mount", "-o", f"loop,{options}", str(image), str(path)], check=True)
    source = (
        subprocess.run(["findmnt", "-n", "-o", "SOURCE", str(path)], check=True, stdout=subprocess.PIPE)
        .stdout.decode()
        .strip()
    )
    return Path("/sys/block", os.path.basename(source), "stat")


def looks_that_read(world: World, path: Path, stat: Path) -> int:
    """Return how many of five looks at a device have the disk itself read."""
    found = 0
    for _ in range(5):
        before = stat.read_text().split()[0]
        assert offline.unanswered(str(world.root), [str(path / ".semishared")]) == []
        found += stat.read_text().split()[0] != before
    return found


def directly(path: Path) -> dict[str, object]:
    """Return a label as it is read past the page cache: one or the other, whoever replaces it meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 1 << 16) as page:
            found = json.loads(page[: os.preadv(fd, [page], 0)])
    finally:
        os.close(fd)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [(("mkfs.btrfs", "-q"), "rw"), (("mkfs.ext4", "-q", "-O", "inline_data", "-I", "512"), QUIET)],
    ids=["btrfs", "ext4"],
)
def test_a_label_of_before_is_found_and_written_anew_so_that_looks_ask_the_disk(
    world: World, pool: Pool, make: tuple[str, ...], options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pool.paths[0]
    stat = mounted(world, path, make, options)
    pool.set(str(path))
    own = label(path)
    said = json.loads(own.read_text())
    old = {key: said[key] for key in ("version", "uuid", "class", "weight")}

    def age() -> None:
        own.with_suffix(".new").write_text(json.dumps(old))
        own.with_suffix(".new").rename(own)
        fd = os.open(path, os.O_RDONLY)
        assert ctypes.CDLL(None).syncfs(fd) == 0  # not all that others have to write out
        os.close(fd)

    age()
    assert pool.rows()[str(path)]["is_old"] and looks_that_read(world, path, stat) == 0
    seen: set[int] = set()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            try:
                seen.add(len(directly(own)))
            except ValueError:
                seen.add(0)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(40):
            labels._write(str(own.parent), {key: value for key, value in said.items() if key != "padding"})
            assert len(directly(own)) == len(said)
            age()
    finally:
        is_over.set()
        reader.join()
    assert seen and seen <= {len(old), len(said)}, "one or the other, and never a part"
    for number in range(1, 20):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        try:
            pool.set(str(path))
            break
        except SemisharedError:
            assert len(directly(own)) in (len(old), len(said))
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
        pool.set(str(path))
        assert not pool.rows()[str(path)]["is_old"] and not pool.leftovers()
        age()
    assert 2 < number < 19
    assert not pool.rows()[str(path)]["is_old"] and looks_that_read(world, path, stat) == 5
    now = directly(own)
    assert (
        {key: now[key] for key in old} == old
        and now["host"] == said["host"]
        and now["owner"]
        and now["padding"]
    )
