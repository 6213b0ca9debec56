# SPDX-License-Identifier: Apache-2.0
"""Each thing that may wait for an operator, planted: `semishared attention` names it with a command, the
command is run as it stands there, and attention names it no more, or the row says what else that needs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Set, Tuple

import pytest

from lab.cloud import DATASTORES, RECORDS, STORE, SYSTEM, Cloud
from lab.one_cli import Cli
from lab.oned import ActionFailed
from operate.test_doctor import attribute, commands, update_in_sunstone
from operate.test_status import COMMAND, run
from pool.devices import Disk
from semishared.plan.care.attention import KINDS
from staging.world import flip

DAY, MiB = 86400, 1 << 20
SCRIPTS = "/var/tmp/one"
BASES = f"{DATASTORES}/{RECORDS}"


@pytest.fixture(autouse=True)
def _alone(cloud: Cloud) -> Iterator[None]:
    """Each is judged for itself, whatever another one has left."""
    yield
    cloud.delete_all()


def told(cloud: Cloud) -> List[Dict[str, Any]]:
    """Return what waits; a host that is dead by plan does not answer."""
    done = cloud.lab.fe.run([COMMAND, "attention", "--json"], check=False)
    assert done.returncode in (0, 1, 2), done.stderr
    items: List[Dict[str, Any]] = json.loads(done.stdout)["items"]
    return items


def carry_out(cloud: Cloud, command: str) -> None:
    """Run what an item says is to be done, in its order; what stands behind `or` is another way."""
    first = re.split(r"; or |: nothing ", command)[0]
    for part in re.split(r"; then,? (?:to lose it: )?", first):
        place = re.match(r"as root on (\w+): ", part)
        # What is mended by hand behind a command is not carried out.
        words = shlex.split(part[place.end() if place else 0 :].partition(";")[0])
        cli = Cli(cloud.lab, cloud.oned)
        if place:
            cloud.lab.node(place[1]).run(words, user="root", check=False)
        elif cli.knows(words):
            cli.run(words)
        elif words[0] == "copy":
            cloud.lab.node("h1").run(["cp", "-a", words[1], "/var/tmp/"])
        else:
            assert words[0] == "semishared", command
            done = cloud.lab.fe.run([COMMAND, *words[1:]], check=False, timeout=300)
            # What doctor finds besides, of a front-end that nothing was installed on, is its own.
            assert done.returncode in (0, 1) or words[1:] == ["doctor"], (words, done.stderr)


def deploy(cloud: Cloud, name: str, **image: Any) -> Tuple[int, int]:
    """Return a VM on h1, and its image."""
    number = cloud.data_image(name, name.encode() * 1024, **image)
    return cloud.deploy(name, [{"IMAGE_ID": str(number)}]), number


def base(cloud: Cloud, host: str, image: int) -> Path:
    (found,) = cloud.lab.node(host).path(f"{BASES}/bases").glob(f"{STORE}-{image}-*")
    return found


def aged(folder: Path, days: int) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - days * DAY,) * 2)


@contextmanager
def without_bases(cloud: Cloud, *images: int) -> Iterator[None]:
    try:
        yield
    finally:
        cloud.lab.fe.run([COMMAND, "base", "evict", *map(str, images)], check=False)


@contextmanager
def failed_vm(cloud: Cloud) -> Iterator[None]:
    """The store lacks an image while a VM is deployed; it is put back, as the error says."""
    image = cloud.data_image("re-failed", b"failed" * 1024)
    source = cloud.lab.fe.path(cloud.source(image))
    source.rename(source.with_suffix(".away"))
    vm = cloud.create("re-failed", [{"IMAGE_ID": str(image)}])
    with pytest.raises(ActionFailed):
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    source.with_suffix(".away").rename(source)
    with without_bases(cloud, image):
        yield
        assert cloud.oned.state(vm)[0] == "ACTIVE"
        cloud.terminate(vm)


@contextmanager
def paused_guest(cloud: Cloud) -> Iterator[None]:
    """A guest writes to a disk that is full; room is made while it waits."""
    image = cloud.os_image("re-os")
    data = cloud.data_image("re-paused", b"paused" * 1024, mib=64)
    folder = cloud.upload_file("x").parent
    disk = Disk(cloud.lab.node("h2"), f"{DATASTORES}/{SYSTEM}", 48, folder, "ext4")
    try:
        disks = [{"IMAGE_ID": str(number)} for number in (image, data)]
        vm = cloud.deploy("re-paused", disks, "h2", context=False)
        guest = cloud.guest(vm)
        fill = disk.node.path(f"{disk.path}/fill")
        disk.node.run(["sh", "-c", f"head -c 1G /dev/zero >{disk.path}/fill || true"], user="root")
        with ThreadPoolExecutor(1) as threads:
            writing = threads.submit(guest.write, "vdb", "paused", 1024, 4096)
            state = ["virsh", "-c", "qemu:///system", "domstate", cloud.oned.vm(vm).deploy_id]
            while b"paused" not in disk.node.run(state).stdout:
                assert not writing.done()
                time.sleep(0.2)
            fill.unlink()
            yield
            writing.result()
        guest.check("vdb", "paused", 1024, 4096)
        cloud.terminate(vm)
    finally:
        disk.close()
        # That its datastore was a mount is noted there, and its being none would be waited for.
        disk.node.run(["rm", "-f", f"{DATASTORES}/{RECORDS}/mounted/{SYSTEM}"], user="root")
        cloud.lab.fe.run([COMMAND, "base", "evict", str(image), str(data)])


@contextmanager
def kept_unreadable(cloud: Cloud) -> Iterator[None]:
    vm, image = deploy(cloud, "re-kept", persistent=True, SEMISHARED_PLACE="local")
    cloud.oned.vm_poweroff(vm, hard=True)
    h1 = cloud.lab.node("h1")
    h1.run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 0 64k", f"{cloud.vm_dir(vm)}/disk.0"])
    cloud.oned.vm_recover(vm, "delete")
    (kept,) = h1.path(f"{DATASTORES}/{SYSTEM}").glob(f".kept-{vm}-*")
    for record in kept.rglob("*.json"):
        record.write_text("{")
    with without_bases(cloud, image):
        yield
        assert not kept.exists() and h1.path(f"/var/tmp/{kept.name}").is_dir()


@contextmanager
def unreadable_record(cloud: Cloud) -> Iterator[None]:
    vm, image = deploy(cloud, "re-record")
    record = cloud.lab.node("h1").path(f"{cloud.vm_dir(vm)}/.semishared/disk.0.json")
    text = record.read_bytes()
    record.write_bytes(text[: len(text) // 2])
    with without_bases(cloud, image):
        yield
        record.write_bytes(text)
        cloud.terminate(vm)


@contextmanager
def unreadable_datastore(cloud: Cloud) -> Iterator[None]:
    folder = cloud.lab.node("h2").path(f"{DATASTORES}/{SYSTEM}")
    folder.mkdir(exist_ok=True)
    mode = folder.stat()
    os.chown(folder, 0, 0)
    folder.chmod(0o700)
    yield
    os.chown(folder, mode.st_uid, mode.st_gid)
    folder.chmod(mode.st_mode & 0o7777)


@contextmanager
def uncommitted(cloud: Cloud) -> Iterator[None]:
    vm, image = deploy(cloud, "re-local", persistent=True, SEMISHARED_PLACE="local")
    cloud.oned.vm_poweroff(vm, hard=True)
    words = ["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 0 64k", f"{cloud.vm_dir(vm)}/disk.0"]
    cloud.lab.node("h1").run(words)
    cloud.oned.vm(vm).stime -= 2 * DAY
    with without_bases(cloud, image):
        yield
        assert cloud.read(cloud.source(image), "raw", 4096) == b"\x55" * 4096
        cloud.terminate(vm)


@contextmanager
def damaged_base(cloud: Cloud) -> Iterator[None]:
    """A base that was found damaged while the store was away."""
    vm, image = deploy(cloud, "re-damaged")
    cloud.terminate(vm)
    found = base(cloud, "h1", image)
    flip(found / "image", 5)
    (found / "image").rename(found / "damaged")
    with without_bases(cloud, image):
        yield


@contextmanager
def mended_base(cloud: Cloud) -> Iterator[None]:
    image = cloud.os_image("re-mended")
    vm = cloud.deploy("re-mended", [{"IMAGE_ID": str(image)}], context=False)
    cloud.guest(vm)
    flip(base(cloud, "h1", image) / "image", 12 * MiB)
    # Whole seconds are all that oned says of a start.
    time.sleep(1)
    run(cloud, "base", "verify", str(image), code=1)
    time.sleep(1)
    with without_bases(cloud, image):
        yield
        cloud.terminate(vm)


@contextmanager
def unverified_base(cloud: Cloud) -> Iterator[None]:
    vm, image = deploy(cloud, "re-old")
    cloud.terminate(vm)
    aged(base(cloud, "h1", image), 40)
    with without_bases(cloud, image):
        yield


def filled(disk: Disk, leaves: int) -> None:
    """Fill a device of a host with what is none of ours."""
    status = os.statvfs(disk.node.path(disk.path))
    count = status.f_bavail * status.f_frsize - leaves
    disk.node.run(["fallocate", "-l", str(count), f"{disk.path}/other"], user="root")


@contextmanager
def full_disk(cloud: Cloud) -> Iterator[None]:
    """Bases have a file system of their own, and something else fills it."""
    h2 = cloud.lab.node("h2")
    image = cloud.data_image("re-full", os.urandom(12 * MiB))
    disk = Disk(h2, BASES, 64, cloud.upload_file("x").parent, "ext4")
    try:
        cloud.lab.fe.run([COMMAND, "stage", str(image), "--hosts", "h2"])
        filled(disk, MiB)
        yield
    finally:
        disk.close()


@contextmanager
def ill_host(cloud: Cloud) -> Iterator[None]:
    template = cloud.oned.host("h2").template
    with attribute(template, "HEALTH_SEMISHARED", "store 100 hangs"):
        yield


@contextmanager
def other_build(cloud: Cloud) -> Iterator[None]:
    package = f"{SCRIPTS}/lib/semishared"
    # By another name first: what is forked there notices a directory that has changed.
    plant = f"echo 0123456789ab >{package}/new && mv {package}/new {package}/BUILD"
    with commands(cloud.lab.node("h2"), plant, "true"):
        yield


class Symptom(NamedTuple):
    """How one is planted; what is left of it when its command has run: '' for nothing."""

    plant: Callable[[Cloud], ContextManager[None]]
    stays: str = ""


SYMPTOMS = {
    "vm-failed": Symptom(failed_vm),
    "guest-paused": Symptom(paused_guest),
    "disk-kept-unreadable": Symptom(kept_unreadable),
    "record-unreadable": Symptom(unreadable_record, "the command says which; what it was is for a person"),
    "system-unreadable": Symptom(unreadable_datastore, "dmesg says why; the disk is mended by hand"),
    "disk-uncommitted": Symptom(uncommitted),
    "base-damaged": Symptom(damaged_base),
    "base-mended": Symptom(mended_base),
    "bases-unverified": Symptom(unverified_base),
    "disk-full": Symptom(full_disk),
    "host-build": Symptom(other_build),
    "host-health": Symptom(ill_host, "doctor says how each is mended; the next monitoring takes it away"),
    "attributes-lost": Symptom(update_in_sunstone),
}
ELSEWHERE = {
    "device-full": "tests/tools/test_pool_command.py: rebalance makes no device fuller than the others",
    "disk-kept": "tests/operate/test_attention.py",
    "disk-larger": "tests/unit/plan/test_attention.py: only a larger device, or another host, helps",
    "fence-begun": "tests/tools/test_fence.py: one that was begun is gone on with by the same command",
}


def test_each_kind_is_planted() -> None:
    assert {*SYMPTOMS, *ELSEWHERE} == set(KINDS)


@pytest.mark.fault(82, "what waits for an operator goes by the command that attention names")
@pytest.mark.parametrize("kind", SYMPTOMS)
def test_the_command_that_is_named_mends_it(cloud: Cloud, kind: str) -> None:
    assert told(cloud) == []
    symptom = SYMPTOMS[kind]
    with symptom.plant(cloud):
        found = told(cloud)
        assert [item["kind"] for item in found] == [kind], found
        carry_out(cloud, found[0]["command"])
        left: Set[str] = {item["kind"] for item in told(cloud)}
        assert left == ({kind} if symptom.stays else set()), left
    assert told(cloud) == []
