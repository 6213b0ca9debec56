# SPDX-License-Identifier: Apache-2.0
"""`semishared commit` of a VM at rest on the front-end: what it prints, and its exit codes. Running guests: tests/system/test_commit.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from semishared.cli import main
from tools.oned_site import HERE, SYSTEM, ActionSite
from tools.test_gc_clouds import at_rest, use


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path / "one") as up:
        use(up, monkeypatch)
        monkeypatch.setattr(os, "geteuid", lambda: 9869)
        yield up


def written(site: ActionSite) -> "tuple[int, Path]":
    """Return a VM whose guest has written to its local disk, and the image of that."""
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm = site.vm(image)
    at_rest(site, vm)
    disk = site.make("ln", vm)
    subprocess.run(["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 3M 64k", str(disk)], check=True, stdout=subprocess.DEVNULL)
    return vm, site.source(image)


def test_what_was_written_is_committed_once(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, image = written(site)
    assert main.main(["commit", str(vm)]) == 0
    assert f"VM {vm} disk 0: " in capsys.readouterr().out
    assert image.read_bytes()[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536
    assert main.main(["commit", str(vm)]) == 0
    assert capsys.readouterr().out == f"VM {vm} disk 0: nothing new to commit\n"


def test_a_machine_that_may_have_kept_disks_and_cannot_be_asked_is_said(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, _ = written(site)
    site.oned.host_create("nowhere.invalid")
    assert main.main(["commit", str(vm)]) == 2
    said = capsys.readouterr()
    assert "committed" in said.out
    assert "nowhere.invalid: what it may have kept is not known: " in said.err and "[SS010]" in said.err


def test_what_was_kept_is_not_put_under_the_disks_of_others(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    """By now its image is one that is cloned: what it holds is what disks of other VMs lie over."""
    vm, image = written(site)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    before, (known,) = image.read_bytes(), site.oned.images.values()
    known.persistent = False
    assert main.main(["commit", str(vm)]) == 1
    said = capsys.readouterr()
    assert "is not persistent any more" in said.err and "--as-new-image" in said.err
    assert image.read_bytes() == before
    known.persistent = True
    assert main.main(["commit", str(vm)]) == 0
    assert image.read_bytes()[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536
