# SPDX-License-Identifier: Apache-2.0
"""gc and disks that were never committed: what it says of them when it takes their VM's directory, what
becomes of them by the command that it names, and what is left when they are discarded.

The simulated oned, the executables of this checkout, real layers; `gc` runs as the command does, on this
machine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, Iterator

import pytest

from semishared.cli import main
from tools.oned_site import HERE, SYSTEM, ActionSite
from tools.test_commit_command import written
from tools.test_gc_clouds import at_rest, done
from unit.test_agreed import Terminal


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch) as up:
        yield up


def gc(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Return what `semishared gc` prints."""
    capsys.readouterr()
    assert main.main(["gc", *words]) == code
    return capsys.readouterr().out


def rows(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gc(capsys, "--json", *words, code=code))["findings"]
    return found


def kept(site: ActionSite) -> list[str]:
    return sorted(name for name in os.listdir(site.system) if name.startswith(".kept-"))


def leases(site: ActionSite) -> list[str]:
    return sorted(path.name for path in site.location.glob(".semishared/bases/*/leases/*"))


@pytest.mark.fault(61, "gc says of a directory that it removes what it has kept of it, and where")
def test_what_is_kept_of_a_directory_that_goes_is_said(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    done(site, vm)
    (row,) = [row for row in rows(capsys, "--now") if row["kind"] == "vm"]
    (name,) = kept(site)
    assert row["result"] == (
        f"removed, but for what is not committed: kept in {site.system}/{name} on {os.uname().nodename}"
    )
    assert not (site.system / str(vm)).exists()


def test_an_administrator_who_says_no_has_nothing_removed(
    site: ActionSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm, _ = written(site)
    done(site, vm)
    out = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal("n\n"))
    monkeypatch.setattr("sys.stdout", out)
    assert main.main(["gc", "--now"]) == 1
    assert f"vm {site.system}/{vm}: " in out.getvalue() and (site.system / str(vm)).exists()


@pytest.mark.fault(61, "a discarded disk takes its lease along: the next gc finds nothing")
def test_a_discarded_disk_leaves_no_lease(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, _ = written(site)
    other, _ = written(site)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    assert leases(site) == sorted([f"{vm}-0", f"{other}-0"])
    (name,) = kept(site)
    assert "1 of 1 removed" in gc(capsys, "--now", "--discard", name)
    assert kept(site) == [] and leases(site) == [f"{other}-0"]
    assert gc(capsys, "--now", "--dry-run").startswith("0 to remove (0 B), 0 kept")


def test_a_discarded_disk_leaves_the_lease_that_the_vm_needs(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    site.make("ln", vm)
    (name,) = kept(site)
    gc(capsys, "--now", "--discard", name)
    assert kept(site) == [] and leases(site) == [f"{vm}-0"] and site.disk(vm).exists()


@pytest.mark.fault(61, "gc offers the command that works on a kept disk, by what oned says of its image")
def test_the_command_that_gc_names_works(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, image = written(site)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    site.oned._done(site.oned.vm(vm))
    (known,) = site.oned.images.values()
    assert f"(semishared commit {vm}; if another VM" in gc(capsys, "--dry-run")
    taken = site.vm(known.id)
    at_rest(site, taken)
    site.make("ln", taken)
    said = gc(capsys, "--dry-run")
    assert f"VM {taken} has image {known.id}: semishared commit {vm} 0 --as-new-image NEW, or" in said
    assert main.main(["commit", str(vm)]) == 1, "the other VM has claimed the image"
    assert "--as-new-image" in capsys.readouterr().err
    command = re.search(r"semishared (commit .*?NEW)", said)
    assert command and main.main(shlex.split(command.group(1))) == 0
    words = shlex.split(capsys.readouterr().out.partition("`")[2].partition("`")[0])
    content = Path(words[words.index("--source") + 1]).read_bytes()
    assert content[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536
    assert image.read_bytes()[3 << 20 : (3 << 20) + 1] != b"\x55"


def test_the_command_that_gc_names_works_without_the_image(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    site.oned._done(site.oned.vm(vm))
    ((number, _),) = site.oned.images.items()
    del site.oned.images[number]
    assert main.main(["commit", str(vm)]) == 1
    said = gc(capsys, "--dry-run")
    assert f"oned has no image {number} any more: semishared commit {vm} 0 --as-new-image NEW, or" in said
    assert main.main(["commit", str(vm), "0", "--as-new-image", "NEW"]) == 0
    words = shlex.split(capsys.readouterr().out.partition("`")[2].partition("`")[0])
    content = Path(words[words.index("--source") + 1]).read_bytes()
    assert content[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536


@pytest.mark.fault(60, "a delta that a killed move has left is no snapshot")
def test_a_delta_is_no_snapshot(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm = site.vm(site.image())
    at_rest(site, vm)
    disk = site.make("clone", vm)
    layers = disk.parent / "disk.0.snap"
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "0", "-F", "qcow2", "1000000"]
    subprocess.run(argv, cwd=layers, check=True)
    assert main.main(["status", str(vm), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["disks"]
    assert (row["snapshots"], row["delta"]) == (0, True)
