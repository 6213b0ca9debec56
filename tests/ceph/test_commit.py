# SPDX-License-Identifier: Apache-2.0
"""Persistent disks that live on the host, of images on Ceph, with real guests: committed by the host's user,
settled by the bridge.

On a mounted store: tests/system/test_commit.py. What every kind of store does with diffs:
tests/store/diff_cases.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Callable

import pytest

from lab.ceph import POOL, Cluster
from lab.cloud import DATASTORES, RBD_STORE, SYSTEM, Cloud
from lab.guest import Guest, content
from lab.oned import ActionFailed
from semishared.config import Config

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 64
ZEROS = bytes(KIB << 10)
DATA = content("base", 0, KIB)
LOCAL: dict[str, Any] = {"SEMISHARED_PLACE": "local"}
SCRATCH = Config().io_limits["scratch"]


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.delete_all()
    discarded(cloud)


def said(cloud: Cloud, *words: str, code: int = 0) -> str:
    """Run `semishared`; return what it prints."""
    done = cloud.lab.fe.run([COMMAND, *words], check=False, timeout=300)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode() + done.stderr.decode()


def discarded(cloud: Cloud) -> None:
    """Give up what was kept of VMs that were deleted."""
    for item in json.loads(said(cloud, "status", "--json"))["kept"]:
        said(cloud, "gc", "--now", "--discard", item["path"].rpartition("/")[2])


class Standing:
    """A VM with a local disk of a persistent image on Ceph: disk 1, vdb."""

    def __init__(self, cloud: Cloud, ceph: Cluster, name: str, os_image: int, **attributes: Any) -> None:
        self.cloud, self.ceph = cloud, ceph
        self.image = cloud.data_image(name, DATA, persistent=True, store=RBD_STORE, **LOCAL, **attributes)
        self.vm = cloud.deploy(
            name, [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(self.image)}], context=False
        )

    @property
    def name(self) -> str:
        """Return the name of the image in the pool."""
        return self.cloud.source(self.image).removeprefix(f"{POOL}/")

    @property
    def guest(self) -> Guest:
        return self.cloud.guest(self.vm)

    def stored(self, offset: int) -> bytes:
        """Return 64 KiB of the image, at an offset in KiB."""
        return self.ceph.read(self.name, KIB << 10, offset << 10)

    def uncommitted(self) -> int:
        """Return the bytes that `status` says are on the host alone."""
        rows: list[dict[str, Any]] = json.loads(said(self.cloud, "status", "--json", f"vm:{self.vm}"))[
            "disks"
        ]
        (found,) = [row["uncommitted"] for row in rows if row["how"] == "diff"]
        assert isinstance(found, int)
        return found

    def is_settled(self) -> None:
        """See that nobody has the image open, and one snapshot has its content."""
        found = self.ceph.images()[self.name]
        assert (found["watchers"], found["lockers"]) == ([], [])
        (snapshot,) = [snap["name"] for snap in found["snaps"]]
        assert re.match(r"semishared-[0-9a-f]{32}\Z", snapshot)


def test_a_guest_that_writes_is_committed_and_moves(
    cloud: Cloud, ceph: Cluster, os_image: int, cell: Callable[..., None]
) -> None:
    standing = Standing(cloud, ceph, "commits", os_image)
    vm = standing.vm
    assert standing.stored(0) == DATA
    standing.guest.check("vdb", "base", 0, KIB)
    standing.guest.write("vdb", "one", 1024, KIB)
    assert standing.stored(1024) == ZEROS and standing.uncommitted() > 0
    standing.is_settled()
    standing.guest.loop("vdb", "loop", 8192, 4096)
    for turn, seed in enumerate(("one", "two", "three")):
        standing.guest.write("vdb", seed, 1024 + turn * KIB, KIB)
        assert re.search(r"[0-9] .iB committed", said(cloud, "commit", str(vm)))
        assert standing.stored(1024 + turn * KIB) == content(seed, 1024 + turn * KIB, KIB)
        standing.is_settled()
    assert len(cloud.files(cloud.lab.node("h1"), f"{cloud.vm_dir(vm)}/disk.1.snap")) == 2
    with pytest.raises(ActionFailed, match="local disk of a persistent image"):
        cloud.oned.disk_snapshot_create(vm, 1, "refused")
    saved = [cloud.oned.disk_saveas(vm, 1, "commits-live")]
    cloud.oned.disk_resize(vm, 1, 24)
    assert standing.guest.disks()["vdb"] == 24 << 20
    # What its layers lie over is in no snapshot any more: the target has it from the host it leaves.
    cloud.oned.vm_migrate(vm, "h2", how="live")
    assert cloud.oned.state(vm) == ("ACTIVE", 3)
    counts = standing.guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    assert counts["writes"] > 10
    standing.guest.write("vdb", "end", (24 << 10) - KIB, KIB)
    cloud.oned.vm_poweroff(vm, hard=True)
    with pytest.raises(ActionFailed, match="local disk of a persistent image"):
        cloud.oned.disk_snapshot_create(vm, 1, "refused")
    said(cloud, "commit", "commits", "1")
    assert standing.stored((24 << 10) - KIB) == content("end", (24 << 10) - KIB, KIB)
    saved.append(cloud.oned.disk_saveas(vm, 1, "commits-off"))
    cloud.oned.disk_resize(vm, 1, 32)
    cloud.oned.vm_migrate(vm, "h1")
    cloud.oned.vm_resume(vm)
    standing.guest.check("vdb", "end", (24 << 10) - KIB, KIB)
    standing.guest.write("vdb", "late", (32 << 10) - KIB, KIB)
    cloud.oned.vm_undeploy(vm, hard=True)
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    assert standing.stored((32 << 10) - KIB) == content("late", (32 << 10) - KIB, KIB)
    standing.is_settled()
    cloud.oned.vm_deploy(vm, "h2", SYSTEM)
    for seed, offset in (
        ("base", 0),
        ("one", 1024),
        ("three", 1024 + 2 * KIB),
        ("end", (24 << 10) - KIB),
        ("late", (32 << 10) - KIB),
    ):
        standing.guest.check("vdb", seed, offset, KIB)
    standing.guest.write("vdb", "last", 2048, KIB)
    cloud.terminate(vm)
    assert standing.stored(2048) == content("last", 2048, KIB)
    standing.is_settled()
    for image in saved:
        source = cloud.source(image).removeprefix(f"{POOL}/")
        assert ceph.read(source, KIB << 10, 1024 << 10) == content("one", 1024, KIB)
    # Elsewhere, and once more.
    cloud.oned.image_update(standing.image, {"SEMISHARED_IO_CLASS": "scratch"})
    vm = standing.vm = cloud.deploy(
        "again", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(standing.image)}], host="h1", context=False
    )
    standing.guest.check("vdb", "last", 2048, KIB)
    assert cloud.limits(vm, "vdb") == SCRATCH
    cloud.oned.vm_undeploy(vm, hard=True)
    # The front-end has the bridge's key alone.
    cloud.terminate(vm)
    vm = standing.vm = cloud.deploy("hot", [{"IMAGE_ID": str(os_image)}], host="h2", context=False)
    disk = cloud.oned.disk_attach(vm, standing.image)
    standing.guest.wait_disk("vdb")
    assert cloud.limits(vm, "vdb") == SCRATCH
    standing.guest.check("vdb", "last", 2048, KIB)
    standing.guest.write("vdb", "hot", 2048, KIB)
    cloud.oned.disk_detach(vm, disk)
    assert standing.stored(2048) == content("hot", 2048, KIB)
    cloud.terminate(vm)
    standing.is_settled()
    assert cloud.leftovers() == []
    cell(("clone", "delete", "resize", "cpds", "limit"), "diff", "rbd", ("off", "live"))
    cell("migrate", "diff", "rbd", "live")
    cell("mv", "diff", "rbd", "off")
    cell(("snap_create", "snap_delete"), "diff", "rbd", ("off", "live"))
    cell("snap_revert", "diff", "rbd", "off")


def test_what_is_deleted_before_it_was_committed_is_kept(cloud: Cloud, ceph: Cluster, os_image: int) -> None:
    standing = Standing(cloud, ceph, "keeps", os_image)
    vm = standing.vm
    standing.guest.write("vdb", "one", 1024, KIB)
    cloud.oned.vm_recover(vm, "delete")
    (kept,) = [
        name
        for name in cloud.files(cloud.lab.node("h1"), f"{DATASTORES}/{SYSTEM}")
        if re.match(r"\.kept-[^/]*\Z", name)
    ]
    assert f"--discard {kept}" in said(cloud, "gc", "--now")
    # Beside the image, for OpenNebula to register.
    command = re.search(r"--source (\S+)", said(cloud, "commit", str(vm), "1", "--as-new-image", "rescued"))
    assert command
    rescued = command.group(1).removeprefix(f"{POOL}/")
    assert ceph.read(rescued, KIB << 10, 1024 << 10) == content("one", 1024, KIB)
    assert ceph.read(rescued, KIB << 10) == DATA
    assert standing.stored(1024) == ZEROS
    said(cloud, "gc", "--now")
    assert rescued in ceph.images(), "what was rescued is nobody's to remove"
    ceph.remove(rescued)
    assert "committed, and gone" in said(cloud, "commit", str(vm))
    assert standing.stored(1024) == content("one", 1024, KIB)
    standing.is_settled()
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []


@pytest.mark.long  # tests/store has both for images on Ceph too, tests/system/test_commit.py has guests
def test_two_vms_and_an_image_that_changed(cloud: Cloud, ceph: Cluster, os_image: int) -> None:
    standing = Standing(cloud, ceph, "changed", os_image)
    vm = standing.vm
    standing.guest.write("vdb", "one", 1024, KIB)
    cloud.oned.vm_recover(vm, "delete")
    cloud.oned.image_enable(standing.image)
    # Another VM takes the image: what was kept of it is its no more.
    other = cloud.deploy(
        "takes", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(standing.image)}], context=False
    )
    assert "SS140" in said(cloud, "commit", str(vm), code=1)
    cloud.guest(other).write("vdb", "two", 1024, KIB)
    ceph.rbd("snap", "create", f"{POOL}/{standing.name}@7")
    assert "SS141" in said(cloud, "commit", str(other), code=1)
    assert standing.stored(1024) == ZEROS
    cloud.guest(other).check("vdb", "two", 1024, KIB)
    ceph.rbd("snap", "rm", f"{POOL}/{standing.name}@7")
    said(cloud, "commit", str(other))
    cloud.terminate(other)
    assert standing.stored(1024) == content("two", 1024, KIB)
    discarded(cloud)
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []


def test_the_store_is_away(cloud: Cloud, ceph: Cluster, os_image: int) -> None:
    """The guest does not notice; what cannot be committed stays, and is committed when the store is back."""
    standing = Standing(cloud, ceph, "away", os_image)
    with ceph.stopped():
        standing.guest.write("vdb", "one", 1024, KIB)
        standing.guest.check("vdb", "base", 0, KIB)
        assert "SS" in said(cloud, "commit", str(standing.vm), code=1)
        cloud.oned.vm_undeploy(standing.vm, hard=True)
        assert "its base with it" in cloud.said("mv")[-1]
        said(cloud, "base", "evict", str(standing.image))
        # Where it is to run it needs nothing of the store.
        cloud.oned.vm_deploy(standing.vm, "h2", SYSTEM)
        standing.guest.check("vdb", "one", 1024, KIB)
        standing.guest.check("vdb", "base", 0, KIB)
        with pytest.raises(ActionFailed):
            cloud.terminate(standing.vm)
    cloud.oned.vm_recover(standing.vm, "retry")
    assert standing.stored(1024) == content("one", 1024, KIB)
    standing.is_settled()
    assert cloud.leftovers() == []
