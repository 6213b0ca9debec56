# SPDX-License-Identifier: Apache-2.0
"""`semishared publish`, with the executables of this checkout and a simulated oned: what Sunstone shows after
each action, that nothing of a user's is lost, what it costs, and what remains when it is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from lab.oned import template
from lab.oned.objects import History, Host
from semishared.cli import main
from semishared.front import publication, vm_notes
from semishared.model.disk import names as disk_names
from semishared.model.disk.place import VOLATILE
from semishared.model.disk.record import Record
from tools.oned_site import HERE, ROOT, SYSTEM, ActionSite

ACTIVE, DONE, POWEROFF, UNDEPLOYED = 3, 6, 8, 9
RUNNING, PROLOG, PROLOG_FAILURE = 3, 1, 39
"""LCM states."""
MANY = 1000
PROGRAM = """
import os, sys
os.geteuid = lambda: 9869
from semishared.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch) as up:
        yield up


def settled(site: ActionSite, *images: int, how: str = "clone", state: int = POWEROFF) -> int:
    """Make a VM whose disks the driver has made; its state is what oned has after that."""
    vm = site.vm(*images)
    held = site.oned.vm(vm)
    held.history.append(History(vm, 0, Host(0, HERE, "kvm"), "semishared", SYSTEM))
    held.state, held.lcm = ACTIVE, PROLOG
    for number in range(len(images)):
        site.make(how, vm, number)
    held.state, held.lcm = state, RUNNING
    return vm


def notes(site: ActionSite) -> Dict[str, float]:
    """Return the files of the publisher and when each is due."""
    folder = site.top / "semishared_vms"
    paths = folder.iterdir() if folder.exists() else ()
    return {path.name: path.stat().st_mtime for path in paths if path.name != "lock"}


def requests(site: ActionSite, method: str = "") -> List[Any]:
    assert site.oned.rpc
    return [given for name, given in site.oned.rpc.requests if method in name]


def shown(site: ActionSite, vm: int) -> Any:
    return site.oned.vm(vm).user_template.get("SEMISHARED")


def state_of(site: ActionSite, image: int) -> Any:
    return site.oned.image(image).template.get("SEMISHARED_STATE")


def publish(*words: str, code: int = 0) -> None:
    assert main.main(["publish", *words]) == code


def write(site: ActionSite, vm: int) -> None:
    """Write to the disk of a VM as its guest does."""
    words = ["qemu-io", "-f", "qcow2", "-c", "write 3M 64k", str(site.disk(vm))]
    subprocess.run(words, check=True, capture_output=True)


def grow_older(site: ActionSite, seconds: float) -> None:
    """Let so much time go by for all notes."""
    for name, due in notes(site).items():
        if due:
            os.utime(site.top / "semishared_vms" / name, (due - seconds, due - seconds))


def test_what_waits_for_too_long_is_late(site: ActionSite) -> None:
    vm = settled(site, site.image())
    grow_older(site, vm_notes.LATE_S - 60)
    assert vm_notes.late() == [] and vm_notes.due(time.time()) == [vm]
    grow_older(site, 120)
    (late,) = vm_notes.late()
    assert vm_notes.LATE_S < late < vm_notes.LATE_S + 600
    publish("--due")
    assert vm_notes.late() == [] and vm_notes.due(time.time()) == []


@pytest.mark.fault(64, "where each disk is, and what is not committed of it, is to be seen in Sunstone")
def test_what_the_drivers_have_made_is_shown(site: ActionSite) -> None:
    overlay, beside = site.image("cow"), site.image("beside", SEMISHARED_PLACE="shared")
    vm = settled(site, overlay, beside)
    publish("--due")
    assert shown(site, vm) == {
        "DISK0": f"overlay on {HERE}, base image {overlay}",
        "DISK1": f"clone on store 100, of image {beside}",
        "DETACHED": "no: disk 1 on store 100",
        "UNCOMMITTED": "no",
    }
    mine = site.image("mine", persistent=True)
    other = settled(site, mine, how="ln")
    publish("--due")
    assert shown(site, other)["DISK0"] == "in place on store 100"
    assert state_of(site, mine) is None and notes(site) == {}


def test_when_nothing_has_changed_oned_is_not_asked(site: ActionSite) -> None:
    vm = settled(site, site.image())
    publish("--due")
    before = len(requests(site))
    publish("--due")
    assert len(requests(site)) == before
    publish(str(vm))
    assert len(requests(site, "update")) == 1 and not requests(site, "one.vm.info")[1:]


@pytest.mark.fault(64, "where each disk is, and what is not committed of it, is to be seen in Sunstone")
def test_what_is_not_committed_is_shown_until_it_is(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm = settled(site, image, how="ln", state=UNDEPLOYED)
    publish("--due")
    assert shown(site, vm)["UNCOMMITTED"] == "no" and "all committed" in state_of(site, image)
    write(site, vm)
    before = len(requests(site))
    publish("--due")
    assert len(requests(site)) == before, "a guest writes all the time: it is looked at now and then"
    grow_older(site, vm_notes.LATER_S + 1)
    publish("--due")
    assert " since 20" in shown(site, vm)["UNCOMMITTED"]
    assert f"on {HERE}, disk 0 of VM {vm}: " in state_of(site, image)
    assert " not committed since 20" in state_of(site, image)
    assert main.main(["commit", str(vm)]) == 0
    assert shown(site, vm)["UNCOMMITTED"] == "no" and "all committed" in state_of(site, image)
    capsys.readouterr()


def test_what_a_vm_leaves_uncommitted_is_shown_of_its_image_until_it_is_discarded(site: ActionSite) -> None:
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm = settled(site, image, how="ln")
    write(site, vm)
    publish()
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    site.oned.vm(vm).state = DONE
    publish("--due")
    assert state_of(site, image).startswith(f"on {HERE}, kept of disk 0 of VM {vm}: ")
    publish()
    assert "kept of disk" in state_of(site, image)
    (kept,) = site.system.glob(".kept-*")
    assert main.main(["gc", "--discard", kept.name, "--yes"]) in (0, 1)
    assert not kept.exists()
    grow_older(site, vm_notes.LATER_S + 1)
    publish("--due")
    assert state_of(site, image) is None and notes(site) == {}


def test_a_host_says_nothing_of_images_that_are_not_its_vms(site: ActionSite) -> None:
    mine, other = (site.image(name, persistent=True, SEMISHARED_PLACE="local") for name in ("mine", "other"))
    vm = settled(site, mine, how="ln")
    write(site, vm)
    publish("--due")
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    site.oned.vm(vm).state = DONE
    (kept,) = site.system.glob(".kept-*")
    record = kept / ".semishared/disk.0.json"
    said = json.loads(record.read_text())
    record.write_text(json.dumps({**said, "image": {**said["image"], "id": other}}))
    publish("--due")
    assert state_of(site, other) is None and state_of(site, mine) is None


def test_a_vm_on_no_host_has_nothing_to_be_said(site: ActionSite) -> None:
    vm = site.vm(site.image())
    vm_notes.leave(vm)
    publish("--due")
    assert shown(site, vm) is None and notes(site) == {}


def test_a_disk_that_is_detached_is_shown_as_that(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image(SEMISHARED_LOCAL="remote-first")
    vm = settled(site, image)
    publish("--due")
    assert shown(site, vm)["DISK0"] == f"remote-first on {HERE}, reads image {image} on store 100"
    assert shown(site, vm)["DETACHED"] == "no: disk 0 on store 100"
    site.oned.host_create(HERE)
    assert main.main(["detach", str(vm)]) == 0, capsys.readouterr()
    assert shown(site, vm)["DISK0"] == f"overlay on {HERE}, base image {image}"
    assert shown(site, vm)["DETACHED"] == "yes"


def test_the_last_error_is_shown_until_an_action_succeeds(site: ActionSite) -> None:
    image = site.image()
    vm = settled(site, image)
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = ACTIVE, PROLOG_FAILURE
    source, disk = site.source(image), f"{HERE}:{site.disk(vm)}"
    site.tm("delete", disk, vm, 100)
    aside = source.with_name("aside")
    source.rename(aside)
    with pytest.raises(Exception, match="SS"):
        site.make("clone", vm)
    publish("--due")
    error = shown(site, vm)["LAST_ERROR"]
    assert error[:2] == "20" and " UTC clone: SS" in error and len(error) <= 85
    assert shown(site, vm)["DISK0"] == f"not on {HERE}"
    aside.rename(source)
    site.make("clone", vm)
    site.oned.vm(vm).state, site.oned.vm(vm).lcm = ACTIVE, RUNNING
    publish("--due")
    assert shown(site, vm)["DISK0"].startswith("overlay") and "LAST_ERROR" not in shown(site, vm)


def test_an_error_stays_when_the_vm_is_only_looked_at_again(site: ActionSite) -> None:
    vm = settled(site, site.image(persistent=True, SEMISHARED_PLACE="local"), how="ln")
    vm_notes.leave(vm, "commit: SS042 the image was written to")
    for _ in range(2):
        publish("--due")
        assert "commit: SS042" in shown(site, vm)["LAST_ERROR"]
        grow_older(site, vm_notes.LATER_S + 1)
    publish(str(vm))
    assert "commit: SS042" in shown(site, vm)["LAST_ERROR"]


# -- users ------------------------------------------------------------------------------------------


def before_update(site: ActionSite, work: Callable[[], None]) -> None:
    """Do `work` once, between what the publisher has read and what it writes."""
    assert site.oned.rpc
    rpc, reply, todo = site.oned.rpc, site.oned.rpc._reply, [work]

    def late(method: str, parameters: Any) -> List[Any]:
        if method == "one.vm.update" and todo:
            todo.pop()()
        return reply(method, parameters)

    rpc._reply = late  # type: ignore[method-assign]


@pytest.mark.parametrize("append", [False, True])
def test_what_a_user_saves_meanwhile_is_not_lost(site: ActionSite, append: bool) -> None:
    image = site.image()
    vm = settled(site, image)
    site.oned.vm_update(vm, 'NOTE = "mine" OLD = "goes" SCHED = [ A = "1" ] SCHED = [ A = "2" ]')
    publish("--due")
    right = shown(site, vm)
    form: Dict[str, Any] = {"NOTE": "mine, edited", "NEW": "x", "SEMISHARED": {"DISK0": "an old one"}}
    if append:
        del form["SEMISHARED"]
    site.oned.vm_update(vm, {"SEMISHARED": {"DISK0": "somebody's"}})
    before_update(site, lambda: site.oned.vm_update(vm, form, append))
    publish(str(vm))
    others = {"OLD": "goes", "SCHED": [{"A": "1"}, {"A": "2"}]} if append else {}
    assert site.oned.vm(vm).user_template == {**form, **others, "SEMISHARED": right}


def test_a_form_that_was_opened_before_is_mended(site: ActionSite) -> None:
    vm = settled(site, site.image())
    publish("--due")
    right = shown(site, vm)
    site.oned.vm_update(vm, {"NOTE": "mine", "SEMISHARED": [{"DISK0": "old"}, {"X": "y"}]}, append=False)
    publish()
    assert site.oned.vm(vm).user_template == {"NOTE": "mine", "SEMISHARED": right}


def test_the_simulated_oned_merges_as_oned_does() -> None:
    """Template::merge: each name of the update goes first, a vector without fields does not come back."""
    held = template.parse('A = "1" B = [ X = "1", Y = "2" ] C = "3" D = [ X = "1" ] D = [ X = "2" ]')
    template.merge(held, template.parse('B = [ X = "5" ] C = [ ] D = [ X = "9" ] E = "new"'))
    assert held == {"A": "1", "B": {"X": "5"}, "D": {"X": "9"}, "E": "new"}


# -- notes, hosts, oned -----------------------------------------------------------------------------


def test_what_happens_meanwhile_has_a_note_of_its_own(site: ActionSite) -> None:
    vm = settled(site, site.image())
    before_update(site, lambda: vm_notes.leave(vm))
    publish("--due")
    assert list(notes(site)) == [f"{vm}.changed"]
    publish("--due")
    assert notes(site) == {}


def test_a_vm_that_oned_is_at_work_on_waits_and_holds_up_no_other(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image()
    busy, other = settled(site, image), settled(site, image)
    site.oned.vm(busy).state, site.oned.vm(busy).lcm = ACTIVE, PROLOG
    publish("--due")
    assert f"VM {busy}: put off: OpenNebula is at work on it" in capsys.readouterr().out
    assert shown(site, busy) is None and shown(site, other)
    assert list(notes(site)) == [f"{busy}.taken"]
    site.oned.vm(busy).lcm = RUNNING
    publish("--due")
    assert shown(site, busy) is None
    grow_older(site, vm_notes.BUSY_S + 1)
    publish("--due")
    assert shown(site, busy) and notes(site) == {}


def test_a_host_that_does_not_answer_is_said_and_asked_again_later(
    site: ActionSite, capsys: pytest.CaptureFixture[str]
) -> None:
    image = site.image()
    vm, other = settled(site, image), settled(site, image)
    site.oned.vm(vm).last.host = Host(9, "nowhere.invalid", "kvm")
    publish("--due", code=1)
    assert f"VM {vm}: SS010" in capsys.readouterr().err
    assert shown(site, vm)["DISK0"].startswith("on nowhere.invalid, not seen: SS010")
    assert shown(site, other)["DISK0"].startswith("overlay")
    before = len(requests(site))
    publish("--due")
    assert len(requests(site)) == before
    site.oned.vm(vm).last.host = Host(0, HERE, "kvm")
    grow_older(site, vm_notes.LATER_S + 1)
    publish("--due")
    assert shown(site, vm)["DISK0"].startswith("overlay") and notes(site) == {}


def test_a_vm_that_ends_leaves_no_note_and_no_line(site: ActionSite) -> None:
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm, plain = settled(site, image, how="ln"), settled(site, site.image("cow"))
    publish("--due")
    assert state_of(site, image) and list(notes(site)) == [f"{vm}.known"]
    for number in (vm, plain):
        site.tm("delete", f"{HERE}:{site.disk(number).parent}", number, SYSTEM)
        site.oned.vm(number).state = DONE
    assert sorted(notes(site)) == [f"{vm}.changed", f"{vm}.known"]
    publish("--due")
    assert state_of(site, image) is None and notes(site) == {}


def test_lines_of_images_that_no_vm_accounts_for_go(site: ActionSite) -> None:
    image, other = site.image("clone"), site.image("held", persistent=True)
    settled(site, other, how="ln")
    for number in (image, other):
        site.oned.image_update(number, {"SEMISHARED_STATE": "of the image that this one is a clone of"})
    publish()
    assert state_of(site, image) is None and state_of(site, other) is None


def test_an_action_that_cannot_note_ends_all_the_same(site: ActionSite) -> None:
    (site.top / "semishared_vms").write_text("no directory")
    vm = settled(site, site.image())
    assert site.disk(vm).exists()


def test_a_clock_that_was_set_back_keeps_nothing_from_being_due(site: ActionSite) -> None:
    vm = settled(site, site.image())
    path = site.top / "semishared_vms" / f"{vm}.changed"
    for ahead, due in ((vm_notes.LATER_S, []), (10 * vm_notes.LATER_S, [vm])):
        os.utime(path, (time.time() + ahead,) * 2)
        assert vm_notes.due(time.time()) == due


def test_the_timer_is_not_held_up_by_another_publisher(
    site: ActionSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = settled(site, site.image())
    monkeypatch.setattr(publication, "WAIT_S", 0.0)
    from semishared.tools import locks

    with locks.exclusive(vm_notes.lock()):
        publish("--due")
        publish(str(vm), code=2)
    assert shown(site, vm) is None
    publish("--due")
    assert shown(site, vm)


def test_json_says_what_was_written(site: ActionSite, capsys: pytest.CaptureFixture[str]) -> None:
    vm = settled(site, site.image())
    capsys.readouterr()
    publish(str(vm), "--json")
    (row,) = json.loads(capsys.readouterr().out)["vms"]
    assert (row["vm"], row["how"], row["fields"]) == (vm, "published", shown(site, vm))
    publish("--due", "--json")
    nothing = {"schema": 1, "dry_run": False, "vms": [], "images": {}, "errors": []}
    assert json.loads(capsys.readouterr().out) == nothing


# -- kills and scale --------------------------------------------------------------------------------


def test_it_may_be_killed_anywhere(site: ActionSite, tmp_path: Path) -> None:
    image = site.image(persistent=True, SEMISHARED_PLACE="local")
    vm = settled(site, image, how="ln")
    write(site, vm)
    trace, folder = tmp_path / "trace", site.top / "semishared_vms"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "lib"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(**more: str) -> int:
        words = [sys.executable, "-c", PROGRAM, "publish", "--due"]
        return subprocess.run(words, env={**env, **more}, capture_output=True, check=False).returncode

    def begin() -> None:
        for path in (*folder.iterdir(), *(site.top / "semishared_datastores").glob("*")):
            path.unlink()
        site.oned.vm_update(vm, "SEMISHARED = [ ]")
        site.oned.image_update(image, "SEMISHARED_STATE = [ ]")
        vm_notes.leave(vm)

    begin()
    assert run(SEMISHARED_TRACE=str(trace)) == 0
    points = trace.read_text().splitlines()
    assert len(points) >= 6, points
    fields, line, left = shown(site, vm), state_of(site, image), sorted(notes(site))
    assert "since" in fields["UNCOMMITTED"] and "since" in line and left == [f"{vm}.known"]
    for number in range(1, len(points) + 1):
        begin()
        assert run(SEMISHARED_KILL_AT=str(number)) == -9, points[number - 1]
        # What was taken is due as it was; what was remembered comes with it.
        assert run() == 0, points[number - 1]
        now = shown(site, vm), state_of(site, image), sorted(notes(site))
        assert [now[0].keys(), now[2]] == [fields.keys(), left], points[number - 1]
        assert now[0]["DISK0"] == fields["DISK0"] and now[1].startswith(line.partition(" since")[0])

    # One that ends before the next run leaves no line on its image either.
    begin()
    lines = [number for number, name in enumerate(points, 1) if name.endswith("published an image")]
    assert run(SEMISHARED_KILL_AT=str(lines[0])) == -9 and state_of(site, image)
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    (kept,) = site.system.glob(".kept-*")
    shutil.rmtree(kept)
    site.oned.vm(vm).state = DONE
    assert run() == 0 and state_of(site, image) is None and notes(site) == {}


def test_1000_vms_cost_a_bounded_number_of_questions(site: ActionSite) -> None:
    """As it is known which VMs have changed, none of the others is asked of."""
    image = site.image()
    vms = [site.vm(image) for _ in range(MANY)]
    for vm in vms:
        held = site.oned.vm(vm)
        held.history.append(History(vm, 0, Host(0, HERE, "kvm"), "semishared", SYSTEM))
        held.state, held.lcm = POWEROFF, 0
        record = Path(disk_names.record(str(site.disk(vm).parent), 0))
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps(Record(0, VOLATILE, "raw", str(site.disk(vm))).to_data()))
        vm_notes.leave(vm)

    def asked() -> Dict[str, int]:
        assert site.oned.rpc
        names = [name for name, _ in site.oned.rpc.requests if not name.endswith("update")]
        site.oned.rpc.requests.clear()
        return {name: names.count(name) for name in names}

    asked()
    publish("--due")
    assert sum(shown(site, vm) is not None for vm in vms) == publication.IN_ONE
    assert asked() == {"one.user.info": 1, "one.datastorepool.info": 1, "one.vmpool.infoset": 1}
    publish()
    assert all(shown(site, vm)["DISK0"] == f"volatile on {HERE}" for vm in vms)
    found = asked()
    assert found.pop("one.vmpool.infoset") == MANY // publication.IN_ONE
    assert found == {
        "one.user.info": 1,
        "one.datastorepool.info": 1,
        "one.vmpool.info": 1,
        "one.imagepool.info": 1,
    }
    publish("--due")
    assert asked() == {}
