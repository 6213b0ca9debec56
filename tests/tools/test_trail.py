# SPDX-License-Identifier: Apache-2.0
"""What verbs and oned's actions leave in the trail, with real images and disks; its rotation by logrotate."""

from __future__ import annotations

import grp
import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

from semishared.cli import main
from semishared.front import trail
from semishared.front.action import Action, Sessions
from semishared.install import rotation
from semishared.opennebula.report import Report
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite
from tools.test_commit_command import written
from tools.test_gc_clouds import done


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActionSite]:
    with ActionSite.operated(tmp_path / "one", monkeypatch) as up:
        (up.top / "var").mkdir()
        monkeypatch.setenv("ONE_LOCATION", str(up.top))
        up.oned.runner.extra["ONE_LOCATION"] = str(up.top)  # type: ignore[attr-defined]
        yield up


def rows(site: ActionSite) -> List[Dict[str, Any]]:
    log = site.top / "var/semishared.log"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.fault(78, "a commit and what gc removes leave their lines in the trail, with its user")
def test_a_commit_and_a_removal_are_in_the_trail(site: ActionSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    vm, _ = written(site)
    assert not rows(site)
    assert main.main(["commit", str(vm)]) == 0
    made, verb = rows(site)
    assert (made["did"], made["who"].partition("@")[0]) == ("commit disk", "alice")
    assert made["what"].startswith(f"VM {vm} disk 0 on ") and made["what"].endswith(" bytes")
    assert (verb["did"], verb["what"], verb["result"]) == ("commit", str(vm), "ok")
    done(site, vm)
    assert main.main(["gc", "--now", "--dry-run"]) == 1 and len(rows(site)) == 2
    assert main.main(["gc", "--now"]) == 0
    *_, gone, verb = rows(site)
    assert (gone["did"], gone["result"]) == ("gc removal", "ok")
    assert gone["what"] == f"vm {site.system}/{vm} on {os.uname().nodename}"
    assert (verb["did"], verb["what"]) == ("gc", "--now")


@pytest.mark.fault(78, "a commit that oned asks for is in the trail, by the host's answer")
def test_a_commit_of_oneds_is_in_the_trail(site: ActionSite) -> None:
    vm, source = written(site)
    image = site.oned.image(int(site.oned.vm(vm).disks[0]["IMAGE_ID"]))
    site.tm("mvds", f"{HERE}:{site.disk(vm)}", image.source, vm, STORE)
    (row,) = rows(site)
    assert (row["did"], row["who"].partition("@")[0]) == ("commit disk", "oned")
    assert source.read_bytes()[3 << 20 : (3 << 20) + 1] == b"\x55"


@pytest.mark.fault(
    78, "the trail fails no action and no verb: neither its directory, nor room, need be there"
)
def test_an_action_without_a_log_is_the_same(site: ActionSite) -> None:
    (site.top / "var").rmdir()
    vm, _ = written(site)
    assert main.main(["commit", str(vm)]) == 0
    site.tm("delete", f"{HERE}:{site.disk(vm).parent}", vm, SYSTEM)
    assert not site.disk(vm).exists()


@pytest.mark.fault(78, "what a host evicts by its own decision in an action of oned's is in the trail")
def test_what_a_host_has_evicted_by_itself_is_in_the_trail(site: ActionSite) -> None:
    gone = f"100-7-{'a' * 32}"
    done = Action("test", [], Report("test"))
    with Sessions(done) as sessions:
        sessions.begin("localhost")
        sessions._open["localhost", False].evicted = [gone]
    (row,) = rows(site)
    assert (row["did"], row["what"], row["result"]) == ("evict", f"base {gone} on localhost, by itself", "ok")
    assert row["who"].partition("@")[0] == "oned"


def test_a_refused_verb_is_in_the_trail_with_its_error(site: ActionSite) -> None:
    assert main.main(["gc", "--older-than", "soon"]) == 2
    (row,) = rows(site)
    assert row["result"] == "SS001" and row["what"] == "--older-than soon"


@pytest.mark.skipif(not os.path.exists("/usr/sbin/logrotate"), reason="logrotate is not installed")
def test_logrotate_takes_the_file_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwuid(os.getuid()).pw_name
    monkeypatch.setenv("ONE_LOCATION", str(tmp_path))
    (tmp_path / "var").mkdir()
    log = tmp_path / "var/semishared.log"
    conf = tmp_path / "conf"
    conf.write_text(rotation.text(str(log), user, grp.getgrgid(os.getgid()).gr_name))
    conf.chmod(0o644)
    trail.note("gc", "before")
    argv = ["/usr/sbin/logrotate", "--state", str(tmp_path / "state"), str(conf)]
    said = subprocess.run([*argv, "--force", "--verbose"], capture_output=True, text=True, check=True)
    assert "error" not in said.stderr, said.stderr
    trail.note("gc", "after")
    (old,) = [path for path in log.parent.iterdir() if path != log]
    assert "before" in old.read_text() and [json.loads(line)["what"] for line in log.open()] == ["after"]
    assert log.stat().st_mode & 0o777 == 0o640
