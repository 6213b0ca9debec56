# SPDX-License-Identifier: Apache-2.0
"""A pool of unequal devices under running guests: everything that is done to a VM finds its disks, wherever
each host has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from lab import Node, roots
from lab.cloud import RBD_STORE, STORE, SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed
from pool.conftest import COMMAND, DEVICES, Site
from semishared.config import Config
from system.test_backup_places import check_copies, in_repository, keep

KIB = 64
AT = 1024
"""Where the guest writes, in KiB; what the verifier's loops write begins at 4 MiB."""
DATA = content("base", 0, KIB)
OTHER_SYSTEM = 102
PLACES: dict[str, dict[str, Any]] = {
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "remote-first": {"SEMISHARED_LOCAL": "remote-first"},
    "diff": {"SEMISHARED_PLACE": "local"},
}
LOCAL = [(place, more) for place, more in PLACES.items() if place != "diff"]
FORMATS = ("raw", "qcow2")
DECLARED = "/mnt/a /mnt/b /mnt/c=fast:1"
ELSEWHERE = ("/mnt/nvme/x", "/mnt/nvme/y", "/srv/z")
"""Where the same are mounted on h2."""
PATHS = {"h1": tuple(DEVICES), "h2": ELSEWHERE}
SLOW: dict[str, Any] = {"SEMISHARED_IO_CLASS": "scratch"}
SCRATCH = Config().io_limits["scratch"]


def said(cloud: Cloud, *words: str, code: int = 0) -> Any:
    """Run `semishared ... --json`; return what it says."""
    done = cloud.lab.fe.run([COMMAND, *words, "--json"], check=False, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout.splitlines()[-1] if words[0] == "detach" else done.stdout)


def of_pool(cloud: Cloud) -> list[str]:
    """Return what doctor has to say of pools."""
    done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=120)
    found = [item for item in json.loads(done.stdout)["findings"] if "pool:" in item["what"]]
    return [f"{item['severity']} {item['machine']} {item['what']}" for item in found]


def layers(node: Node) -> list[str]:
    """Return the directories of layers on the devices of a host."""
    return sorted(
        f"{path}/{name}"
        for path in (*DEVICES, *ELSEWHERE)
        for name in names(node, f"{path}/.semishared/layers")
    )


def names(node: Node, directory: str) -> list[str]:
    try:
        return os.listdir(node.path(directory))
    except FileNotFoundError:
        return []


def device_of(cloud: Cloud, vm: int, disk: int) -> str:
    """Return on which device a disk lies, as status has it."""
    rows = {row["disk"]: row for row in said(cloud, "status", f"vm:{vm}")["disks"]}
    return str(rows[disk]["device"])


@pytest.fixture(scope="module", autouse=True)
def declared(cloud: Site) -> Iterator[None]:
    """Declare the pools of both hosts and make them so; those of h2 are mounted at other paths, until this
    module ends.
    """
    assert of_pool(cloud) == []
    h2 = cloud.lab.node("h2")
    move(h2, dict(zip(DEVICES, ELSEWHERE)))
    for host, words in (("h1", DECLARED), ("h2", " ".join(ELSEWHERE))):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": words})
    (found,) = said(cloud, "pool", "check", "h1", code=1)["hosts"]
    assert len(found["wrong"]) == 3 and found["devices"] == []
    assert len([line for line in of_pool(cloud) if line.startswith("warning h")]) == 6
    (found,) = said(cloud, "pool", "add", "h1")["hosts"]
    assert found["wrong"] == [] and len(found["changes"]) == 3
    said(cloud, "pool", "add", "h1,h2")
    assert of_pool(cloud) == []
    rows = [row for host in said(cloud, "pool", "list", "h1,h2")["hosts"] for row in host["devices"]]
    expected = {(path, "fast", 1, "") for path in (*DEVICES, *ELSEWHERE)}
    assert {(row["path"], row["class"], row["weight"], row["state"]) for row in rows} == expected
    yield
    move(h2, dict(zip(ELSEWHERE, DEVICES)))
    cloud.oned.host_update(cloud.oned.host("h2").id, {"SEMISHARED_POOL": DECLARED})
    said(cloud, "pool", "add", "h2")
    assert of_pool(cloud) == [], "a device is known by its label, wherever it is mounted"


def move(node: Node, paths: dict[str, str]) -> None:
    """Mount what is mounted at one path at another one."""
    for path, other in paths.items():
        node.run(["mkdir", "-p", other], user="root")
        node.run(["mount", "--move", path, other], user="root")


def target(disk: int) -> str:
    return f"vd{'abcdefghijklmnop'[disk]}"


class Mixed:
    """A VM with a disk of each place and format on the pool, and what its guest has written. `rbd`: of images
    on Ceph.
    """

    def __init__(self, cloud: Cloud, formats: Sequence[str] = FORMATS) -> None:
        self.cloud, self.oned, self.formats = cloud, cloud.oned, formats
        self.numbers = {cell: disk for disk, cell in enumerate(product(PLACES, formats), 1)}
        """The number of the disk of each place and format, after the one it boots from."""
        self.of_images = {disk: format for (_, format), disk in self.numbers.items()}
        self.with_snapshots = {
            disk: format for (place, format), disk in self.numbers.items() if place != "diff"
        }
        self.os = cloud.os_image("os")
        self.images = {cell: self.image(f"{cell[0]}-{cell[1]}", *cell) for cell in self.numbers}
        cloud.oned.datastore_update(SYSTEM, SLOW)
        disks = [{"IMAGE_ID": str(image)} for image in (self.os, *self.images.values())]
        for format in formats if formats == FORMATS else ():
            self.numbers["volatile", format] = len(disks)
            disks.append({"TYPE": "fs", "SIZE": "16", "FORMAT": format})
        self.vm = cloud.deploy("mixed", disks, context=formats == FORMATS)
        self.own = {0, *self.numbers.values()}
        """Disks with layers on devices."""
        self.said: tuple[str, set[int]] = "", set()
        """Of which host, and which of its disks, status was asked last."""
        self.saved: list[tuple[int, str, str, int]] = []
        """Images that were made of it: number, format, what the guest had written, at which KiB."""

    def image(self, name: str, place: str, format: str) -> int:
        how: dict[str, Any] = {"format": format} if format != "rbd" else {}
        store = RBD_STORE if format == "rbd" else STORE
        return self.cloud.data_image(
            name, DATA, persistent=place == "diff", store=store, **how, **SLOW, **PLACES[place]
        )

    def stored(self, image: int, format: str, at: int) -> bytes:
        """Return so many KiB of an image on its store, at an offset in KiB."""
        if format == "rbd":
            return self.cloud.lab.ceph.read(self.cloud.source(image).partition("/")[2], KIB << 10, at << 10)
        return self.cloud.read(self.cloud.source(image), format, KIB << 10, at << 10)

    def lies_on(self, host: str) -> None:
        """See that its layers are on devices of this host, and on none of the other; and status, when there
        are others.
        """
        found = {node.name: len(layers(node)) for node in self.cloud.lab.hosts}
        assert found == {host: len(self.own), "h2" if host == "h1" else "h1": 0}
        node = self.cloud.lab.node(host)
        of_layers = {
            name.split("-")[1]
            for name in map(os.path.basename, layers(node))
            if name.startswith(f"{self.vm}-")
        }
        assert of_layers == set(map(str, self.own))
        if (host, self.own) == self.said:
            return
        self.said = host, set(self.own)
        rows = said(self.cloud, "status", f"vm:{self.vm}")["disks"]
        assert {row["disk"] for row in rows if row["device"] in PATHS[host]} == self.own
        assert {row["device"] for row in rows} - {None} <= set(PATHS[host])

    def write(self, seed: str, at: int = AT) -> None:
        guest = self.cloud.guest(self.vm)
        for disk in self.numbers.values():
            guest.write(target(disk), seed, at, KIB)

    def check(self, seed: str, at: int = AT) -> None:
        guest = self.cloud.guest(self.vm)
        for disk in self.numbers.values():
            guest.check(target(disk), seed, at, KIB)

    def save(
        self, disks: dict[int, str], seed: str, at: int = AT, snapshot: Callable[[int], int] = lambda disk: -1
    ) -> None:
        for disk, format in disks.items():
            image = self.oned.disk_saveas(self.vm, disk, f"saved-{len(self.saved)}", snapshot(disk))
            self.saved.append((image, format, seed, at))

    def grow(self, size: int) -> None:
        for disk in self.numbers.values():
            self.oned.disk_resize(self.vm, disk, size)

    def back_up(self, live: str, seed: str) -> None:
        words = (":".join(map(str, self.numbers.values())), f"one-{self.vm}", "-", str(self.vm), str(SYSTEM))
        self.cloud.tm(f"prebackup{live}", self.vm, *words)
        check_copies(self.cloud, self.vm, len(self.numbers), seed)
        keep(self.cloud, self.vm)
        self.cloud.tm(f"postbackup{live}", self.vm, *words)

    def let_go(self) -> list[int]:
        """Have its remote-first disks be overlays; return which."""
        rows = said(self.cloud, "detach", str(self.vm))["rows"]
        assert {row["how"] for row in rows} == {"detached"}, rows
        return sorted(row["disk"] for row in rows)

    def check_stored(self, last: str) -> None:
        """See that each image has what it was made of, and the persistent ones `last`, what the guest had
        when the VM ended.
        """
        for image, format, seed, at in self.saved:
            assert self.stored(image, format, at) == content(seed, at, KIB)
        for format in self.formats:
            assert self.stored(self.images["diff", format], format, AT) == content(last, AT, KIB)


def kept(format: str) -> int:
    """Return which of the two snapshots of a disk is not deleted: below what the guest has, or below a layer
    that took it over.
    """
    return int(format == "qcow2")


def test_a_mixed_vm_on_a_pool_through_all_that_is_done_to_it(cloud: Site, cell: Callable[..., None]) -> None:
    mixed = Mixed(cloud)
    guest = cloud.guest(mixed.vm)
    mixed.lies_on("h1")
    assert [cloud.limits(mixed.vm, target(disk)) for disk in mixed.numbers.values()] == [SCRATCH] * len(
        mixed.numbers
    )
    mixed.write("one")
    for disk in mixed.of_images:
        guest.loop(target(disk), f"loop-{disk}", 4096, 4096, 2)
    while_it_runs(mixed)
    attached_and_detached(mixed)
    moved_while_it_runs(mixed)
    guest = cloud.guest(mixed.vm)
    for disk in mixed.of_images:
        counts = guest.loop_stop(target(disk))
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, (disk, counts)
    saved_and_moved(mixed)
    mixed.oned.vm_poweroff(mixed.vm, hard=True)
    while_it_is_off(mixed)
    taken_back_from_a_backup(mixed)
    lets_go_while_it_runs(mixed)
    cloud.terminate(mixed.vm)
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.leftovers() == []
    mixed.check_stored("three")
    every, ours = (*PLACES, "volatile"), [place for place in PLACES if place != "diff"]
    cell(("clone", "delete", "limit", "resize", "backup"), every, FORMATS, ("off", "live"), "pool")
    cell(("mv", "restore"), every, FORMATS, "off", "pool")
    cell("migrate", every, FORMATS, "live", "pool")
    cell("cpds", list(PLACES), FORMATS, ("off", "live"), "pool")
    cell(("snap_create", "snap_delete"), list(PLACES), FORMATS, ("off", "live"), "pool")
    cell("snap_revert", list(PLACES), FORMATS, "off", "pool")
    cell("cpds-snapshot", ours, FORMATS, ("off", "live"), "pool")
    cell("detach", "remote-first", FORMATS, ("off", "live"), "pool")


def refused(mixed: Mixed) -> None:
    """See that there are no snapshots of disks whose image has them itself."""
    for format in mixed.formats:
        with pytest.raises(ActionFailed, match="local disk of a persistent image"):
            mixed.oned.disk_snapshot_create(mixed.vm, mixed.numbers["diff", format], "refused")


def while_it_runs(mixed: Mixed) -> None:
    """Take and delete snapshots, save, commit, grow and back up under a guest that writes."""
    cloud, vm = mixed.cloud, mixed.vm
    guest = cloud.guest(vm)
    for number, seed in enumerate(("between", "after")):
        for disk in mixed.with_snapshots:
            assert mixed.oned.disk_snapshot_create(vm, disk, f"s{number}") == number
            guest.write(target(disk), seed, 2048 + number * KIB, KIB)
    mixed.save(mixed.with_snapshots, "one", snapshot=lambda disk: 0)
    for disk, format in mixed.with_snapshots.items():
        mixed.oned.disk_snapshot_delete(vm, disk, 1 - kept(format))
    refused(mixed)
    mixed.save(mixed.of_images, "one")
    cloud.lab.fe.run([COMMAND, "commit", str(vm)], timeout=120)
    for format in mixed.formats:
        assert mixed.stored(mixed.images["diff", format], format, AT) == content("one", AT, KIB)
    mixed.grow(24)
    assert {guest.disks()[target(disk)] >> 20 for disk in mixed.numbers.values()} == {24}
    if not roots.LIBVIRT_7_0:
        mixed.back_up("_live", "one")


def attached_and_detached(mixed: Mixed) -> None:
    """Attach and detach a disk of each kind while it runs."""
    cloud, vm = mixed.cloud, mixed.vm
    guest, hot = cloud.guest(vm), target(len(mixed.numbers) + 1)
    for place, format in mixed.numbers:
        if place == "volatile":
            disk = mixed.oned.disk_attach(vm, attributes={"TYPE": "fs", "SIZE": "16", "FORMAT": format})
        elif (place, format) == ("remote-first", "rbd"):
            with pytest.raises(ActionFailed, match="no words for as whom"):
                mixed.oned.disk_attach(vm, mixed.images[place, format])
            mixed.lies_on("h1")
            continue
        else:
            # One that another disk's image cannot be, and one of which its host has no base yet.
            anew = place in ("diff", "overlay")
            image = (
                mixed.image(f"hot-{place}-{format}", place, format) if anew else mixed.images[place, format]
            )
            disk = mixed.oned.disk_attach(vm, image)
        assert len(layers(cloud.lab.node("h1"))) == len(mixed.own) + 1
        guest.wait_disk(hot)
        assert cloud.limits(vm, hot) == SCRATCH
        guest.check(hot, "zero" if place == "volatile" else "base", 0, KIB)
        guest.write(hot, "hot", AT, KIB)
        mixed.oned.disk_detach(vm, disk)
        guest.wait_disk(hot, present=False)
        if place == "diff":
            assert mixed.stored(image, format, AT) == content("hot", AT, KIB)
    mixed.lies_on("h1")


AROUND = (("h2", SYSTEM), ("h2", OTHER_SYSTEM), ("h1", OTHER_SYSTEM), ("h1", SYSTEM))


def moved_while_it_runs(mixed: Mixed, around: Sequence[tuple[str, int]] = AROUND) -> None:
    """Migrate it live, to the other host with other devices and back, and from datastore to datastore."""
    cloud, vm = mixed.cloud, mixed.vm
    for host, system in around:
        mixed.oned.vm_migrate(vm, host, system, how="live")
        assert mixed.oned.state(vm) == ("ACTIVE", 3)
        mixed.lies_on(host)
        cloud.guest(vm).check(target(1), "one", AT, KIB)


def saved_and_moved(mixed: Mixed) -> None:
    """Suspend it and let it go on; stop it and let it go on elsewhere."""
    mixed.write("two")
    mixed.oned.vm_suspend(mixed.vm)
    mixed.oned.vm_resume(mixed.vm)
    mixed.oned.vm_stop(mixed.vm)
    assert [layers(node) for node in mixed.cloud.lab.hosts] == [[], []]
    mixed.oned.vm_resume(mixed.vm)
    mixed.oned.vm_deploy(mixed.vm, "h2", SYSTEM)
    mixed.lies_on("h2")
    mixed.check("two")


def while_it_is_off(mixed: Mixed) -> None:
    """Do the same without a guest, and move it."""
    cloud, vm, h1 = mixed.cloud, mixed.vm, mixed.cloud.lab.node("h1")
    mixed.save(mixed.of_images, "two")
    mixed.save(mixed.with_snapshots, "one", snapshot=lambda disk: kept(mixed.with_snapshots[disk]))
    for disk in mixed.with_snapshots:
        mixed.oned.disk_snapshot_delete(vm, disk, mixed.oned.disk_snapshot_create(vm, disk, "off"))
    refused(mixed)
    mixed.grow(32)
    mixed.oned.vm_migrate(vm, "h1", OTHER_SYSTEM)
    mixed.lies_on("h1")
    mixed.back_up("", "two")
    mixed.oned.vm_migrate(vm, "h1", SYSTEM)
    for disk, format in mixed.with_snapshots.items():
        mixed.oned.disk_snapshot_revert(vm, disk, kept(format))
        record = json.loads(h1.path(f"{cloud.vm_dir(vm)}/.semishared/disk.{disk}.json").read_text())
        read = [cloud.read(record["path"], "qcow2", KIB << 10, at << 10, h1) for at in (AT, 2048)]
        assert read == [
            content("one", AT, KIB),
            content("between", 2048, KIB) if kept(format) else bytes(KIB << 10),
        ]
    more = [mixed.oned.disk_attach(vm, mixed.images["remote-first", format]) for format in mixed.formats]
    mixed.own |= set(more)
    mixed.lies_on("h1")
    assert mixed.let_go() == [*(mixed.numbers["remote-first", format] for format in mixed.formats), *more]
    for disk in more:
        mixed.oned.disk_detach(vm, disk)
    mixed.own -= set(more)
    mixed.lies_on("h1")


def taken_back_from_a_backup(mixed: Mixed) -> None:
    """Restore its disks from when it was off, and start it elsewhere."""
    with in_repository(mixed.cloud, mixed.vm) as image:
        mixed.cloud.tm("restore", mixed.vm, str(mixed.vm), str(image), "-1", "-1")
    mixed.oned.vm_undeploy(mixed.vm)
    assert [layers(node) for node in mixed.cloud.lab.hosts] == [[], []]
    mixed.oned.vm_deploy(mixed.vm, "h2", SYSTEM)
    mixed.check("two")
    guest = mixed.cloud.guest(mixed.vm)
    assert {guest.disks()[target(disk)] >> 20 for disk in mixed.numbers.values()} == {32}
    for disk in mixed.of_images:
        guest.check(target(disk), "base", 0, KIB)
    mixed.write("three")


def lets_go_while_it_runs(mixed: Mixed) -> None:
    """Let its guest go on over bases of its host."""
    guest = mixed.cloud.guest(mixed.vm)
    more = {
        mixed.oned.disk_attach(mixed.vm, mixed.images["remote-first", format]): format
        for format in mixed.formats
    }
    letters = [target(len(mixed.numbers) + number) for number in (1, 2)]
    for letter in letters:
        guest.wait_disk(letter)
        guest.loop(letter, f"loop-{letter}", 4096, 4096, 5)
    assert mixed.let_go() == sorted(more)
    for letter in letters:
        guest.wait_written(letter)
        counts = guest.loop_stop(letter)
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
        guest.check(letter, "base", 0, KIB)
    for disk in more:
        assert device_of(mixed.cloud, mixed.vm, disk) in PATHS["h2"]
