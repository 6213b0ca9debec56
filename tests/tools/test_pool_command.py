# SPDX-License-Identifier: Apache-2.0
"""`semishared pool drain` and `rebalance` against a simulated oned, on a host that is this machine: what is
said, done, and left alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

import pool_devices
from semishared.cli import main, pool
from semishared.config import Config
from semishared.tools import files
from semishared.units import MiB
from tools.oned_site import HERE, ActionSite
from tools.test_gc_clouds import at_rest

SIZES = (64, 64, 128)
POWEROFF, ACTIVE, SAVING = 8, 3, 8
"""States of a VM, and one of the life cycle."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch, has_host=True) as up:
        paths = [up.top / f"device{number}" for number in range(len(SIZES))]
        try:
            for path, size in zip(paths, SIZES):
                path.mkdir()
                pool_devices.mount(path, size)
            up.oned.host_update(up.oned.host(HERE).id, {"SEMISHARED_POOL": " ".join(map(str, paths))})
            assert main.main(["pool", "add", HERE]) == 0
            yield up
        finally:
            for path in filter(os.path.ismount, paths):
                pool_devices.unmount(path)


def device(site: ActionSite, path: Path) -> str:
    return os.path.realpath(path).split("/.semishared/")[0]


def overlay(site: ActionSite, image: int) -> tuple[int, Path]:
    """Return a powered-off VM with an overlay over an image, and its layers."""
    vm = site.vm(image)
    at_rest(site, vm, POWEROFF)
    disk = site.make("clone", vm)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 3M 64k", str(disk)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return vm, Path(f"{disk}.snap")


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_device_is_drained_and_what_is_not_at_rest_stays(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image()
    vm, layers = overlay(site, image)
    drained = device(site, layers)
    capsys.readouterr()
    assert main.main(["pool", "drain", HERE, drained, "--dry-run", "--json"]) == 0
    dry = said(capsys)[-1]
    assert {row["how"] for row in dry["rows"]} == {"would move"} and device(site, layers) == drained
    assert main.main(["pool", "check", HERE]) == 0, "nothing was closed"
    capsys.readouterr()
    assert main.main(["pool", "drain", HERE, drained, "--rate", "500M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"VM {vm} disk 0" in "".join(lines) and lines[-1].endswith(
        f"{drained} is empty, and takes nothing more"
    )
    assert len(lines) == len(dry["rows"]) + 1 and device(site, layers) != drained
    subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x55 3M 64k", str(layers / "0")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0xa1 1M 64k", str(layers / "0")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert main.main(["base", "list", "--json"]) == 0
    (base,) = json.loads(capsys.readouterr().out)["bases"]
    assert base["device"] != drained and os.path.isdir(f"{base['device']}/.semishared/bases/{base['name']}")
    assert main.main(["base", "list"]) == 0 and f", on {base['device']}, " in capsys.readouterr().out
    assert main.main(["pool", "check", HERE]) == 1
    assert f"{drained} is being drained, or was, and takes nothing more" in capsys.readouterr().out
    assert main.main(["pool", "add", HERE]) == 0 and main.main(["pool", "check", HERE]) == 0
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = ACTIVE, SAVING
    capsys.readouterr()
    now = device(site, layers)
    assert main.main(["pool", "drain", HERE, now, "--json"]) == 1
    summary = said(capsys)[-1]
    (stays,) = [row for row in summary["rows"] if row["how"] != "moved"]
    assert (stays["how"], stays["vm"], summary["empty"]) == ("stays", vm, False) and "LCM state 8" in stays[
        "why"
    ]
    assert device(site, layers) == now


def test_rebalance_evens_out_and_a_second_one_moves_nothing(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image()
    vms = [overlay(site, image) for _ in range(2)]
    source = device(site, vms[0][1])
    # As disks that have grown.
    for _, layers in vms:
        subprocess.run(
            ["qemu-io", "-f", "qcow2", "-c", "write -P 0x66 4M 4M", str(layers / "0")],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    capsys.readouterr()
    assert main.main(["pool", "rebalance", HERE, "--json"]) == 0
    first = said(capsys)[-1]
    assert source and {row["how"] for row in first["rows"]} <= {"moved"}
    assert main.main(["pool", "rebalance", HERE]) == 0
    assert capsys.readouterr().out == f"{HERE}: no device is much fuller than the others\n"
    for _, layers in vms:
        command = ["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x66 4M 4M", str(layers / "0")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def test_it_is_said_how_far_a_drain_is_and_it_keeps_to_its_rate(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    _, layers = overlay(site, site.image())
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "write -P 0x66 0 8M", str(layers / "0")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    capsys.readouterr()
    started = time.monotonic()
    assert main.main(["pool", "drain", HERE, device(site, layers), "--rate", "4M", "--json"]) == 0
    seconds, (*events, summary) = time.monotonic() - started, said(capsys)
    moved = sum(row["bytes"] for row in summary["rows"])
    assert moved >= 8 * MiB and seconds > 0.9 * 2 * moved / (4 * MiB), "copied, and read again"
    told = [(event["have"], event["of"]) for event in events if event["event"] == "host"]
    assert (
        told
        and {of for _, of in told} == {moved}
        and [have for have, _ in told] == sorted(have for have, _ in told)
    )
    assert 0 < told[0][0] < moved and told[-1][0] <= moved


COMMAND = """
import os, sys
os.geteuid = lambda: 9869
from semishared.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def test_a_drain_whose_command_is_killed_leaves_nobody_at_work_and_is_gone_on_with(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    _, layers = overlay(site, site.image())
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "write -P 0x66 0 8M", str(layers / "0")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    read = ["qemu-io", "-r", "-f", "qcow2", "-c", "read -P 0x66 0 8M", str(layers / "0")]
    drained = device(site, layers)
    words = ["pool", "drain", HERE, drained, "--rate", "2M", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for moved in (1, 2 * MiB):
        command = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, env=environment
        )
        assert command.stdout
        while json.loads(command.stdout.readline()).get("have", 0) < moved:
            assert command.poll() is None, "it was done before it was killed"
        command.kill()
        command.wait()
        command.stdout.close()
        others = [path for path in site.top.glob("device?") if str(path) != drained]
        copies = [
            path
            for other in others
            for path in other.rglob("*")
            if path.is_file() and path.name != "device.json"
        ]
        sizes = [files.allocated(str(path)) for path in copies]
        assert any(sizes), "it was killed before it copied"
        time.sleep(0.6)
        assert sizes == [files.allocated(str(path)) for path in copies], "somebody goes on copying"
        subprocess.run(read, check=True, stdout=subprocess.DEVNULL)
    capsys.readouterr()
    assert main.main(["pool", "drain", HERE, drained, "--json"]) == 0
    assert said(capsys)[-1]["empty"] and device(site, layers) != drained
    subprocess.run(read, check=True, stdout=subprocess.DEVNULL)
    assert not list(site.top.glob("device*/.semishared/staging/*")), "what was half copied is gone"


def test_what_a_host_does_not_declare_itself_the_configuration_declares(
    site: ActionSite, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = site.oned.host(HERE).template
    words = own.pop("SEMISHARED_POOL")
    capsys.readouterr()
    assert main.main(["pool", "add", HERE]) == 2
    assert f"nothing declares a pool of {HERE}" in capsys.readouterr().err
    monkeypatch.setattr(pool, "load", lambda: Config(pool_devices=str(words)))
    assert main.main(["pool", "check", HERE]) == 0
    *fewer, _ = str(words).split()
    site.oned.host_update(site.oned.host(HERE).id, {"SEMISHARED_POOL": " ".join(fewer)})
    assert main.main(["pool", "check", HERE]) == 1, (
        "what a host says of itself counts, and one is declared no more"
    )
    site.oned.host_update(site.oned.host(HERE).id, {"SEMISHARED_POOL": "none"})
    capsys.readouterr()
    assert main.main(["pool", "add", HERE]) == 2, "nor has it one that says so"
    assert f"nothing declares a pool of {HERE}" in capsys.readouterr().err


def test_a_label_of_before_is_named_and_written_anew(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    label = site.top / "device0/.semishared/device.json"
    said = json.loads(label.read_text())
    label.write_text(json.dumps({key: said[key] for key in ("version", "uuid", "class", "weight")}))
    capsys.readouterr()
    assert main.main(["pool", "check", HERE]) == 1
    assert f"{HERE}: {site.top}/device0 has a label of before" in capsys.readouterr().out
    assert main.main(["pool", "add", HERE]) == 0 and main.main(["pool", "check", HERE]) == 0
    now = json.loads(label.read_text())
    assert now["uuid"] == said["uuid"] and label.stat().st_size > 4096


@pytest.mark.parametrize(
    "words, why",
    [
        (["drain", HERE, "/nowhere"], "/nowhere is no device of the pool"),
        (["drain", HERE], "needs the device"),
        (["rebalance", "elsewhere"], "no such host"),
    ],
)
def test_what_cannot_be_meant_is_said_in_a_line(
    site: ActionSite, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    capsys.readouterr()
    assert main.main(["pool", *words]) == 2
    assert why in capsys.readouterr().err
