# SPDX-License-Identifier: Apache-2.0
"""A device of a host's pool that hangs: whoever touches it waits for ever. It costs its own VMs, and nobody
else waits with them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from semishared.device import offline
from semishared.errors import BadPool, DeviceMissing
from semishared.host import probe as host_probe
from semishared.host import vm_sizes
from semishared.model import steps as s
from semishared.model.base.steps import ListBases, ReportDisks
from semishared.model.device import steps as device_steps
from semishared.model.leftover_steps import LookAround
from semishared.wire import session
from system.test_monitoring import HANG
from tools.test_lost_device import apart, can_boot
from tools.test_pool import Pool, device_of
from tools.world import World, qemu_io

LONG_AGO = (0, 0)
DETACH = 2
LIMIT_S = 45
"""Seconds for all that is asked while it hangs."""
SCALED = """
import sys
sys.path.insert(0, {lib!r})
from semishared.device import offline
from semishared.host import service
offline.PATIENCE_S, offline.ANSWER_S = {patience}, {answer}
sys.exit(service.main())
"""
PATIENCE_S, ANSWER_S = 3.0, 1.5
REAL_PATIENCE_S = offline.PATIENCE_S
PROBE = Path(__file__).parents[2] / "im" / "semishared"
ALL_PROBES_S = 90
"""Seconds that oned gives the first round of all probes of a host (IM_MAD in monitord.conf, -w)."""
LIB = str(Path(__file__).parents[2] / "lib")
# As HANG, and what has begun to ask it cannot be killed: it is in a request that its server has read.
HOLD = HANG.replace(
    "time.sleep(600)",
    """
import struct
unique = struct.unpack_from("<IIQ", os.read(fd, 1 << 17))[2]
init = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 16, 0, 0)
os.write(fd, struct.pack("<IiQ", 16 + len(init), 0, unique) + init)
while os.read(fd, 1 << 17):
    pass
""",
)


@pytest.fixture(autouse=True)
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process and the host sides that it starts wait less long."""
    script = tmp_path / "hostside.py"
    script.write_text(SCALED.format(lib=LIB, patience=PATIENCE_S, answer=ANSWER_S))
    monkeypatch.setattr(session, "HERE", str(script))
    monkeypatch.setattr(offline, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(offline, "ANSWER_S", ANSWER_S)


def limit_of_the_probe() -> int:
    found = re.search(r"^timeout -k 2 ([0-9]+) ", PROBE.read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_the_hosts_probe_has_time_to_find_out_that_devices_hang() -> None:
    patience_s, most, rest_s = REAL_PATIENCE_S, 16, 15
    assert patience_s + most * offline.KILLED_S + rest_s < limit_of_the_probe() <= ALL_PROBES_S - 30


@pytest.mark.long  # it waits as long as a device is really given
def test_the_hosts_probe_tells_of_a_device_that_has_just_begun_to_hang(world: World, pool: Pool) -> None:
    pool.set()
    (world.system / ".monitor").write_text("semishared\n")
    probe = world.top / "one/im/kvm-probes.d/host/system/semishared"
    probe.parent.mkdir(parents=True)
    shutil.copy(PROBE, probe)
    (world.top / "one/lib").symlink_to(LIB)
    asked = f"<X><DATASTORE_LOCATION>{world.location}</DATASTORE_LOCATION></X>".encode()
    lost = str(pool.paths[0])
    with hanging(world, lost):
        for limit_s in (ALL_PROBES_S, 20):
            started = time.monotonic()
            told = subprocess.run(
                [str(probe), "kvm"], input=asked, stdout=subprocess.PIPE, check=True
            ).stdout.decode()
            assert f"device {lost} is hung" in told and 'POOL = "2"' in told and told.count("DS = [") == 1, (
                told
            )
            assert time.monotonic() - started < limit_s
            asked_long_ago(world)


def asked_long_ago(world: World) -> None:
    """Let nobody know any more how the devices answered."""
    for link in (world.root / "devices").glob("*-*[!n]"):
        if link.is_symlink():
            os.utime(link, LONG_AGO, follow_symlinks=False)


@contextmanager
def hanging(world: World, path: str, how: str = HANG) -> Iterator[subprocess.Popen[bytes]]:
    """Let everything below `path` hang; none of ours may be left at it when that is over."""
    with subprocess.Popen(["/usr/bin/python3", "-c", how, path], stdout=subprocess.PIPE) as server:
        assert server.stdout
        try:
            assert server.stdout.readline() == b"mounted\n"
            asked_long_ago(world)
            yield server
        finally:
            server.kill()
            server.wait()
            if f"hung {path} " in Path("/proc/mounts").read_text(encoding="utf-8"):
                subprocess.run(["umount", "-l", path], check=True)
    asked_long_ago(world)


def test_a_device_that_hangs_costs_its_own_vms_and_nobody_waits_for_it(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    lost = device_of(f"{world.disk().path}.snap")
    qemu_io(world.disk().path, "qcow2", "write -P 0x31 2M 64k")
    number = next(number for number in range(8, 30) if clone_elsewhere(world, number, lost))
    started = time.monotonic()
    with hanging(world, lost):
        states = {path: row["state"] for path, row in pool.rows().items()}
        assert states == {str(path): "hung" if str(path) == lost else "" for path in pool.paths}
        # New disks go elsewhere, with a base of their own if theirs is there.
        for vm in (40, 41):
            world.clone(s.ImageRef(100, 7, "raw", str(world.store / "image")), world.disk(vm))
            assert device_of(f"{world.disk(vm).path}.snap") in set(map(str, pool.paths)) - {lost}
            can_boot(world, vm)
        can_boot(world, number)
        with pytest.raises(
            DeviceMissing, match=f"the layers of disk.1: on the device {lost} of .*, which is hung"
        ):
            can_boot(world)
        world.on(s.AddLayer(world.disk(40), 1, 0, "qcow2"))
        world.on(
            ReportDisks(str(world.location), (101,)),
            ListBases(str(world.root)),
            device_steps.ListHeld(str(world.root)),
        )
        world.on(LookAround(str(world.location), (101,), (), libvirt=False))
        assert f"device {lost} is hung" in host_probe.report(str(world.location))
        assert vm_sizes.report(str(world.system)).count("VM = ") >= 3
        with pytest.raises(BadPool, match=f"{lost} on .* is hung: it does not answer"):
            pool.set()
        assert time.monotonic() - started < LIMIT_S
        world.on(s.RemoveVm(41, world.disk(41).vm_dir))
    assert {row["state"] for row in pool.rows().values()} == {""}, "it is back"
    can_boot(world)
    qemu_io(world.disk().path, "qcow2", "read -P 0x31 2M 64k")
    pool.set()
    assert not pool.leftovers()


def clone_elsewhere(world: World, vm: int, lost: str) -> bool:
    """Make a disk of a VM over an image of its own; tell whether neither it nor its base is on that
    device.
    """
    world.clone(world.image(f"image{vm}")._replace(id=vm), world.disk(vm))
    (base,) = [base for base in world.bases() if base.name.startswith(f"100-{vm}-")]
    return lost not in (device_of(base), device_of(f"{world.disk(vm).path}.snap"))


def link_to(world: World, device: str) -> Path:
    """Return the link to a device, whether it is aside or not."""
    links = [link for link in (world.root / "devices").iterdir() if link.is_symlink()]
    (link,) = [
        link for link in links if os.readlink(link) in (f"{device}/.semishared", f"hung:{device}/.semishared")
    ]
    return link


def put_aside(link: Path) -> None:
    """Have a device hang, as whoever looked just now has it."""
    target = os.readlink(link)
    link.unlink()
    link.symlink_to(f"hung:{target}")


def test_a_device_that_is_slow_once_is_asked_again(world: World, pool: Pool) -> None:
    """What puts a device aside is a link: killed or not, whoever looks next makes it what is true."""
    pool.set()
    world.clone(world.image(), world.disk())
    lost = device_of(f"{world.disk().path}.snap")
    link = link_to(world, lost)
    put_aside(link)
    row = pool.rows()[lost]
    assert row["state"] == "hung", "it was asked just now"
    asked_long_ago(world)
    assert pool.rows()[lost]["state"] == "" and os.readlink(link) == f"{lost}/.semishared"
    can_boot(world)


def test_no_vm_is_refused_or_left_behind_by_an_answer_of_before(world: World, pool: Pool) -> None:
    """A disk that was in standby is there a moment after it was put aside."""
    pool.set()
    world.clone(world.image(), world.disk())
    link = link_to(world, device_of(f"{world.disk().path}.snap"))
    put_aside(link)
    can_boot(world)
    put_aside(link)
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert not pool.layers()


def test_no_boot_is_refused_by_what_the_device_of_its_base_said_before(world: World, pool: Pool) -> None:
    pool.set()
    _, other = apart(world, pool)
    put_aside(link_to(world, other))
    can_boot(world)


def test_a_device_that_takes_its_time_is_no_other_than_before(world: World, pool: Pool) -> None:
    """Disks that stand still need more time than a device is given that has hung."""
    pool.set()
    late = str(pool.paths[0])
    with hanging(world, late, HOLD) as server:
        threading.Timer((PATIENCE_S + ANSWER_S) / 2, server.kill).start()
        offline.look(str(world.root))
        assert os.readlink(link_to(world, late)) == f"{late}/.semishared"


def test_a_host_on_which_nothing_ends_says_nothing_of_its_devices(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own disk stalls, or it swaps: programs are late together, whatever they read."""
    pool.set()
    links = [link for link in (world.root / "devices").iterdir() if link.is_symlink()]
    put_aside(links[0])
    before = {link: os.readlink(link) for link in links}
    stalled = tmp_path / "programs"
    stalled.mkdir()
    (stalled / "setpriv").write_text("#!/bin/sh\nexec sleep 60\n")
    (stalled / "setpriv").chmod(0o755)
    asked_long_ago(world)
    with monkeypatch.context() as now:
        now.setenv("PATH", f"{stalled}:{os.environ['PATH']}")
        started = time.monotonic()
        offline.look(str(world.root))
        assert time.monotonic() - started < 2 * PATIENCE_S + 3
        assert {link: os.readlink(link) for link in links} == before
    offline.look(str(world.root))
    assert not any(os.readlink(link).startswith("hung:") for link in links)


def test_a_device_that_hangs_holds_one_program_however_often_it_is_asked(world: World, pool: Pool) -> None:
    pool.set()
    lost = str(pool.paths[0])
    link = link_to(world, lost)
    with hanging(world, lost, HOLD):
        for turn in range(3):
            asked_long_ago(world)
            started = time.monotonic()
            offline.look(str(world.root))
            assert os.readlink(link) == f"hung:{lost}/.semishared"
            assert len(asking(lost)) == 1
            assert turn == 0 or time.monotonic() - started < 1, (
                "who cannot be killed waits still: that is an answer"
            )
        with pytest.raises(BadPool, match=f"{lost} on .* is hung: it does not answer"):
            pool.set()
        assert len(asking(lost)) == 1
        # What is there now is another mount, for which nobody waits. (umount itself would wait.)
        assert not ctypes.CDLL(None).umount2(lost.encode(), DETACH)
        asked_long_ago(world)
        offline.look(str(world.root))
        assert len(asking(lost)) == 1 and os.readlink(link) == f"{lost}/.semishared"
    # Its request ends with the server, and it in a moment.
    deadline = time.monotonic() + 10
    while asking(lost) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not asking(lost)
    assert not list((world.root / "devices").glob("*.asked"))


def asking(device: str) -> list[str]:
    """Return who reads the label of a device."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if words[0] == b"sh" and f"{device}/.semishared/device.json".encode() in words:
                found.append(pid)
    return found
