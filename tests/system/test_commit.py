# SPDX-License-Identifier: Apache-2.0
"""Persistent disks that live on the host, with real guests: committed while they write and at the end, moved,
kept, refused.
"""

from __future__ import annotations

import json
import re
from typing import Any, Callable

import pytest

from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.guest import Guest, content
from lab.oned import ActionFailed

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 64
DATA = content("base", 0, KIB)
FORMATS = ("raw", "qcow2")
DISKS = {"vdb": 1, "vdc": 2}
LOCAL: dict[str, Any] = {"SEMISHARED_PLACE": "local"}


def said(cloud: Cloud, *words: str, code: int = 0) -> str:
    """Run `semishared`; return what it prints."""
    done = cloud.lab.fe.run([COMMAND, *words], check=False, timeout=300)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode() + done.stderr.decode()


def bases(cloud: Cloud, node: Any, image: int) -> list[str]:
    """Return the bases of an image on a host."""
    names = cloud.files(node, f"{DATASTORES}/.semishared/bases")
    return [name for name in names if name.startswith(f"{STORE}-{image}-") and "/" not in name]


def uncommitted(cloud: Cloud, vm: int) -> dict[int, int]:
    """Return the bytes of each disk that `status` says are on its host alone."""
    rows: list[dict[str, Any]] = json.loads(said(cloud, "status", "--json", f"vm:{vm}"))["disks"]
    return {row["disk"]: row["uncommitted"] for row in rows if row["how"] == "diff"}


class Standing:
    """A VM with a local disk of a persistent image in each format."""

    def __init__(self, cloud: Cloud, name: str, os_image: int, context: bool = False) -> None:
        self.cloud = cloud
        self.images = [
            cloud.data_image(f"{name}-{format}", DATA, persistent=True, format=format, **LOCAL)
            for format in FORMATS
        ]
        self.vm = cloud.deploy(
            name, [{"IMAGE_ID": str(image)} for image in (os_image, *self.images)], context=context
        )

    @property
    def guest(self) -> Guest:
        return self.cloud.guest(self.vm)

    def stored(self, offset: int) -> list[bytes]:
        """Return 64 KiB of each image on the store, at an offset in KiB."""
        where = [(self.cloud.source(image), format) for image, format in zip(self.images, FORMATS)]
        return [self.cloud.read(source, format, KIB << 10, offset << 10) for source, format in where]

    def write(self, seed: str, offset: int) -> None:
        guest = self.guest
        for target in DISKS:
            guest.write(target, seed, offset, KIB)

    def check(self, seed: str, offset: int) -> None:
        guest = self.guest
        for target in DISKS:
            guest.check(target, seed, offset, KIB)


def test_a_guest_that_writes_is_committed_and_moves(
    cloud: Cloud, os_image: int, cell: Callable[..., None]
) -> None:
    standing = Standing(cloud, "commits", os_image)
    vm, zeros = standing.vm, bytes(KIB << 10)
    standing.check("base", 0)
    standing.write("one", 1024)
    assert standing.stored(1024) == [zeros, zeros]
    assert all(size > 0 for size in uncommitted(cloud, vm).values())
    for target in DISKS:
        standing.guest.loop(target, f"loop-{target}", 8192, 4096, 4)
    for turn, seed in enumerate(("one", "two", "three")):
        standing.write(seed, 1024 + turn * KIB)
        assert len(re.findall(r"[0-9] .iB committed", said(cloud, "commit", str(vm)))) == 2
        assert standing.stored(1024 + turn * KIB) == [content(seed, 1024 + turn * KIB, KIB)] * 2
    # The layers of earlier commits are gone: the committed one and the one that is written are left.
    names = cloud.files(cloud.lab.node("h1"), f"{cloud.vm_dir(vm)}/disk.1.snap")
    assert len(names) == 2, names
    with pytest.raises(ActionFailed, match="local disk of a persistent image"):
        cloud.oned.disk_snapshot_create(vm, 1, "refused")
    for target, number in DISKS.items():
        cloud.oned.disk_resize(vm, number, 24)
        assert standing.guest.disks()[target] == 24 << 20
    # What its layers lie over is on no store any more: the target has it from the host it leaves.
    cloud.oned.vm_migrate(vm, "h2", how="live")
    assert cloud.oned.state(vm) == ("ACTIVE", 3)
    for target in DISKS:
        standing.guest.wait_written(target)
        counts = standing.guest.loop_stop(target)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
        assert counts["writes"] > 10
    standing.write("end", (24 << 10) - KIB)
    cloud.oned.vm_poweroff(vm, hard=True)
    with pytest.raises(ActionFailed, match="local disk of a persistent image"):
        cloud.oned.disk_snapshot_create(vm, 1, "refused")
    said(cloud, "commit", "commits", "1")
    assert standing.stored((24 << 10) - KIB)[0] == content("end", (24 << 10) - KIB, KIB)
    for number in DISKS.values():
        cloud.oned.disk_resize(vm, number, 32)
    cloud.oned.vm_migrate(vm, "h1")
    cloud.oned.vm_resume(vm)
    standing.check("end", (24 << 10) - KIB)
    standing.write("late", (32 << 10) - KIB)
    cloud.oned.vm_undeploy(vm, hard=True)
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    assert standing.stored((32 << 10) - KIB) == [content("late", (32 << 10) - KIB, KIB)] * 2
    cloud.oned.vm_deploy(vm, "h2", SYSTEM)
    for seed, offset in (
        ("base", 0),
        ("one", 1024),
        ("three", 1024 + 2 * KIB),
        ("end", (24 << 10) - KIB),
        ("late", (32 << 10) - KIB),
    ):
        standing.check(seed, offset)
    standing.write("last", 2048)
    cloud.terminate(vm)
    assert standing.stored(2048) == [content("last", 2048, KIB)] * 2
    assert cloud.leftovers() == []
    cell("resize", "diff", FORMATS, ("off", "live"))
    cell("migrate", "diff", FORMATS, "live")
    cell(("snap_create", "snap_delete"), "diff", FORMATS, ("off", "live"))
    cell("snap_revert", "diff", FORMATS, "off")


def test_what_is_deleted_before_it_was_committed_is_kept(cloud: Cloud, os_image: int) -> None:
    standing = Standing(cloud, "keeps", os_image)
    vm = standing.vm
    standing.write("one", 1024)
    cloud.oned.vm_recover(vm, "delete")
    kept = [
        name
        for name in cloud.files(cloud.lab.node("h1"), f"{DATASTORES}/{SYSTEM}")
        if re.match(r"\.kept-[^/]*\Z", name)
    ]
    assert len(kept) == 2 and all(name.startswith(f".kept-{vm}-") for name in kept)
    listed = json.loads(said(cloud, "status", "--json"))["kept"]
    assert sorted((item["vm"], item["disk"]) for item in listed) == [(vm, 1), (vm, 2)]
    found = said(cloud, "gc", "--now")
    assert all(f"{name}: a persistent disk" in found and f"--discard {name}" in found for name in kept)
    said(cloud, "gc", "--discard", ".kept-none", code=2)
    for image in standing.images:
        cloud.oned.image_enable(image)
    # Another VM takes the second image: what was kept of it is its no more.
    other = cloud.deploy(
        "takes", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(standing.images[1])}], context=False
    )
    assert "SS140" in said(cloud, "commit", str(vm), code=1)
    first, second = standing.stored(1024)
    assert (first, second) == (content("one", 1024, KIB), bytes(KIB << 10))
    command = re.search(r"--source (\S+)", said(cloud, "commit", str(vm), "2", "--as-new-image", "rescued"))
    assert command and command.group(1).startswith(f"{DATASTORES}/{STORE}/")
    assert cloud.read(command.group(1), "qcow2", KIB << 10, 1024 << 10) == content("one", 1024, KIB)
    cloud.lab.fe.path(command.group(1)).unlink()
    cloud.terminate(other)
    (left,) = json.loads(said(cloud, "status", "--json"))["kept"]
    said(cloud, "gc", "--now", "--discard", left["path"].rpartition("/")[2])
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []


def test_an_image_that_changed_stops_nothing_but_the_commit(cloud: Cloud, os_image: int) -> None:
    standing = Standing(cloud, "changed", os_image)
    vm = standing.vm
    standing.write("one", 1024)
    cloud.lab.fe.run(
        ["qemu-io", "-f", "raw", "-c", "write -P 0x99 8M 64k", cloud.source(standing.images[0])],
        user="oneadmin",
    )
    assert "SS141" in said(cloud, "commit", str(vm), "1", code=1)
    assert "onevm disk-saveas" in said(cloud, "commit", str(vm), "1", "--as-new-image", "another")
    # Nobody else has what it lies over, so that goes along: to the front-end, to another host, and back.
    for seed, host in (("one", "h2"), ("two", "h1")):
        cloud.oned.vm_undeploy(vm, hard=True)
        assert "its base with it" in cloud.said("mv")[-1]
        assert standing.stored(1024) == [bytes(KIB << 10), content("one", 1024, KIB)]
        said(cloud, "gc", "--now")
        said(cloud, "base", "evict", str(standing.images[0]))
        assert not [name for node in cloud.lab.hosts for name in bases(cloud, node, standing.images[0])]
        cloud.oned.vm_deploy(vm, host, SYSTEM)
        standing.check("base", 0)
        standing.check("one", 1024)
        if seed == "one":
            standing.write("two", 2048)
    standing.check("two", 2048)
    with pytest.raises(ActionFailed, match="SS141"):
        cloud.terminate(vm)
    cloud.oned.vm_recover(vm, "delete")
    assert [item["disk"] for item in json.loads(said(cloud, "status", "--json"))["kept"]] == [1]
    (kept,) = [
        item["path"].rpartition("/")[2] for item in json.loads(said(cloud, "status", "--json"))["kept"]
    ]
    said(cloud, "gc", "--now", "--discard", kept)
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []


def test_a_migration_that_fails_after_its_commit_leaves_a_vm_that_boots(cloud: Cloud, os_image: int) -> None:
    # What the migration that failed leaves beside the VM's directory, the next that is made there removes:
    # its context.
    standing = Standing(cloud, "stays", os_image, context=True)
    vm = standing.vm
    standing.write("one", 1024)
    said(cloud, "commit", str(vm))
    standing.write("two", 2048)
    # Nothing is renewed below a guest: not by a move of a VM that oned has given back to its host meanwhile.
    words = [
        "/var/lib/one/remotes/tm/semishared/mv",
        *(f"{host}:{cloud.vm_dir(vm)}" for host in ("h1", "h2")),
        str(vm),
        str(SYSTEM),
    ]
    done = cloud.lab.fe.run(words, input=cloud.oned.vm(vm).to_xml().encode(), check=False, timeout=120)
    assert done.returncode and re.search("is not moved: domain .* runs there", done.stderr.decode())
    assert standing.stored(2048) == [bytes(KIB << 10)] * 2
    cloud.oned.vm_poweroff(vm, hard=True)
    in_the_way = cloud.lab.node("h2").path(cloud.vm_dir(vm))
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("no directory")
    with pytest.raises(ActionFailed, match="SS071"):
        cloud.oned.vm_migrate(vm, "h2")
    assert standing.stored(2048) == [content("two", 2048, KIB)] * 2
    cloud.oned.vm_recover(vm, "failure")
    for image in standing.images:
        said(cloud, "base", "evict", str(image), code=1)  # a disk has a lease on it
    cloud.oned.vm_resume(vm)
    for seed, offset in (("base", 0), ("one", 1024), ("two", 2048)):
        standing.check(seed, offset)
    standing.write("three", 3072)
    in_the_way.unlink()
    cloud.terminate(vm)
    assert standing.stored(3072) == [content("three", 3072, KIB)] * 2
    assert cloud.leftovers() == []


def test_a_stopped_guest_goes_on_over_the_base_that_came_along(cloud: Cloud, os_image: int) -> None:
    standing = Standing(cloud, "stops", os_image)
    vm = standing.vm
    standing.write("one", 1024)
    said(cloud, "commit", str(vm))
    standing.write("two", 2048)
    cloud.lab.fe.run(
        ["qemu-io", "-f", "raw", "-c", "write -P 0x99 8M 64k", cloud.source(standing.images[0])],
        user="oneadmin",
    )
    cloud.oned.vm_stop(vm)
    assert standing.stored(2048) == [bytes(KIB << 10), content("two", 2048, KIB)]
    for image in standing.images:
        said(cloud, "base", "evict", str(image))
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_deploy(vm, "h2", SYSTEM)
    for seed, offset in (("base", 0), ("one", 1024), ("two", 2048)):
        standing.check(seed, offset)
    standing.write("three", 3072)
    cloud.oned.vm_undeploy(vm, hard=True)
    assert standing.stored(3072) == [bytes(KIB << 10), content("three", 3072, KIB)]
    said(cloud, "base", "evict", str(standing.images[0]))
    # Nobody has it but the front-end, which keeps it.
    cloud.oned.vm_recover(vm, "delete")
    (kept,) = json.loads(said(cloud, "status", "--json"))["kept"]
    assert (kept["vm"], kept["disk"]) == (vm, 1)
    assert "SS141" in said(cloud, "commit", str(vm), code=1)
    command = re.search(r"--source (\S+)", said(cloud, "commit", str(vm), "1", "--as-new-image", "another"))
    assert command
    saved = cloud.lab.fe.path(command.group(1))
    for seed, offset in (("base", 0), ("one", 1024), ("two", 2048), ("three", 3072)):
        assert cloud.read(command.group(1), "raw", KIB << 10, offset << 10) == content(seed, offset, KIB)
    saved.unlink()
    said(cloud, "gc", "--now", "--discard", kept["path"].rpartition("/")[2])
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []


@pytest.mark.long  # ssh gives a dead host its time for each file that oned has removed
def test_what_a_host_has_that_was_away_while_its_vm_was_made_anew_is_kept_there(
    cloud: Cloud, os_image: int
) -> None:
    """`onevm recover --recreate` while the host is away: nobody cleans up there, and the VM comes up
    elsewhere without what was written.
    """
    standing = Standing(cloud, "anew", os_image)
    vm, lost = standing.vm, cloud.lab.node("h1")
    standing.write("lost", 1024)
    lost.kill()
    try:
        cloud.oned.vm_recover(vm, "recreate")
        cloud.oned.vm_deploy(vm, "h2", SYSTEM)
    finally:
        lost.start()
    assert any("as it was before the VM was made anew, on h1" in call.stderr for call in cloud.oned.calls)
    standing.check("base", 0)
    standing.write("anew", 2048)
    said(cloud, "gc", "--now")
    assert f"{SYSTEM}/{vm}" not in "\n".join(cloud.files(lost, f"{DATASTORES}/{SYSTEM}"))
    listed = json.loads(said(cloud, "status", "--json"))["kept"]
    assert sorted((item["host"], item["vm"], item["disk"]) for item in listed) == [
        ("h1", vm, 1),
        ("h1", vm, 2),
    ]
    cloud.terminate(vm)
    assert standing.stored(2048) == [content("anew", 2048, KIB)] * 2
    assert standing.stored(1024) == [bytes(KIB << 10)] * 2
    command = re.search(r"--source (\S+)", said(cloud, "commit", str(vm), "2", "--as-new-image", "rescued"))
    assert command and cloud.read(command.group(1), "qcow2", KIB << 10, 1024 << 10) == content(
        "lost", 1024, KIB
    )
    cloud.lab.fe.path(command.group(1)).unlink()
    said(
        cloud,
        "gc",
        "--now",
        *(word for item in listed for word in ("--discard", item["path"].rpartition("/")[2])),
    )
    said(cloud, "gc", "--now")
    assert cloud.leftovers() == []
