# SPDX-License-Identifier: Apache-2.0
"""Many VMs at once on two hosts from three images: right disks, every base staged once, and nothing left of
them.

Three guests run and verify; the others are created paused, since two cores do not carry as many busy guests,
and their disks are verified from outside.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable

import pytest

from lab import moved
from lab.cloud import DATASTORES, STORE, Cloud
from lab.guest import content, serial_xml

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
PAUSED = "<!-- lab: paused -->"


def at_once(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Do `work` for all items at the same time; raise what the first that failed raised."""
    with ThreadPoolExecutor(30) as pool:
        return list(pool.map(work, items))


def gc(cloud: Cloud, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `semishared gc` as an operator does; return its JSON."""
    done = cloud.lab.fe.run([COMMAND, "gc", "--json", *options], check=False, timeout=60)
    assert done.returncode == code, (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


# Of 12, two are created at once on each host from each image, as of 30.
@pytest.mark.parametrize("count", [12, pytest.param(30, marks=pytest.mark.long)])
def test_many_vms_at_once_are_right_and_leave_nothing(
    cloud: Cloud, count: int, figure: Callable[[str, object], None]
) -> None:
    cloud.lab.fe.run([COMMAND, "gc", "--now"])  # bases of images that other tests have deleted
    images = [
        cloud.os_image("many-os"),
        cloud.data_image("many-raw", content("raw", 0, 64), 32),
        cloud.data_image("many-cow", content("cow", 0, 64), 32, format="qcow2"),
    ]
    formats = ["raw", "raw", "qcow2"]
    calls = len(cloud.oned.calls)
    vms = []
    for number in range(count):
        name = f"many-{number}"
        verifies = number in (0, 3, 6)
        more: dict[str, Any] = (
            {} if verifies else {"RAW": {"TYPE": "kvm", "DATA": serial_xml(name) + PAUSED}, "MEMORY": "32"}
        )
        template = cloud.template(name, [{"IMAGE_ID": str(images[number % 3])}], context=verifies)
        vms.append(cloud.oned.vm_create({**template, **more}))
    hosts = [cloud.lab.hosts[number % 2] for number in range(count)]
    at_once(lambda n: cloud.oned.vm_deploy(vms[n], hosts[n].name, 101), range(count))
    assert {cloud.oned.state(vm) for vm in vms} == {("ACTIVE", 3)}

    # Each base came to each host exactly once, whoever was first there: from the store, from the other host,
    # or from a base of it.
    staged: Counter[tuple[str, str]] = Counter()
    clones = [call for call in cloud.oned.calls[calls:] if call.action == "clone"]
    assert len(clones) == count
    for call in clones:
        if moved.by_host(call.stderr):
            staged[(call.argv[1].split(":")[0], call.argv[0].split("/")[-1])] += 1
    names = [cloud.source(image).split("/")[-1] for image in images]
    assert staged == {(host.name, name): 1 for host in cloud.lab.hosts for name in names}
    read = sum(moved.total(call.stderr, "store_read") for call in clones)
    allocated = sum(cloud.lab.fe.path(cloud.source(image)).stat().st_blocks * 512 for image in images)
    figure(
        f"{count} VMs: bytes read from the store by their images' allocated bytes", round(read / allocated, 2)
    )

    for number in (0, 3, 6):
        guest = cloud.guest(vms[number])
        guest.write("vda", number, 16384, 64)
        guest.check("vda", number, 16384, 64)
    for number in range(count):
        if number not in (0, 3, 6):
            source, format = cloud.source(images[number % 3]), formats[number % 3]
            disk = f"{DATASTORES}/101/{vms[number]}/disk.0"
            hosts[number].run(["qemu-img", "compare", "-U", "-f", "qcow2", "-F", format, disk, source])
    if (ROOT / "tm" / "snap_create_live").exists():
        numbers = at_once(lambda vm: cloud.oned.disk_snapshot_create(vm, 0, "all"), vms)
        assert set(numbers) == {0}
        cloud.guest(vms[3]).check("vda", 3, 16384, 64)

    assert gc(cloud, "--dry-run", "--now")["totals"]["found"] == 0, "nothing of running VMs is left over"
    at_once(cloud.terminate, vms)
    assert cloud.leftovers() == []
    answer = gc(cloud, "--dry-run", "--now")
    assert (answer["findings"], answer["errors"]) == ([], [])


def name(item: Dict[str, Any]) -> str:
    """Return the name of what was found, without the cloud's id."""
    return re.sub(r"-[0-9a-f]{32}(?=\.snap\Z|\Z)", "", item["path"].split("/")[-1])


def test_gc_removes_leftovers_on_all_machines_and_spares_what_is_in_use(cloud: Cloud) -> None:
    cloud.lab.fe.run([COMMAND, "gc", "--now"])
    image = cloud.data_image("left", b"left", 8)
    beside = cloud.data_image("left-beside", b"left", 8, SEMISHARED_PLACE="shared")
    disks = [{"IMAGE_ID": str(image)}, {"IMAGE_ID": str(beside)}]
    template: dict[str, Any] = {"RAW": {"TYPE": "kvm", "DATA": PAUSED}, "MEMORY": "32"}
    lives, zombie, done = (
        cloud.oned.vm_create({**cloud.template(name, disks, context=False), **template})
        for name in ("lives", "zombie", "done")
    )
    for vm in (lives, zombie, done):
        cloud.oned.vm_deploy(vm, "h1", 101)
    h1, h2, fe = cloud.lab.node("h1"), cloud.lab.node("h2"), cloud.lab.fe
    # oned forgets two VMs; of one the domain still runs, so that no file of it may go.
    h1.run(["virsh", "-q", "-c", "qemu:///system", "destroy", f"one-{done}"])
    forgotten = {vm: cloud.oned.vms.pop(vm) for vm in (zombie, done)}
    # Of VMs that are newer than all it knows, oned's database may be an older one that was restored.
    later = cloud.oned.vm_create(cloud.template("later", []))
    fe.run(["mkdir", "-p", f"{DATASTORES}/101/{done}/.semishared"])
    h2.run(["mkdir", "-p", f"{DATASTORES}/101/.incoming-{done}", f"{DATASTORES}/.semishared/staging/100-99"])
    fe.run(["mkdir", "-p", f"{DATASTORES}/{STORE}/.semishared/.uploads/{'a' * 32}"])
    try:
        assert gc(cloud, "--dry-run")["findings"] == [], "all of it is younger than an hour"
        seen = gc(cloud, "--dry-run", "--now", code=1)
        what = {(item["machine"], item["kind"], name(item)) for item in seen["findings"] if not item["keep"]}
        assert what == {
            ("h1", "vm", str(done)),
            ("fe", "vm", str(done)),
            ("fe", "clone", f"{done}-1"),
            ("fe", "clone", f"{done}-1.snap"),
            ("h2", "incoming", f".incoming-{done}"),
            ("h2", "staging", "100-99"),
            ("fe", "upload", "a" * 32),
        }
        kept = {(item["kind"], name(item)) for item in seen["findings"] if item["keep"]}
        assert kept == {("vm", str(zombie)), ("clone", f"{zombie}-1"), ("clone", f"{zombie}-1.snap")}
        files = cloud.files(h1, f"{DATASTORES}/101/{lives}"), cloud.files(h1, f"{DATASTORES}/101/{zombie}")
        answer = gc(cloud, "--now")
        assert (answer["totals"]["removed"], answer["errors"]) == (7, [])
        assert gc(cloud, "--dry-run", "--now")["totals"]["found"] == 0
        assert files == (
            cloud.files(h1, f"{DATASTORES}/101/{lives}"),
            cloud.files(h1, f"{DATASTORES}/101/{zombie}"),
        )
        h1.run(["virsh", "-q", "-c", "qemu:///system", "destroy", f"one-{zombie}"])
        assert gc(cloud, "--now")["totals"]["removed"] == 3
    finally:
        for gone in forgotten.values():
            for disk in gone.disks:
                cloud.oned.images[int(disk["IMAGE_ID"])].vms.remove(gone.id)
        cloud.oned.vms.pop(later)
        cloud.terminate(lives)
    assert cloud.leftovers() == []


def test_gc_reports_a_dead_host_and_asks_the_others(cloud: Cloud) -> None:
    h2 = cloud.lab.node("h2")
    gone = cloud.oned.vm_create(cloud.template("gone", []))
    cloud.oned.vms.pop(gone)
    later = cloud.oned.vm_create(cloud.template("later", []))
    cloud.lab.node("h1").run(["mkdir", "-p", f"{DATASTORES}/101/.incoming-{gone}"])
    h2.cut()
    try:
        answer = gc(cloud, "--now", code=2)
    finally:
        h2.join()
        cloud.oned.vms.pop(later)
    assert [error["machine"] for error in answer["errors"]] == ["h2"]
    assert "h2" in answer["errors"][0]["error"]
    assert answer["totals"]["removed"] == 1
    assert gc(cloud, "--dry-run", "--now")["findings"] == []
