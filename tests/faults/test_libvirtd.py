# SPDX-License-Identifier: Apache-2.0
"""A host's libvirt in trouble while actions want it for a running guest: no binding, a daemon that hangs, or
is started anew.

In test_live_kill.py single calls fail, and the host side is killed; here it is all of libvirt. Who does not
need it goes on.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import Iterator, List

import pytest

from lab import Node
from semishared.errors import SemisharedError

from .cloud import Cloud, one_line, until
from .live import DOMAIN, OVERLAY, SAVED, VM, VM_DIR, Live, s, written
from .rig import image_bytes

PACKAGES = "/usr/lib/python3/dist-packages"
OTHER = 8
ACTIONS = [
    (3, "snap_create_live", ["1"]),
    (59, "snap_delete", ["0"]),
    (26, "cpds", [SAVED, "-1"]),
]
NOW = written(*range(1, 8))


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Cloud.up() as cloud:
        live = Live(cloud)
        try:
            for mark in range(1, 7):
                live.write(OVERLAY, mark)
            live.change({}, "create", OVERLAY, 0, domain="")
            live.write(OVERLAY, 7)
            live.save("with a snapshot")
            yield live
        finally:
            live.close()


@contextmanager
def no_binding(host: Node) -> Iterator[None]:
    """Have a Python without any package of Debian's."""
    host.run(["sh", "-c", f"mkdir -p /tmp/none; mount --bind /tmp/none {PACKAGES}"], user="root")
    try:
        yield
    finally:
        host.run(["umount", PACKAGES], user="root")


def libvirtd(host: Node) -> str:
    return host.run(["pgrep", "-x", "libvirtd"], user="root", check=False).stdout.decode().strip()


def test_host_without_the_binding_names_the_package_and_does_all_else(live: Live) -> None:
    cloud = live.cloud
    live.restore("with a snapshot")
    live.start()
    other = cloud.upload(image_bytes("other"), "other.raw")
    place = f"h1:{VM_DIR}/disk.{OVERLAY}"
    with no_binding(live.host):
        for lcm_state, action, words in ACTIONS:
            cloud.vm(VM, {0: 1, 1: 2, 2: 3, 3: 4}, lcm_state=lcm_state)
            said = one_line(cloud.tm(action, place, *words, str(VM), "100"))
            assert (
                f"python3-libvirt is not installed on {live.host.name}; install it on that machine" in said
            ), said
        cloud.image(1)
        cloud.vm(OTHER, {0: 1}, lcm_state=0)
        done = [
            cloud.clone(other, OTHER),
            cloud.tm("snap_create", f"h1:{VM_DIR[:-1]}{OTHER}/disk.0", "0", str(OTHER), "100"),
        ]
        assert [item.returncode for item in done] == [0, 0], [item.stderr.decode() for item in done]
        cloud.delete(OTHER)
    live.at_rest()
    live.change({}, "delete", OVERLAY, 0)
    live.at_rest()
    live.check_running(OVERLAY, NOW)


def test_libvirtd_that_hangs_and_goes_on(live: Live) -> None:
    live.restore("with a snapshot")
    live.start()
    pid = libvirtd(live.host)
    live.host.run(["kill", "-STOP", pid], user="root")
    try:
        before = time.monotonic()
        with pytest.raises(SemisharedError, match="libvirt on h1 did not answer within 20 s: dumpxml one-7"):
            live.change({}, "delete", OVERLAY, 0)
        assert time.monotonic() - before < 40
    finally:
        live.host.run(["kill", "-CONT", pid], user="root")
    live.change({}, "delete", OVERLAY, 0)
    live.at_rest()
    live.check_running(OVERLAY, NOW)


def test_guest_at_rest_is_woken_when_libvirtd_is_back(live: Live) -> None:
    """While nobody knows whether it runs, what is noted of it stays."""
    live.restore("with a snapshot")
    live.start()
    note = live.host.path(f"{VM_DIR}/.semishared/frozen.json")
    note.write_text(json.dumps({"how": "SUSPEND", "run": live.virsh("domid", DOMAIN), "token": "00"}))
    live.virsh("suspend", DOMAIN)
    live.host.run(["kill", libvirtd(live.host)], user="root")
    until(lambda: not libvirtd(live.host), 20, "an end", 0.02)
    with pytest.raises(SemisharedError, match="does not say whether one-7 runs"):
        live.run({}, s.DescribeDisk(live.ref(OVERLAY), DOMAIN))
    assert note.exists()
    live.host.run(["/usr/sbin/libvirtd", "-d"], user="root")
    until(lambda: live.virsh("domstate", DOMAIN, check=False) == "paused", 20, "libvirt", 0.1)
    live.run({}, s.DescribeDisk(live.ref(OVERLAY), DOMAIN))
    live.at_rest()


def test_libvirtd_started_anew_in_the_midst_of_a_pull(live: Live) -> None:
    """Nobody tells of the job's end; who looks finds it."""
    live.restore("with a snapshot")
    live.start()
    said: List[str] = []

    def delete() -> None:
        try:
            live.change({"FAIL_IN": "blockpull", "FAIL": "slow"}, "delete", OVERLAY, 0)
        except SemisharedError as e:
            said.append(e.detail)

    deleting = threading.Thread(target=delete)
    deleting.start()
    until(lambda: live.virsh("blockjob", DOMAIN, "vda", "--info", "--raw") != "", 20, "a pull", 0.02)
    live.host.run(["kill", libvirtd(live.host)], user="root")
    until(lambda: not libvirtd(live.host), 20, "an end", 0.02)
    live.host.run(["/usr/sbin/libvirtd", "-d"], user="root")
    deleting.join(60)
    assert not deleting.is_alive()
    until(lambda: live.virsh("domstate", DOMAIN, check=False) == "running", 20, "libvirt", 0.1)
    if said:
        live.change({}, "delete", OVERLAY, 0)
    live.at_rest()
    live.check_running(OVERLAY, NOW)
    live.end_domain()
    live.check(OVERLAY, NOW, {})
