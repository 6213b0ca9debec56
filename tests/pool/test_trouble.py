# SPDX-License-Identifier: Apache-2.0
"""Devices that die, and a host that does, under running guests: VMs of that device stop, and no others; it is
said which.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from lab.cloud import DATASTORES, SYSTEM
from lab.guest import Guest, content, serial_xml
from lab.oned import ActionFailed
from pool.conftest import COMMAND, DEVICES, Site
from pool.test_pool import DECLARED, device_of, layers, names, of_pool, said

ERROR, MONITORED = 3, 2
PAUSED = "<!-- lab: paused -->"
DATA = content("base", 0, 64)


@pytest.fixture(autouse=True)
def _declared(cloud: Site) -> Iterator[None]:
    for host in ("h1", "h2"):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": DECLARED})
    said(cloud, "pool", "add", "h1,h2")
    yield
    for path in wrong(cloud):
        cloud.disks["h1", path].unmount()
        cloud.disks["h1", path].mount()


@contextmanager
def alone(cloud: Site, path: str) -> Iterator[None]:
    """Let one device of h1 be the only one with room."""
    with ExitStack() as stack:
        for other in set(DEVICES) - {path}:
            filler = cloud.lab.node("h1").path(f"{other}/filler")
            stat = os.statvfs(filler.parent)
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - (8 << 20))
            stack.callback(filler.unlink)
        yield


def until_it_errs(guest: Guest) -> None:
    deadline = time.monotonic() + 60
    while not guest.loop_stat("vda")["errors"]:
        assert time.monotonic() < deadline, "its device is dead, and it has not noticed"
        time.sleep(0.2)


def goes_on(guest: Guest) -> None:
    """See that a guest writes, and reads what it has written."""
    before, deadline = guest.loop_stat("vda")["writes"], time.monotonic() + 60
    while guest.loop_stat("vda")["writes"] < before + 3:
        assert time.monotonic() < deadline, "it does not go on"
        time.sleep(0.2)
    now = guest.loop_stat("vda")
    assert (now["errors"], now["mismatches"]) == (0, 0), now


def wrong(cloud: Site) -> dict[str, str]:
    """Return what is wrong with devices of h1, by their paths, as `pool list` has it."""
    (host,) = said(cloud, "pool", "list", "h1")["hosts"]
    return {row["path"]: row["state"] for row in host["devices"] if row["state"]}


def cannot_start(cloud: Site, vm: int, path: str, why: str) -> None:
    with pytest.raises(ActionFailed, match=rf"SS161 (?=.* of h1, which {re.escape(why)}).*{path}"):
        cloud.oned.vm_resume(vm)


def test_devices_that_die_under_running_guests_cost_their_own_vms_and_no_others(cloud: Site) -> None:
    h1, (failing, faulty, sound) = cloud.lab.node("h1"), DEVICES
    images, vms = {}, {}
    for path in DEVICES:
        images[path] = cloud.os_image(f"on{path.replace('/', '-')}")
        with alone(cloud, path):
            vms[path] = cloud.deploy(
                f"on{path.replace('/', '-')}", [{"IMAGE_ID": str(images[path])}], context=False
            )
        assert device_of(cloud, vms[path], 0) == path
    guests = {path: cloud.guest(vm) for path, vm in vms.items()}
    for path, guest in guests.items():
        guest.write("vda", f"kept-{path}", 12288, 64)
        guest.loop("vda", "loop", 8192, 2048, 5)

    cloud.disks["h1", failing].fail()
    until_it_errs(guests[failing])
    goes_on(guests[faulty])
    is_broken = (
        f"broken h1 pool: {failing} is broken: Input/output error: disks on it cannot start, and it "
        f"takes no new ones"
    )
    assert of_pool(cloud) == [is_broken]
    cloud.disks["h1", faulty].become_read_only()
    until_it_errs(guests[faulty])
    goes_on(guests[sound])
    assert wrong(cloud) == {failing: "broken: Input/output error", faulty: "read-only"}
    assert set(of_pool(cloud)) == {
        is_broken,
        is_broken.replace(failing, faulty).replace("broken: Input/output error", "read-only"),
    }

    # All that is done to others goes on, and what is new goes to what is left, with its base.
    for path in (failing, faulty):
        other = cloud.deploy(
            f"other{path.replace('/', '-')}", [{"IMAGE_ID": str(images[path])}], context=False
        )
        assert device_of(cloud, other, 0) == sound
        cloud.guest(other).write("vda", "other", 12288, 64)
        cloud.guest(other).check("vda", "other", 12288, 64)
        cloud.terminate(other)
    cloud.oned.disk_snapshot_create(vms[sound], 0, "s")
    cloud.oned.disk_saveas(vms[sound], 0, "saved")
    cloud.oned.disk_snapshot_delete(vms[sound], 0, 0)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], check=False, timeout=60)

    for path in (failing, faulty):
        cloud.oned.vm_poweroff(vms[path], hard=True)
    # What can be read is read.
    cloud.oned.vm_migrate(vms[faulty], "h2", SYSTEM)
    cloud.oned.vm_resume(vms[faulty])
    cloud.guest(vms[faulty]).check("vda", f"kept-{faulty}", 12288, 64)
    cannot_start(cloud, vms[failing], failing, "is broken: Input/output error")

    cloud.disks["h1", failing].unmount()
    cannot_start(cloud, vms[failing], failing, "is not there")
    assert wrong(cloud) == {failing: "not there", faulty: "read-only"}
    goes_on(guests[sound])
    cloud.lab.fe.run([COMMAND, "gc", "--now"], check=False, timeout=60)
    assert names(h1, failing) == [], "written where nothing is mounted"

    for path in (failing, faulty):
        cloud.disks["h1", path].unmount()
        cloud.disks["h1", path].mount()
    assert of_pool(cloud) == []
    cloud.oned.vm_resume(vms[failing])
    cloud.guest(vms[failing]).check("vda", f"kept-{failing}", 12288, 64)
    counts = guests[sound].loop_stop("vda")
    assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    for vm in vms.values():
        cloud.terminate(vm)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=60)
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.leftovers() == []


def test_a_lost_host_with_a_pool_is_taken_over_and_starts_before_its_devices_do(cloud: Site) -> None:
    h1 = cloud.lab.node("h1")
    recreate: dict[str, Any] = {"SEMISHARED_ON_HOST_FAILURE": "recreate"}
    images = [
        cloud.data_image("again", DATA, **recreate),
        cloud.data_image("again-diff", DATA, persistent=True, SEMISHARED_PLACE="local", **recreate),
    ]
    stays = cloud.data_image("stays", DATA)

    def deployed(name: str, *disks: int) -> int:
        raw = {"TYPE": "kvm", "DATA": serial_xml(name) + PAUSED}
        template = cloud.template(name, [{"IMAGE_ID": str(disk)} for disk in disks], context=False)
        vm = cloud.oned.vm_create({**template, "RAW": raw, "MEMORY": "32"})
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
        return vm

    moves, waits = deployed("moves", *images), deployed("waits", stays)
    on = device_of(cloud, waits, 0)
    cloud.oned.vm_poweroff(waits, hard=True)
    h1.kill()
    cloud.oned.vm_lose(moves)
    cloud.oned.host("h1").state = ERROR
    cloud.lab.fe.run([COMMAND, "fence", "h1", "--confirmed-off"], timeout=120)
    cloud.oned.vm_migrate(moves, "h2", SYSTEM)
    assert device_of(cloud, moves, 0) in DEVICES and device_of(cloud, moves, 1) in DEVICES
    for disk, image in enumerate(images):
        words = [
            "qemu-img",
            "compare",
            "-U",
            "-f",
            "qcow2",
            "-F",
            "raw",
            f"{cloud.vm_dir(moves)}/disk.{disk}",
            cloud.source(image),
        ]
        cloud.lab.node("h2").run(words)

    # It comes back, and what is below its mount points is there later than the rest of it.
    h1.start()
    cloud.oned.host("h1").state = MONITORED
    cloud.oned.forget_fences()
    assert wrong(cloud) == dict.fromkeys(DEVICES, "not there")
    cannot_start(cloud, waits, on, "is not there")
    cloud.lab.fe.run([COMMAND, "gc", "--now"], check=False, timeout=60)
    assert [names(h1, path) for path in DEVICES] == [[]] * 3
    for path in DEVICES:
        cloud.disks["h1", path].mount()
    assert of_pool(cloud) == []
    cloud.oned.vm_resume(waits)
    (kept,) = said(cloud, "status")["kept"]
    assert (kept["vm"], kept["disk"]) == (moves, 1)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=60)
    cloud.lab.fe.run([COMMAND, "gc", "--now", "--discard", kept["path"].rpartition("/")[2]], timeout=60)
    for vm in (moves, waits):
        cloud.terminate(vm)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=60)
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.files(h1, f"{DATASTORES}/{SYSTEM}/{moves}") == []
