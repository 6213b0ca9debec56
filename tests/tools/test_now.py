# SPDX-License-Identifier: Apache-2.0
"""What Sunstone shows of a VM while its bytes are moved: NOW in its vector, and nothing of it afterwards."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Iterator

import pytest

from semishared.cli import main
from semishared.front import vm_notes
from semishared.front.now import Now
from semishared.model.job_steps import Job
from semishared.named import to_data
from tools.oned_site import ActionSite
from tools.test_gc_clouds import at_rest

SOON_S = 60
ONE = Job(7, "1", "clone", "fetch", 5, 0, "", "h2", "", 41 << 20, 100 << 20, 80 << 20, 1700000000, "oned")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch) as up:
        yield up


def vector(site: ActionSite, vm: int) -> dict[str, str]:
    found: Any = site.oned.vm(vm).user_template.get("SEMISHARED", {})
    assert isinstance(found, dict)
    return found


@pytest.mark.fault(75, "what an action moves is seen while it moves it, and not after")
def test_a_commit_is_seen_in_the_vector_and_goes_from_there(site: ActionSite) -> None:
    vm = site.vm(site.image(persistent=True, SEMISHARED_PLACE="local"))
    at_rest(site, vm)
    disk = site.make("ln", vm)
    words = ["qemu-io", "-f", "qcow2", "-c", "write -P 0x55 0 8M", str(disk)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    site.oned.vm_update(vm, {"SEMISHARED": {"DISK0": "as before"}, "NOTE": "mine"})
    codes: list[int] = []
    commit = threading.Thread(target=lambda: codes.append(main.main(["commit", str(vm), "--rate", "700K"])))
    commit.start()
    until, seen = time.monotonic() + SOON_S, dict[str, str]()
    while commit.is_alive() and time.monotonic() < until and "NOW" not in seen:
        seen = vector(site, vm)
        time.sleep(0.1)
    commit.join()
    assert codes == [0]
    assert re.fullmatch(r"committing disk 0: \d+ %, [\d.]+ [KM]?i?B/s to the store", seen["NOW"]), seen
    assert seen["DISK0"] == "as before", "what is there stays there"
    assert "NOW" not in vector(site, vm) and vector(site, vm)["DISK0"].startswith("diff on ")
    assert site.oned.vm(vm).user_template["NOTE"] == "mine"


def test_what_a_killed_action_has_left_goes_with_the_next_publish(site: ActionSite) -> None:
    vm = site.vm(site.image())
    at_rest(site, vm)
    site.make("clone", vm)
    assert main.main(["publish", str(vm)]) == 0
    now = Now(vm)
    now.heard(to_data(ONE))
    assert now._thread
    now._thread.join()
    assert vector(site, vm)["NOW"] == "copying disk 0: 41 %, 80.0 MiB/s from h2"
    now.heard(to_data(ONE._replace(done=99 << 20)))
    assert "41 %" in vector(site, vm)["NOW"], "not every few seconds"
    assert vm in vm_notes.due(time.time() + 1)
    assert main.main(["publish", "--due"]) == 0
    assert "NOW" not in vector(site, vm)


def test_what_no_machine_of_ours_says_is_not_written(site: ActionSite) -> None:
    vm = site.vm(site.image())
    now = Now(vm)
    lies: list[Any] = [None, [], {}, "x", {**to_data(ONE), "done": -1}]
    for said in lies:
        now.heard(said)
    now.end()
    assert vector(site, vm) == {}
    now.heard({**to_data(ONE), "source": 'h2" ] ERROR = [ "x\n'})
    now.end()
    assert vector(site, vm) == {} and "ERROR" not in site.oned.vm(vm).user_template


def test_an_oned_that_is_gone_holds_no_action_up(site: ActionSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_XMLRPC", "http://127.0.0.1:9/RPC2")
    now = Now(5)
    began = time.monotonic()
    now.heard(to_data(ONE))
    now.end()
    assert time.monotonic() - began < 10
