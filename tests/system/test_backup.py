# SPDX-License-Identifier: Apache-2.0
"""Backups of a running guest that writes: one moment for all disks, and nothing left when it is cut short."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import threading
import time
from typing import Iterator, List, Set

import pytest

from lab import roots
from lab.cloud import Cloud
from lab.guest import content

KIB = 4
COPIES = 4


def vm_xml(cloud: Cloud, vm: int, freeze: str) -> bytes:
    config = f"<BACKUPS><BACKUP_CONFIG><FS_FREEZE>{freeze}</FS_FREEZE><MODE>FULL</MODE></BACKUP_CONFIG></BACKUPS></VM>"  # noqa: E501
    return cloud.oned.vm(vm).to_xml().replace("</VM>", config).encode()


def argv(cloud: Cloud, vm: int, action: str, disks: str = "0:1:2") -> List[str]:
    record = cloud.oned.vm(vm)
    script = f"/var/lib/one/remotes/tm/semishared/{action}"
    return [
        script,
        f"{record.last.host.name}:{cloud.vm_dir(vm)}",
        disks,
        record.deploy_id,
        "-",
        str(vm),
        "101",
    ]


def call(cloud: Cloud, vm: int, action: str, freeze: str = "NONE") -> subprocess.CompletedProcess[bytes]:
    words = argv(cloud, vm, action)
    return cloud.lab.fe.run(words, user="oneadmin", input=vm_xml(cloud, vm, freeze), check=False, timeout=120)


def ok(done: subprocess.CompletedProcess[bytes]) -> None:
    assert done.returncode == 0, done.stderr.decode()


def number(data: bytes, last: int) -> int:
    """Return which of the guest's writes a block holds."""
    for candidate in range(last, -1, -1):
        if data == content(f"n{candidate}", 0, KIB):
            return candidate
    raise AssertionError("a block that the guest never wrote")


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
def test_backup_of_a_writing_guest(cloud: Cloud) -> None:
    os_image = cloud.os_image("backup-os")
    mine = cloud.data_image("backup-mine", content("n0", 0, KIB), persistent=True)
    cow = cloud.data_image("backup-cow", content("n0", 0, KIB), format="qcow2")
    vm = cloud.deploy("backup", [{"IMAGE_ID": str(image)} for image in (os_image, mine, cow)])
    guest = cloud.guest(vm)
    written, stop = [0], threading.Event()

    def write() -> None:
        while not stop.is_set():
            guest.write("vdb", f"n{written[0] + 1}", 0, KIB)
            guest.write("vdc", f"n{written[0] + 1}", 0, KIB)
            written[0] += 1
            time.sleep(
                0.005
            )  # what comes between two moments is seen by fewer writes than a processor can do

    writer = threading.Thread(target=write)
    writer.start()
    directory = cloud.vm_dir(vm)
    try:
        for freeze in ["NONE", "SUSPEND"] * (COPIES // 2):
            before = written[0]
            ok(call(cloud, vm, "prebackup_live", freeze))
            copies = [f"{directory}/backup/disk.{disk}.0" for disk in (1, 2)]
            first, second = (
                number(cloud.read(path, "qcow2", KIB << 10, node=guest.node), written[0] + 1)
                for path in copies
            )
            # The guest writes to the first, then to the second: any other pair is two moments.
            assert second in (first, first - 1), f"{first} on one disk, {second} on the other"
            assert before <= second + 1
            ok(call(cloud, vm, "postbackup_live", freeze))
            assert not [
                name for name in cloud.files(guest.node, directory) if "backup" in name or "frozen" in name
            ]
        caught = []
        for how, seconds in (("killed", random.random()), ("cancelled", 0.0)) * 2:
            caught.append(cut_short(cloud, vm, seconds, how))
            now = written[0]
            deadline = time.monotonic() + 30
            while written[0] == now:
                assert time.monotonic() < deadline, "the guest no longer runs"
                time.sleep(0.1)
        assert any(caught[1::2]), "no backup was cancelled"
    finally:
        stop.set()
        writer.join(60)
    last = written[0]
    for device in ("vdb", "vdc"):
        guest.check(device, f"n{last}", 0, KIB)
    ok(call(cloud, vm, "postbackup_live"))
    cloud.terminate(vm)
    assert cloud.read(cloud.source(mine), "raw", KIB << 10) == content(f"n{last}", 0, KIB)
    for image in (os_image, mine, cow):
        cloud.oned.image_delete(image)


def is_cancellable(cloud: Cloud) -> bool:
    """Tell whether there is what OpenNebula's backup_cancel looks for."""
    return (
        b"/prebackup_live "
        in cloud.lab.fe.run(["ps", "-C", "ruby", "--no-headers", "-o", "cmd"], check=False).stdout
    )


def cut_short(cloud: Cloud, vm: int, seconds: float, how: str) -> bool:
    """Kill a backup, or cancel it as OpenNebula does, so long after it has begun; what oned calls then puts
    everything right.

    Return whether it was under way.
    """
    driver = cloud.lab.fe.popen(argv(cloud, vm, "prebackup_live"), user="oneadmin", stdin=subprocess.PIPE)
    assert driver.stdin
    driver.stdin.write(vm_xml(cloud, vm, "SUSPEND"))
    driver.stdin.close()
    deadline = time.monotonic() + 60
    while not is_cancellable(cloud) and driver.poll() is None:
        assert time.monotonic() < deadline, "the backup does not begin"
    time.sleep(seconds)
    # From here on it cannot end by itself.
    driver.send_signal(signal.SIGSTOP)
    caught = is_cancellable(cloud)
    if how == "killed":
        driver.kill()
        driver.wait()
    else:
        words = argv(cloud, vm, "prebackup_live")
        cancel = ["/var/lib/one/remotes/datastore/rsync/backup_cancel", words[1], words[3]]
        cloud.lab.fe.run(cancel, user="oneadmin", input=vm_xml(cloud, vm, "SUSPEND"))
        driver.send_signal(signal.SIGCONT)
        driver.wait(60)
        assert (driver.returncode != 0) == caught, "a backup that was cancelled is no success"
    ok(call(cloud, vm, "postbackup_live", "SUSPEND"))
    ok(call(cloud, vm, "postbackup_live", "SUSPEND"))
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    virsh = ["virsh", "-q", "-c", "qemu:///system"]
    name = cloud.oned.vm(vm).deploy_id
    assert node.run([*virsh, "domstate", name], user="oneadmin").stdout.strip() == b"running"
    assert b"None" in node.run([*virsh, "domjobinfo", name], user="oneadmin").stdout
    assert not [name for name in cloud.files(node, cloud.vm_dir(vm)) if "backup" in name or "frozen" in name]
    return caught


RATE = 32 << 20
MOST_MIB = 160
"""Of a disk: QEMU has begun to copy 64 MiB of it before it is limited."""


@pytest.fixture
def rate(cloud: Cloud) -> Iterator[int]:
    """Have copies for backups go at a rate; return bytes per second."""
    conf = cloud.lab.fe.path("/var/lib/one/remotes/etc/semishared.conf")
    text = conf.read_text()
    limited, count = re.subn(r"(\[backup\]\n(?:#.*\n)*rate) = none", rf"\1 = {RATE >> 20}M", text)
    assert count == 1
    conf.write_text(limited)
    yield RATE
    conf.write_text(text)


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
def test_copies_of_a_running_guest_go_at_their_rate(cloud: Cloud, rate: int) -> None:
    data = content("paced", 0, 1024)
    images = [cloud.data_image(f"paced-{mib}", data * mib, mib) for mib in (MOST_MIB, 1)]
    vm = cloud.deploy("paced", [{"IMAGE_ID": str(image)} for image in images], context=False)
    node, name = cloud.lab.node(cloud.oned.vm(vm).last.host.name), cloud.oned.vm(vm).deploy_id
    ask = ["virsh", "-q", "-c", "qemu:///system", "qemu-monitor-command", name]
    speeds: Set[int] = set()
    driver = cloud.lab.fe.popen(
        argv(cloud, vm, "prebackup_live", "0:1"), user="oneadmin", stdin=subprocess.PIPE
    )
    assert driver.stdin
    driver.stdin.write(vm_xml(cloud, vm, "NONE"))
    driver.stdin.close()
    while driver.poll() is None:
        said = node.run([*ask, '{"execute": "query-block-jobs"}'], user="oneadmin").stdout
        speeds.update(job["speed"] for job in json.loads(said)["return"])
    assert driver.returncode == 0
    assert rate // 2 in speeds and speeds <= {0, rate // 2}, "each of the two has a half"
    path = f"{cloud.vm_dir(vm)}/backup/disk.0.0"
    assert cloud.read(path, "qcow2", 1 << 20, (MOST_MIB - 1) << 20, node=node) == data
    ok(call(cloud, vm, "postbackup_live"))
    cloud.terminate(vm)
    for image in images:
        cloud.oned.image_delete(image)
