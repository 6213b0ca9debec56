# SPDX-License-Identifier: Apache-2.0
"""`semishared commit` of a VM at rest on the front-end: what it prints, and its exit codes. Running guests:
tests/system/test_commit.py.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from rehearsing import things
from semishared.cli import main
from tools.oned_site import HERE, SYSTEM, ActionSite
from tools.test_gc_clouds import at_rest

EPILOG_FAILURE = 40
"""LCM state of a VM that was to end when its disks could not go."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch) as up:
        yield up


def written(site: ActionSite) -> tuple[int, Path]:
    """Return a VM whose guest has written to its local disk, and the image of that."""
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm = site.vm(image)
    at_rest(site, vm)
    disk = site.make("ln", vm)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 3M 64k", str(disk)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return vm, site.source(image)


def test_what_was_written_is_committed_once(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, image = written(site)
    assert main.main(["commit", str(vm)]) == 0
    assert f"VM {vm} disk 0: " in capsys.readouterr().out
    assert image.read_bytes()[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536
    assert main.main(["commit", str(vm)]) == 0
    assert capsys.readouterr().out == f"VM {vm} disk 0: nothing new to commit\n"


def test_a_program_gets_a_row_for_each_disk(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm, image = written(site)
    before, there = image.read_bytes(), things(site.top)
    assert main.main(["commit", str(vm), "--dry-run", "--json"]) == 0
    assert things(site.top) == there, "a dry run changes nothing on disk"
    capsys.readouterr()
    for words, how in ((["--dry-run"], "would commit"), ([], "committed"), ([], "committed")):
        assert main.main(["commit", str(vm), "--json", *words]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["vm"], said["dry_run"], said["errors"]) == (vm, "--dry-run" in words, [])
        (row,) = said["rows"]
        assert (row["disk"], row["how"], row["id"], row["kept"]) == (0, how, "", "")
        assert (image.read_bytes() == before) is (how == "would commit")
    assert row["said"] == "nothing new to commit"
    assert main.main(["commit", str(vm), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"VM {vm} disk 0: would be committed\n"


@pytest.mark.fault(80, "a VM or disk that is not there is called so: neither oned nor its session is blamed")
def test_a_vm_or_disk_that_is_not_there_is_called_so(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    for words, line in (
        (["99"], "no VM '99' in OpenNebula"),
        (["nosuch"], "no VM 'nosuch' in OpenNebula: its id says which"),
        ([str(vm), "9"], f"no disk 9 of VM {vm} in OpenNebula (its disks: 0), and none was kept"),
    ):
        assert main.main(["commit", *words]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err) == ("", f"semishared commit: {line}; --help says what there is\n")
    for words in (["share", "usage", "99"], ["share", "list", "99"], ["detach", "--host", "nosuch"]):
        assert main.main(words) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert said.err.startswith(f"semishared {words[0]}: no ") and "in OpenNebula; --help" in said.err


def test_a_machine_that_may_have_kept_disks_and_cannot_be_asked_is_said(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    site.oned.host_create("nowhere.invalid")
    assert main.main(["commit", str(vm)]) == 2
    said = capsys.readouterr()
    assert "committed" in said.out
    assert "nowhere.invalid: what it may have kept is not known: " in said.err and "SS010" in said.err


def test_what_was_kept_is_not_put_under_the_disks_of_others(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.fault(
    43, "a refused commit can be resolved by the command that its line names, when the VM cannot end"
)
def test_a_refused_commit_becomes_another_image_when_the_vm_cannot_end(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, image = written(site)
    with image.open("r+b") as file:
        file.write(b"another")
    assert main.main(["commit", str(vm), "0"]) == 1, "somebody has written to the image"
    assert "--as-new-image" in capsys.readouterr().err
    known = site.oned.vm(vm)
    known.state, known.lcm = 3, EPILOG_FAILURE
    assert main.main(["commit", str(vm), "0", "--as-new-image", "two words"]) == 0
    said = capsys.readouterr().out
    assert "--name 'two words'" in said and f"onevm recover --delete {vm}" in said
    words = shlex.split(said.partition("`")[2].partition("`")[0])
    assert (
        Path(words[words.index("--source") + 1]).read_bytes()[3 << 20 : (3 << 20) + 65536] == b"\x55" * 65536
    )
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    assert any(name.startswith(".kept-") for name in os.listdir(site.system))


def test_a_vm_that_opennebula_is_at_work_on_is_left_alone(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    vm, _ = written(site)
    known = site.oned.vm(vm)
    known.state, known.lcm = 3, 99
    assert main.main(["commit", str(vm)]) == 2
    assert "OpenNebula is at work on it" in capsys.readouterr().err, "no failure"
