# SPDX-License-Identifier: Apache-2.0
"""VMs of every place and format, as the version before this one has left them when it was killed in a long
job, go on under this checkout's version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Iterator, List

import pytest

from lab import roots
from lab.cloud import SYSTEM
from lab.forks import serve
from pool.devices import Disk
from upgrade import versions
from upgrade.killed import Killed, Row, let_die
from upgrade.world import COMMAND, installed

DEVICE_POINTS = ("guest has gone over", "layers are being mirrored", "base switched")
DIR = [
    Row("clone", "overlay", "qcow2", ("partial begun", "disk.0 layer renamed", "leased")),
    Row("clone", "copy", "raw", ("disk.0 staged", "disk.0 renamed")),
    Row("clone", "store-clone", "raw", ("store clone staged", "published clone.0.json")),
    Row("clone", "in-place", "qcow2", ("generation ended", "disk.0 staged")),
    Row("clone", "diff", "raw", ("image claimed", "disk.0 renamed", "claim written")),
    Row("clone", "memory", "raw", ("memory promised", "disk.0 renamed", "disk.0 staged"), "h2", "h2"),
    Row("clone", "volatile", "qcow2", ("disk.0 renamed", "disk.0 staged")),
    Row("snapshot", "overlay", "raw", ("guest switched", "layer recorded", "guest frozen")),
    Row("snapshot", "in-place", "raw", ("guest frozen", "disk mirrored", "disk copied")),
    Row("unsnapshot", "copy", "raw", ("layer merged", "published 1")),
    Row("pull", "store-clone", "qcow2", ("layer pulled", "pull noted beside the clone", "guest frozen")),
    Row("save", "in-place", "qcow2", ("disk copied", "job noted")),
    Row("save", "overlay", "qcow2", ("disk mirrored", "guest frozen")),
    Row("backup", "copy", "qcow2", ("backup job begun", "backup job done")),
    Row("detach", "remote-first", "raw", ("guest has gone over", "layers ready", "switch noted")),
    Row("commit", "diff", "qcow2", ("commit decided", "commit written", "layer active")),
    Row("finish", "diff", "raw", ("commit replayed", "commit decided", "commit staged")),
    Row("live", "overlay", "qcow2", ("guest writes to deltas", "directory sent", "deltas noted")),
    Row("live", "diff", "raw", ("vm directory published", "deltas mirrored"), "h2"),
    Row("move", "copy", "raw", ("incoming unpacked", "vm directory renamed", "incoming adopted"), "h2"),
    Row("undeploy", "overlay", "raw", ("directory sent", "lease released")),
    Row("device", "overlay", "raw", DEVICE_POINTS, "h2", "h2"),
    Row("device-off", "copy", "qcow2", ("layers switched", "file copied", "layers copied"), "h3", "h3"),
]
RBD = [
    Row("clone", "overlay", "raw", ("partial begun", "published source", "leased")),
    Row("clone", "store-clone", "raw", ("vm directory made", "published disk.0.json", "disk recorded")),
    Row("clone", "diff", "raw", ("image claimed", "disk.0 staged", "disk.0 renamed")),
    Row("snapshot", "overlay", "raw", ("guest switched", "layer recorded", "layer added")),
    Row("snapshot", "in-place", "raw", ("guest frozen", "moment over", "rest noted")),
    Row("unsnapshot", "overlay", "raw", ("layer merged", "published 1")),
    Row("save", "in-place", "raw", ("moment over", "guest frozen", "guest awake")),
    Row("backup", "store-clone", "raw", ("backup job begun", "backup job done")),
    Row("detach", "remote-first", "raw", ("layers lie over bases", "guest has gone over", "layers ready")),
    Row("commit", "diff", "raw", ("commit written", "commit decided", "change noted")),
    Row("finish", "diff", "raw", ("commit decided", "commit described", "layer active")),
    Row("live", "in-place", "raw", ("directory sent", "directory marked")),
    Row("live", "diff", "raw", ("incoming adopted", "deltas mirrored"), "h2"),
    Row("undeploy", "in-place", "raw", ("directory sent", "deletion noted")),
    Row("device", "diff", "raw", DEVICE_POINTS, "h2", "h2"),
]
NOT_ON_11 = ("backup", "commit", "finish")
"""libvirt 7.0 backs up no running guest, and 2a155d3f commits nothing with Python 3.9."""
ROWS = {
    kind: [row for row in rows if not (roots.LIBVIRT_7_0 and row.job in NOT_ON_11)]
    for kind, rows in (("dir", DIR), ("rbd", RBD))
}
DEVICES = {"/mnt/a": 320, "/mnt/b": 320}
MEMORY = "/mnt/ram"


def give_devices(world: Killed, folder: Path) -> Iterator[Disk]:
    """Give h2 a pool of two devices and memory, and h3 one of two devices."""
    for name in ("h2", "h3"):
        node, words = world.cloud.lab.node(name), " ".join(DEVICES)
        for path, mib in DEVICES.items():
            yield Disk(node, path, mib, folder)
        if name == "h2":
            node.run(["mkdir", "-p", MEMORY], user="root")
            node.run(["mount", "-t", "tmpfs", "-o", "size=192m,mode=755", "device", MEMORY], user="root")
            node.run(["chown", "oneadmin:oneadmin", MEMORY], user="root")
            words += f" {MEMORY}=ram"
        world.oned.host_update(world.oned.host(name).id, {"SEMISHARED_POOL": words})
        world.command("pool", "add", name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a test for each row of its class."""
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", ROWS[metafunc.cls.kind], ids=lambda row: row.name)


class GoesOn:
    """What must be true after the upgrade, with images in one kind of store."""

    kind = ""

    @pytest.fixture(
        scope="class", params=[0, *(pytest.param(turn, marks=pytest.mark.long) for turn in (1, 2))]
    )
    def world(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Killed]:
        """Return the cloud after the upgrade, with what the older version has left."""
        disks: List[Disk] = []
        with installed(self.kind, (SYSTEM,), versions.KILLED, hosts=3, prepare=let_die) as cloud:
            cloud.lab.fe.run([COMMAND, "setup", "--apply", "--system", f"semi_sys_{SYSTEM}"])
            world = Killed(cloud, self.kind, request.param)
            try:
                for disk in give_devices(world, tmp_path_factory.mktemp("devices")):
                    disks.append(disk)
                for row in ROWS[self.kind]:
                    world.kill(row)
                versions.install(cloud.lab)
                versions.sync(cloud.lab)
                serve(cloud.lab)
                yield world
            finally:
                cloud.delete_all()
                for disk in disks:
                    disk.close()

    def test_vm_goes_on(self, world: Killed, row: Row) -> None:
        with pytest.raises(StopIteration):
            next(world.left[row])

    def test_nothing_is_left(self, world: Killed) -> None:
        """The operator's commands find nothing but bases without images, once those are deleted."""
        cloud = world.cloud
        assert {cloud.oned.state(vm)[0] for vm in world.vms.values()} == {"DONE"}
        for image in sorted(cloud.oned.images):
            cloud.oned.image_delete(image)
        world.command("gc", "--now")
        assert cloud.leftovers() == []
        done = cloud.lab.fe.run([COMMAND, "gc", "--dry-run", "--now", "--json"], check=False)
        found = json.loads(done.stdout)
        assert found["errors"] == found["findings"] == []
        world.command("pool", "add", "h2,h3")  # those that were drained take disks again
        done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False)
        assert cloud.lab.unexplained(json.loads(done.stdout)["findings"]) == []


class TestMountedStore(GoesOn):
    kind = "dir"


@pytest.mark.long
class TestCeph(GoesOn):
    kind = "rbd"
