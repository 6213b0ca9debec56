# SPDX-License-Identifier: Apache-2.0
"""gc where oned knows less than there is (a restored database), where another cloud has the same store, and
where a VM is twice.

The simulated oned and the executables of this checkout; `gc` looks, asks and removes as the command does, on
this machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Iterator

import pytest

from lab.oned.objects import History, Host
from semishared.cli import doctor, setup
from semishared.cli import gc as command
from semishared.config import Config
from semishared.install import examine
from semishared.opennebula.oned import Oned
from semishared.plan.care import gc
from semishared.tools import files
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite

RUNNING, DONE, UNDEPLOYED = 3, 6, 9


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path / "one") as up:
        use(up, monkeypatch)
        yield up


def use(site: ActionSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `gc` ask this oned, which has no hosts: there is no libvirt to be asked on this machine."""
    assert site.oned.rpc
    site.oned.hosts.clear()
    monkeypatch.setenv("ONE_XMLRPC", site.oned.rpc.url)
    monkeypatch.setenv("ONE_AUTH", str(site.auth))


def find() -> tuple[list[gc.Finding], command.Survey]:
    survey = command.survey_cloud(Oned(), Config())
    assert survey.errors == []
    return gc.find(survey.machines, survey.known, 0, True), survey


def collect() -> list[tuple[str, str, str]]:
    """Do what `semishared gc --now` does; return (kind, name, what was said)."""
    found, survey = find()
    results = command.remove(found, Config(), survey)
    return sorted(
        (item.kind, Path(item.path).name, item.keep or result) for item, result in zip(found, results)
    )


def at_rest(site: ActionSite, vm: int, state: int = UNDEPLOYED, system: int = 101) -> None:
    """Let oned have a VM on the front-end."""
    held = site.oned.vm(vm)
    held.state, held.lcm = state, 0
    held.history.append(History(vm, len(held.history), Host(0, HERE, "kvm"), "semishared", system))


def done(site: ActionSite, vm: int) -> None:
    site.oned.vm(vm).state = DONE


def clones(site: ActionSite) -> list[str]:
    return sorted(path.name for path in site.store.glob(".semishared/*/clones/*"))


def set_cloud(site: ActionSite, letter: str) -> None:
    site.oned.datastore_update(STORE, {"SEMISHARED_CLOUD": letter * 32})


# -- a restored database ---------------------------------------------------------------------------


@pytest.mark.fault(15, "what is newer than a restored oned database is kept, and said")
def test_vm_that_is_newer_than_oneds_database_is_kept(site: ActionSite) -> None:
    image = site.image(SEMISHARED_PLACE="shared")
    set_cloud(site, "a")
    vms = [site.vm(image) for _ in range(3)]
    for vm in vms:
        site.make("clone", vm)
        at_rest(site, vm)
    done(site, vms[1])
    # The database of before VM 2: nobody remembers it.
    del site.oned.vms[vms[2]]
    said = {(kind, name.split("-")[0]): text for kind, name, text in collect()}
    assert said[("vm", "1")] == "removed" and said[("clone", "1")] == "removed"
    assert "newer" in said[("vm", "2")] and "newer" in said[("clone", "2")]
    assert site.disk(2).exists() and not site.disk(1).exists() and site.disk(0).exists()
    # Once oned has given that number again, and the VM is gone, it is its leftover.
    site.oned.vms[5] = site.oned.vms[0]
    site.oned.vms[5].id = 5
    del site.oned.vms[0]
    assert {text for kind, name, text in collect() if name.startswith("2")} == {"removed"}


# -- another cloud ----------------------------------------------------------------------------------


@pytest.fixture
def other(site: ActionSite, tmp_path: Path) -> Iterator[ActionSite]:
    """Another OpenNebula with an image datastore on the same export, and hosts of its own."""
    with ActionSite.up(tmp_path / "two") as up:
        shutil.rmtree(up.store)
        up.store.symlink_to(site.store)
        yield up


@pytest.mark.fault(15, "gc leaves alone what another cloud on the same export has made")
@pytest.mark.parametrize("named", [True, False])
def test_clones_of_another_cloud_are_left_alone(site: ActionSite, other: ActionSite, named: bool) -> None:
    """Also of one that was never set up anew, whose clones do not say whose they are."""
    if named:
        set_cloud(site, "a")
        set_cloud(other, "b")
    mine, theirs = (
        site.image("mine", SEMISHARED_PLACE="shared"),
        other.image("theirs", SEMISHARED_PLACE="shared"),
    )
    for cloud, image in ((site, mine), (other, theirs)):
        for _ in range(3):
            vm = cloud.vm(image)
            cloud.make("clone", vm)
            at_rest(cloud, vm)
    assert len(clones(site)) == 12  # each with its layers
    done(site, 1)
    said = collect()
    assert {text for kind, name, text in said if kind in ("clone", "vm") and "might" not in text} == {
        "removed"
    }
    left = clones(site)
    assert len(left) == 10 and all(other.disk(vm).exists() for vm in range(3)) and site.disk(0).exists()


def test_clouds_that_share_an_image_do_not_share_clones(site: ActionSite, other: ActionSite) -> None:
    """The same VM, disk and image in both: two clones, and the removal of the one is none of the other."""
    set_cloud(site, "a")
    set_cloud(other, "b")
    image = site.image("one", SEMISHARED_PLACE="shared")
    twin = other.image("one", SEMISHARED_PLACE="shared")
    other.oned.image(twin).source = str(other.store / site.source(image).name)
    for cloud, number in ((site, image), (other, twin)):
        cloud.make("clone", cloud.vm(number))
    assert clones(site) == sorted(f"0-0-{letter * 32}{end}" for letter in "ab" for end in ("", ".snap"))
    site.tm("delete", f"{HERE}:{site.disk(0)}", 0, STORE)
    assert clones(site) == [f"0-0-{'b' * 32}", f"0-0-{'b' * 32}.snap"] and other.disk(0).exists()


def test_clone_that_was_never_recorded_is_removed_with_its_disk(site: ActionSite) -> None:
    """Killed between the clone and its record: what was intended says where the clone is."""
    set_cloud(site, "a")
    vm = site.vm(site.image(SEMISHARED_PLACE="shared"))
    site.make("clone", vm)
    (site.system / str(vm) / ".semishared/disk.0.json").unlink()
    site.tm("delete", f"{HERE}:{site.disk(vm)}", vm, STORE)
    assert clones(site) == [] and not list((site.system / str(vm) / ".semishared").glob("*.0.json"))


def test_store_that_is_not_there_is_not_looked_through(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    site.oned.datastore_update(STORE, {"SEMISHARED_STORE": "e" * 32})
    upload = site.store / ".semishared/.uploads" / ("0" * 32)
    upload.mkdir(parents=True)
    survey = command.survey_cloud(Oned(), Config())
    assert ["SS084" in error["error"] for error in survey.errors] == [True]
    assert gc.find(survey.machines, survey.known, 0, False) == [] and upload.exists()


# -- hosts that have nothing to do with us ----------------------------------------------------------


def test_hosts_to_which_none_of_our_vms_comes_are_no_reason_to_fail(
    site: ActionSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need not have anything of ours: gc does not count them, doctor and setup do not examine them."""
    (site.top / "ssh").write_text("#!/bin/sh\necho 'No route to host' >&2\nexit 255\n")
    (site.top / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{site.top}:{os.environ['PATH']}")
    for name in ("lxc1", "lxc2", "h9"):
        host = site.oned.hosts[site.oned.host_create(name)]
        host.vm_mad, host.state = "kvm" if name == "h9" else "lxc", 8 if name == "lxc2" else 2
    for store in site.oned.datastores.values():
        store.clusters = [0, 100]
    survey = command.survey_cloud(Oned(), Config())
    assert [error["machine"] for error in survey.errors] == ["h9"] and [
        machine.name for machine in survey.machines
    ] == [HERE]
    assert [host.name for host in doctor._cloud()[0].hosts] == ["h9"]
    for store in site.oned.datastores.values():
        store.clusters = [100]
    assert command.survey_cloud(Oned(), Config()).errors == []
    assert doctor._cloud()[0].hosts == []
    monkeypatch.setattr(examine, "examine", lambda *words: pytest.fail("asked"))
    assert setup.shared(SYSTEM) == []


# -- a VM that is twice -----------------------------------------------------------------------------


def doubled(site: ActionSite) -> int:
    """Return a VM whose directory is in datastore 101, where oned has it, and an older one in 103."""
    image = site.image()
    site.oned.datastore_create('NAME="other_sys" TYPE="SYSTEM_DS" TM_MAD="semishared"', 103)
    vm = site.vm(image)
    site.make("clone", vm)
    (site.location / "103").mkdir()
    shutil.copytree(site.system / str(vm), site.location / f"103/{vm}", symlinks=True)
    at_rest(site, vm)
    return vm


@pytest.mark.fault(15, "a directory of a known VM where oned does not have it goes, with what it pins")
def test_stray_directory_of_a_known_vm(site: ActionSite) -> None:
    vm = doubled(site)
    assert ("stray", str(vm), "removed") in collect()
    assert not (site.location / f"103/{vm}").exists() and site.disk(vm).exists()
    assert not [item for item in find()[0] if item.kind == "stray"]


def test_stray_that_may_be_the_only_one_is_kept(site: ActionSite) -> None:
    vm = doubled(site)
    (site.system / str(vm)).rename(site.top / "gone")
    collect()
    assert (site.location / f"103/{vm}/disk.0").exists(), "it is the only one"
    (site.top / "gone").rename(site.system / str(vm))
    # Less is there than here.
    (site.disk(vm)).rename(site.top / "disk")
    assert "disk.0 of VM 0 is not on" in collect()[0][2]
    (site.top / "disk").rename(site.disk(vm))
    # oned is at work on the VM: nobody says where it is.
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = RUNNING, 9
    assert not [item for item in find()[0] if item.kind == "stray"]
    # One directory under two names is no stray.
    shutil.rmtree(site.location / f"103/{vm}")
    (site.location / "103").rmdir()
    (site.location / "103").symlink_to(site.system)
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = UNDEPLOYED, 0
    assert [text for kind, _, text in collect() if kind == "stray"] == [
        f"it is the directory of {HERE}: the system datastore is shared, which none of ours may be"
    ]
    assert site.disk(vm).exists()


def test_stray_that_is_newer_than_what_is_where_oned_has_the_vm_is_kept(site: ActionSite) -> None:
    """The move that was to bring it there never came, and oned was told that it had succeeded."""
    vm = doubled(site)
    noted = site.location / f"103/{vm}/.semishared/vm.json"
    noted.write_text('{"version": 1, "seq": 99}')
    assert [text for kind, _, text in collect() if kind == "stray"][0].startswith(
        "it is of SEQ 99 of the VM's history"
    )
    assert (site.location / f"103/{vm}/disk.0").exists()


def test_oned_is_asked_again_before_a_stray_goes(site: ActionSite) -> None:
    vm = doubled(site)
    found, survey = find()
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = RUNNING, 9
    assert [text for text in command.remove(found, Config(), survey) if text] == ["oned is at work on the VM"]
    assert (site.location / f"103/{vm}").exists()


def test_link_that_a_killed_action_left_staged_is_no_reason_to_refuse_the_next(site: ActionSite) -> None:
    image = site.image(persistent=True)
    vm = site.vm(image)
    link = site.store / ".semishared" / site.source(image).name / "image"
    (site.disk(vm).parent / ".semishared").mkdir(parents=True)
    staged = Path(files.staged_name(str(site.disk(vm))))
    staged.symlink_to(link)
    staged.with_name(".staged-disk.0.0123456789ab").symlink_to(site.source(image))
    assert site.make("ln", vm).exists()
