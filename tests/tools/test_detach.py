# SPDX-License-Identifier: Apache-2.0
"""Disks of VMs that are off let go of their store: by their headers and their record, whatever killed it on
the way.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from semishared.disk import detach as live
from semishared.errors import HostFailed
from semishared.front.detach import detach
from semishared.model import steps as s
from semishared.model.base.steps import DetachVm
from semishared.model.disk import names as disk_names
from semishared.tools import layers
from semishared.tools.rate_limit import Pace
from tools.oned_site import HERE, SYSTEM, ActionSite
from tools.world import OVERLAY_OPTIONS, MiB, World, qemu_io

POWEROFF = 8


class Vm:
    """A VM with one remote-first disk: snapshots 0 and 1, and what was written after each."""

    def __init__(self, world: World, format: str) -> None:
        self.world, self.image, self.ref = world, world.image(format=format, size=16 * MiB), world.disk()
        world.on(s.PrepareVm(5, self.ref.vm_dir), s.CreateRemote(self.ref, self.image, 0, OVERLAY_OPTIONS))
        for number in (0, 1):
            self.write(number + 2)
            steps = (
                s.AddLayer(self.ref, number + 1, number, "qcow2"),
                s.ActivateLayer(self.ref, number + 1, "qcow2"),
            )
            world.on(s.DescribeDisk(self.ref, ""), *steps)
        self.write(4)

    @property
    def record(self) -> Dict[str, Any]:
        found: Dict[str, Any] = json.loads(Path(self.ref.vm_dir, ".semishared/disk.1.json").read_text())
        return found

    def write(self, at: int) -> None:
        qemu_io(self.record["path"], "qcow2", f"write -P {at} {at}M 64k")

    def detach(self, generation: str = "") -> Dict[str, Any]:
        (answer,) = self.world.on(DetachVm(5, self.ref.vm_dir, "", (1,), (generation,), 0))
        assert isinstance(answer, dict)
        return answer

    def lowest(self) -> str:
        return layers.backing_of(f"{self.ref.path}.snap/0")[0]

    def check(self) -> str:
        """See that the disk is whole and what its record says; return that."""
        qemu_io(
            self.record["path"],
            "qcow2",
            *(f"read -P {at} {at}M 64k" for at in (2, 3, 4)),
            "read -P 0xA1 1M 64k",
        )
        leases, how = (
            [str(path) for path in (self.world.root / "bases").glob("*/leases/*")],
            self.record["how"],
        )
        assert (self.lowest() in leases) is (how == "overlay")
        assert self.world.leftovers() == []
        assert sorted(os.listdir(f"{self.ref.path}.snap")) == ["0", "1", "2"]
        notes = [
            name
            for name in os.listdir(f"{self.ref.vm_dir}/.semishared")
            if not name.startswith(("disk.", "vm."))
        ]
        assert notes == []
        return str(how)


@pytest.fixture(params=["raw", "qcow2"])
def vm(world: World, request: pytest.FixtureRequest) -> Iterator[Vm]:
    yield Vm(world, request.param)


def points(vm: Vm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> List[str]:
    trace = tmp_path / "trace"
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    assert vm.detach()["error"] == ""
    monkeypatch.delenv("SEMISHARED_TRACE")
    return [line.partition(" ")[2] for line in trace.read_text().splitlines()]


def test_off_the_layers_lie_over_the_lease_and_the_record_says_so(
    vm: Vm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = points(vm, tmp_path, monkeypatch)
    assert {
        "leased",
        "switch noted",
        "layer laid over its base",
        "layer recorded",
        "switch ended",
        "deltas gone",
    } <= set(names)
    assert vm.check() == "overlay"
    record = vm.record
    assert record["image"]["generation"] and "over" not in record
    os.rename(vm.image.source, f"{vm.image.source}.away")
    assert vm.check() == "overlay"
    again = vm.detach()
    assert (again["error"], again["disks"]) == ("", [])


def test_off_killed_anywhere_it_is_one_or_the_other_and_ends_as_it_must(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = points(Vm(World(tmp_path / "whole"), "raw"), tmp_path, monkeypatch)
    begun = names.index("switch noted") + 1
    # What is killed while the base comes is what is killed while a clone has it come.
    for number in range(begun - 1, len(names) + 1):
        vm = Vm(World(tmp_path / str(number)), "raw")
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with pytest.raises(HostFailed):
            vm.detach()
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        vm.world.on(s.DescribeDisk(vm.ref, ""))
        if number >= begun:
            assert vm.check() == "overlay", names[number - 1]
        assert vm.detach()["error"] == "", names[number - 1]
        assert vm.check() == "overlay", names[number - 1]


def test_another_content_than_it_lies_over_is_refused(vm: Vm) -> None:
    vm.world.on(s.StageBase(str(vm.world.root), vm.image))
    answer = vm.detach("ab" * 32)
    assert answer["id"] == "SS025", answer
    assert vm.check() == "remote-first" and vm.world.leases() == []


def test_store_that_is_away_and_snapshots_of_the_whole_vm_leave_it_as_it_was(vm: Vm) -> None:
    source, away = Path(vm.image.source), Path(f"{vm.image.source}.away")
    source.rename(away)
    answer = vm.detach()
    assert answer["id"] == "SS020" and "disk 1 reads from" in answer["error"], answer
    away.rename(source)
    import subprocess

    subprocess.run(["qemu-img", "snapshot", "-c", "whole", vm.record["path"]], check=True)
    answer = vm.detach()
    assert answer["id"] == "SS150" and "1 system snapshots" in answer["error"], answer
    assert vm.check() == "remote-first" and vm.world.leases() == []


def test_vm_at_which_another_action_is_at_work_is_left_alone(vm: Vm) -> None:
    from semishared.config import Config
    from semishared.wire.session import Session

    with Session("localhost", "test", Config()) as other:
        other.run([s.DescribeDisk(vm.ref, "")])
        answer = vm.detach()
        assert answer["id"] == "SS150" and "acted upon" in answer["error"]
        other.run([s.DescribeDisk(vm.ref, "")])
    assert vm.detach()["error"] == ""


def test_copies_have_the_content_and_the_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.write(os.urandom(100_000))
        file.seek(9 * MiB)
        file.write(os.urandom(5))
        file.truncate(20 * MiB)
    live.copy(str(source), str(target), Pace(0))
    assert target.read_bytes() == source.read_bytes()
    assert os.stat(target).st_blocks * 512 < 1 * MiB


def powered_off(site: ActionSite, image: int) -> int:
    """Make a VM with a disk of an image, as oned has one that was powered off."""
    number = site.vm(image)
    vm = site.oned.vm(number)
    site.oned._add_history(vm, site.oned.host(HERE), site.oned.datastores[SYSTEM])
    site.make("clone", number)
    vm.state, vm.lcm = POWEROFF, 0
    return number


def test_disk_that_is_removed_meanwhile_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenNebula takes a disk from a VM that is off with one action of ours alone, and knows nothing of what
    is under way in it.
    """
    number = points(Vm(World(tmp_path / "whole"), "raw"), tmp_path, monkeypatch).index("leased")
    trace, vm = tmp_path / "trace", Vm(World(tmp_path / "other"), "raw")
    trace.unlink()
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    monkeypatch.setenv("SEMISHARED_STOP_AT", str(number))
    ended: List[str] = []

    def work() -> None:
        try:
            vm.detach()
        except HostFailed as e:
            ended.append(e.detail)

    at_work = threading.Thread(target=work)
    at_work.start()
    lock = Path(disk_names.disks_lock(disk_names.base_store_of(vm.ref.vm_dir), 5))
    while not trace.exists() or len(trace.read_text().splitlines()) < number:
        time.sleep(0.05)
    for name in ("TRACE", "STOP_AT"):
        monkeypatch.delenv(f"SEMISHARED_{name}")
    pid = json.loads(lock.read_text())["pid"]
    vm.world.on(s.RemoveDisk(vm.ref, ""))
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass
    at_work.join(60)
    assert ended and vm.world.leases() == []
    vm.world.on(s.DescribeVm(5, vm.ref.vm_dir))


def test_interrupted_it_ends_with_the_vm_that_it_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ActionSite.up(tmp_path) as site:
        assert site.oned.rpc
        monkeypatch.setenv("ONE_XMLRPC", site.oned.rpc.url)
        monkeypatch.setenv("ONE_AUTH", str(site.auth))
        image = site.image(SEMISHARED_LOCAL="remote-first")
        vms = [powered_off(site, image) for _ in range(4)]
        done: List[Dict[str, object]] = []

        def tell(**event: object) -> None:
            if event["event"] == "vm":
                done.append(event)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(2)

        with pytest.raises(KeyboardInterrupt):
            detach(vms, tell)
        assert [row["how"] for row in done] == ["detached"]
        rows = detach(vms, lambda **_: None)
        assert [row["how"] for row in rows] == ["skipped", *["detached"] * 3]


def test_what_ends_one_vm_ends_no_other_and_each_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: List[Dict[str, object]] = []
    with ActionSite.up(tmp_path) as site:
        assert site.oned.rpc
        monkeypatch.setenv("ONE_XMLRPC", site.oned.rpc.url)
        monkeypatch.setenv("ONE_AUTH", str(site.auth))
        image = site.image(SEMISHARED_LOCAL="remote-first")
        first, *vms = [powered_off(site, image) for _ in range(4)]
        trace = tmp_path / "trace"
        (row,) = detach([first], lambda **event: told.append(event))
        assert (row["how"], row["vm"], row["disk"]) == ("detached", first, 0), row
        assert [event["how"] for event in told if event["event"] == "vm"] == ["detached"]
        spare = powered_off(site, image)
        monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
        detach([spare], lambda **event: None)
        monkeypatch.delenv("SEMISHARED_TRACE")
        count = len(trace.read_text().splitlines())
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(count + 2))
        rows = detach(vms, lambda **event: None)
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        assert [row["how"] for row in rows] == ["detached", "failed", "detached"], rows
        assert rows[1]["id"] == "SS012" and "ended with code" in rows[1]["why"]
        site.oned.vm(first).state = 5
        again = detach([first, *vms], lambda **event: None)
        assert [(row["vm"], row["how"]) for row in again] == [
            (first, "skipped"),
            (vms[0], "skipped"),
            (vms[1], "detached"),
            (vms[2], "skipped"),
        ]
