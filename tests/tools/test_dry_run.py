# SPDX-License-Identifier: Apache-2.0
"""--dry-run, over the whole command line: the real command, a simulated oned, the real host side; nothing on
disk changes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Iterator

import pytest

from lab.oned import IMAGE_DS, SYSTEM_DS, Oned, Settings
from lab.oned.objects import History, Host
from rehearsing import things
from semishared.cli import base
from semishared.cli.main import COMMANDS, main, parser
from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.wire import session
from tools.test_pool import Pool, device_of
from tools.world import MiB, World, qemu_io

FULLEST = "FULLEST"
"""In place of the device of a pool that has most."""
RUNS = {
    "base": [["verify"], ["prune"], ["evict", "os"], ["evict", "free"], ["verify", "os"]],
    "failover": [["lost"]],
    "gc": [["--now"], []],
    "pool": [["drain", "localhost", FULLEST], ["rebalance", "localhost"]],
}
"""How each subcommand with --dry-run is run, without it."""


class Site:
    """A machine that is front-end and host: a damaged base that a VM leases, a base nobody leases, and a
    killed clone's rest.
    """

    def __init__(self, world: World, oned: Oned) -> None:
        self.world, self.oned = world, oned
        used, free = (
            world.image("a" * 32, size=4 * MiB),
            world.image("b" * 32, size=4 * MiB, pattern=0xB2)._replace(id=8),
        )
        world.clone(used, world.disk(5, 0))
        world.on(s.StageBase(str(world.root), free))
        damaged = next(path for path in world.bases() if path.name.startswith("100-7-")) / "image"
        damaged.chmod(0o640)
        with open(damaged, "r+b") as file:
            file.seek(1 << 20)
            file.write(b"another")
        damaged.chmod(0o440)
        world.clone(used, world.disk(77, 0))
        (world.store / ".semishared" / ".uploads" / ("c" * 32)).mkdir(parents=True)
        for path in world.top.rglob("*"):
            os.utime(path, (1, 1), follow_symlinks=False)

    def run(self, *words: str) -> int:
        return main(list(words))

    def in_a_pool(self, pool: Pool) -> str:
        """Have what comes from now on lie on devices, and a disk there that fills one of them; return that
        one.
        """
        pool.set()
        image, disk = self.world.image("d" * 32, size=32 * MiB), self.world.disk(8, 0)
        qemu_io(self.world.clone(image, disk), "qcow2", "write -P 0x66 4M 24M")
        return device_of(f"{disk.path}.snap")

    def lose_a_host(self) -> Host:
        """Have a host in state ERROR, with a VM that oned does not see any more."""
        lost = self.oned.hosts[self.oned.host_create("lost")]
        lost.state = 3
        swap = {"TYPE": "swap", "SIZE": "16"}
        vm = self.oned.vms[self.oned.vm_create({"NAME": "gone", "CPU": "1", "MEMORY": "64", "DISK": [swap]})]
        vm.state, vm.lcm = 3, 16
        vm.history.append(History(vm.id, 0, lost, "semishared", 101))
        return lost


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    world = World(tmp_path / "machine")
    auth = tmp_path / "one_auth"
    auth.write_text("oneadmin:password\n")
    # As who goes by it: root is, and says that it is not.
    (tmp_path / "semishared_key").write_text("5e" * 32)
    (tmp_path / "semishared_key").chmod(0o600)
    os.chown(tmp_path / "semishared_key", 1000, -1)
    scripts = tmp_path / "fe/var/lib/one/remotes/datastore/semishared"
    scripts.mkdir(parents=True)
    answers = iter([f"echo {world.store}/{'a' * 32} raw", f"echo {world.store}/{'b' * 32} raw"])
    for name, line in {"monitor": "echo USED_MB=1 TOTAL_MB=3 FREE_MB=2", "stat": "echo 64"}.items():
        (scripts / name).write_text(f"#!/bin/sh\n{line}\n")
        (scripts / name).chmod(0o755)
    with Oned.in_tree(tmp_path, Settings(location=str(world.location))) as oned:
        oned.datastore_create(IMAGE_DS, 100)
        oned.datastore_create(SYSTEM_DS, 101)
        oned.host_create("localhost")
        oned.next_image = 7
        for name in ("os", "free"):
            (scripts / "cp").write_text(f"#!/bin/sh\n{next(answers)}\n")
            (scripts / "cp").chmod(0o755)
            oned.image_create(100, name, path="/var/tmp/x")
        assert oned.rpc
        monkeypatch.setenv("ONE_XMLRPC", oned.rpc.url)
        monkeypatch.setenv("ONE_AUTH", str(auth))
        # The commands refuse to be root.
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        # So that there is something to prune.
        monkeypatch.setattr(base, "load", lambda: Config(bases_size_limit="1K"))
        yield Site(world, oned)


def dry(command: str) -> bool:
    """Tell whether a subcommand has --dry-run."""
    choices = next(
        action.choices
        for action in parser(command)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return "--dry-run" in choices[command]._option_string_actions


def test_every_subcommand_with_a_dry_run_is_run_here() -> None:
    # Of shares: test_share_clouds.py, where there are some. Of doctor: tests/neighbours/test_sunstone.py. Of
    # commit: test_commit_command.py. Of detach, publish and stage: test_would.py.
    elsewhere = {"share", "doctor", "commit", "detach", "publish", "stage"}
    assert {command for command in COMMANDS if dry(command)} == {*RUNS, *elsewhere}


@pytest.mark.fault(21, "--dry-run changes nothing on any machine: no name, byte, time or attribute")
@pytest.mark.parametrize(
    "words", [[command, *words] for command, runs in RUNS.items() for words in runs], ids=" ".join
)
def test_a_dry_run_changes_nothing_on_disk(
    site: Site, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lost = site.lose_a_host() if words[0] == "failover" else None
    pool = Pool(site.world) if words[0] == "pool" else None
    try:
        fullest = site.in_a_pool(pool) if pool else ""
        before = things(site.world.top)
        code = site.run(*[fullest if word == FULLEST else word for word in words], "--dry-run")
        assert things(site.world.top) == before
        assert not pool or "would move" in capsys.readouterr().out
    finally:
        if pool:
            pool.close()
    if lost:
        assert code == 0
        assert not lost.template
        assert not any(vm.resched for vm in site.oned.vms.values())


@pytest.mark.parametrize(
    "words", [["base", "verify"], ["base", "prune"], ["base", "evict", "free"]], ids=" ".join
)
def test_the_same_without_does_what_was_said(
    site: Site, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    site.run(*words, "--dry-run", "--json")
    said = json.loads(capsys.readouterr().out)["bases"]
    before = things(site.world.top)
    site.run(*words, "--json")
    done = json.loads(capsys.readouterr().out)["bases"]
    assert things(site.world.top) != before
    assert [row["name"] for row in said] == [row["name"] for row in done]
    assert [row.get("damaged") for row in said] == [row.get("damaged") for row in done]
    assert not any(row.get("evicted") or row.get("mended") for row in said)
    assert any(row.get("evicted") or row.get("damaged") for row in done)


def test_a_dry_run_says_which_base_is_damaged_and_exits_with_1(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.run("base", "verify", "--dry-run") == 1
    said = capsys.readouterr().out
    assert "DAMAGED (extent 0), would be taken out of use" in said and "VMs 5, 77" in said
    assert ": good," in said


def test_no_step_that_changes_anything_is_sent_by_a_session_that_only_looks(world: World) -> None:
    before = things(world.top)
    with session.looking_only():
        with pytest.raises(SemisharedError, match="PrepareVm on localhost was not sent"):
            world.on(s.DescribeVm(5, str(world.system / "5")), s.PrepareVm(5, str(world.system / "5")))
        assert world.on(s.DescribeVm(5, str(world.system / "5"))) == [{"present": False, "records": []}]
    assert things(world.top) == before
    world.on(s.PrepareVm(5, str(world.system / "5")))


@pytest.mark.fault(21, "`semishared plan clone` of an image on Ceph sends no machine anything")
def test_planning_a_clone_on_ceph_touches_no_machine(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    oned, world = site.oned, site.world
    store = oned.datastore_create(
        'NAME="ceph" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared" DISK_TYPE="RBD" '
        'CEPH_USER="libvirt" '
        'CEPH_SECRET="4b9c1c37-e95e-4b4c-a1ee-ecbb1ba2e3b2" CEPH_HOST="mon" '
        'BRIDGE_LIST="localhost" SEMISHARED_PLACE="shared"',
        103,
    )
    image = oned.images[oned.image_create(100, "remote", path="/var/tmp/x")]
    image.datastore_id, image.source, image.format = store, "one/one-9", "raw"
    vm = oned.vm_create({"NAME": "a", "CPU": "1", "MEMORY": "64", "DISK": [{"IMAGE_ID": str(image.id)}]})
    before = things(world.top)
    code = site.run(
        "plan",
        "--json",
        "clone",
        "fe:one/one-9",
        f"localhost:{world.system}/{vm}/disk.0",
        str(vm),
        str(store),
    )
    assert things(world.top) == before
    assert code == 0
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [step["step"] for part in said["plan"] for step in part["steps"]] == [
        "PrepareVm",
        "RecordNetwork",
        "CloneStored",
        "ConfirmDisk",
    ]


WITHOUT_EFFECT = [
    ["base", "list", "--dry-run"],
    ["base", "list", "--rate", "40M"],
    ["base", "prune", "--rate", "40M"],
    ["base", "prune", "os"],
    ["base", "evict", "free", "--rate", "40M"],
    ["caps", "103", "--user", "one"],
    ["caps", "103", "--pool", "one"],
    ["setup", "--is-store"],
    ["setup", "--kind", "rbd", "--apply", "--is-store"],
    ["gc", "--now", "--older-than", "2h"],
    ["stage", "os", "--due"],
]


@pytest.mark.fault(21, "an option that has no effect is a usage error")
def test_an_option_without_effect_is_an_error(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = things(site.world.top)
    for words in WITHOUT_EFFECT:
        try:
            code = site.run(*words)
        except SystemExit as e:
            code = int(e.code or 0)
        assert (words, code, bool(capsys.readouterr().err)) == (words, 2, True)
    assert things(site.world.top) == before
