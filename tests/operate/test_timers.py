# SPDX-License-Identifier: Apache-2.0
"""The timers of install.sh under systemd itself, in a cloud: started by hand and by their time, as their
user, with their class and limit; what fails is seen, and what is uninstalled is gone.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from typing import Callable, Iterator, List

import pytest

from configurations import oned_conf, vmm_execrc
from lab.cloud import DATASTORES, RECORDS, SYSTEM, Cloud
from lab.systemd import Systemd
from operate.test_attention import trail
from semishared.install import timer
from staging.world import flip

INSTALL = "/opt/semishared/install.sh"
PATIENCE_S = 240
IDLE = "3"
"""The idle class of I/O (ioprio_set(2))."""
DAY = 86400
FOR_SYSTEMD = re.compile(r"as root: (systemctl (?!restart opennebula).*)")
SHOWN = ("User", "Type", "LoadState", "TimeoutStartUSec", "Nice", "IOSchedulingClass")


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """One of its own: the drivers go with the timers."""
    with Cloud.up(hosts=1) as up:
        etc = up.lab.fe.path("/etc/one")
        (etc / "vmm_exec").mkdir(parents=True)
        (etc / "oned.conf").write_text(oned_conf())
        (etc / "vmm_exec/vmm_execrc").write_text(vmm_execrc())
        yield up


@pytest.fixture
def systemd(cloud: Cloud) -> Iterator[Systemd]:
    with Systemd(cloud.lab.fe) as up:
        yield up


def service(row: str) -> str:
    return f"{timer.named(row)}.service"


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {PATIENCE_S} s"
        time.sleep(0.5)


def carry_out(systemd: Systemd, said: str) -> List[str]:
    """Run what install.sh says is to be run for systemd."""
    lines = FOR_SYSTEMD.findall(said)
    for line in lines:
        systemd.run(*shlex.split(line))
    return lines


def plant(cloud: Cloud) -> str:
    """Damage a base that nothing has read for long, and leave what a killed action leaves; return that."""
    vm = cloud.deploy("timed", [{"IMAGE_ID": str(cloud.data_image("timed", b"timed" * 1024))}])
    cloud.terminate(vm)
    (base,) = cloud.lab.node("h1").path(f"{DATASTORES}/{RECORDS}/bases").glob("*")
    flip(base / "image", 5)
    left = f"{DATASTORES}/{SYSTEM}/{vm}"
    folder = cloud.lab.node("h1").path(left)
    folder.mkdir()
    cloud.give(folder)
    for path in (*base.rglob("*"), base, folder):
        os.utime(path, (time.time() - 40 * DAY,) * 2)
    return left


def check_settings(systemd: Systemd) -> None:
    """See what systemd has understood of each unit."""
    for name, row in timer.ROWS.items():
        lines = systemd.systemctl("show", service(name), "-p", ",".join(SHOWN)).splitlines()
        said = dict(line.split("=", 1) for line in lines)
        hours, minutes = divmod(row.budget_s // 60, 60)
        limit = f"{hours}h" * bool(hours) + f"{minutes}min" * bool(minutes)
        assert [said[word] for word in SHOWN] == ["oneadmin", "oneshot", "loaded", limit, "19", IDLE], name
        mine = f"{timer.named(name)}.timer"
        assert systemd.systemctl("is-enabled", mine) == "enabled"
        assert systemd.systemctl("is-active", mine) == "active"
        assert systemd.shown(mine, "RandomizedDelayUSec") not in ("", "0")


def check_limit(cloud: Cloud, systemd: Systemd) -> None:
    """Have oned take questions and not answer: a run is ended by its limit, here by a shorter one."""
    systemd.edit(service("verify"), "[Service]\nTimeoutStartSec=10s\n")
    assert systemd.shown(service("verify"), "TimeoutStartUSec") == "10s"
    with cloud.oned.data:
        systemd.systemctl("start", "--no-block", service("verify"))
        until(lambda: systemd.shown(service("verify"), "MainPID") != "0", "process")
        process = systemd.shown(service("verify"), "MainPID")
        assert systemd.run("ps", "-o", "user=,ni=", "-p", process).split() == ["oneadmin", "19"]
        assert systemd.run("ionice", "-p", process) == "idle"
        until(lambda: systemd.shown(service("verify"), "ActiveState") == "failed", "end")
    assert systemd.shown(service("verify"), "Result") == "timeout"
    assert systemd.units("--failed") == [service("verify")]


@pytest.mark.fault(81, "timers run under systemd as their user and within their limit, and leave no trace")
def test_timers_run_under_systemd_fail_in_sight_and_go(cloud: Cloud, systemd: Systemd) -> None:
    left = plant(cloud)
    assert len(carry_out(systemd, systemd.run(INSTALL, "--timers"))) == 2
    check_settings(systemd)
    for name in ("detach", "stage", "gc"):
        systemd.systemctl("start", service(name))
    assert not cloud.lab.node("h1").path(left).exists(), systemd.journal("-u", service("gc"))
    assert [row["result"] for row in trail(cloud) if row["what"].endswith(f"{left} on h1")] == ["ok"]

    assert '"did": "gc removal"' in systemd.journal("-t", "semishared", "--since", "today")

    # A damaged base is mended, and the run is one that failed: a monitoring of units sees it.
    systemd.systemctl("start", service("verify"), check=False)
    assert systemd.units("--failed") == [service("verify")]
    said = systemd.journal("-u", service("verify"))
    assert "DAMAGED (extent 0), taken out of use, fetched anew" in said, said
    systemd.systemctl("start", service("verify"))
    assert systemd.units("--failed") == [], "what is mended is no failure the next time"

    # By its time, a minute after it was enabled.
    until(lambda: systemd.shown(service("metrics"), "ExecMainExitTimestampMonotonic") != "0", "metrics")
    assert systemd.shown(service("metrics"), "Result") == "success", systemd.journal("-u", service("metrics"))
    written = f"{timer.METRICS}/semishared.prom"
    owners = systemd.run("stat", "-c", "%U %a", timer.METRICS, written).split()
    assert owners[:3] == ["oneadmin", "755", "oneadmin"]
    assert "semishared_build_info{" in cloud.lab.fe.path(written).read_text()
    check_limit(cloud, systemd)

    said = systemd.run(INSTALL, "--uninstall", "--yes")
    assert len(carry_out(systemd, said)) == 3, said
    assert systemd.units("--all") == [], "systemd knows none of them any more"
    for path in timer.PATHS:
        assert not os.path.lexists(cloud.lab.fe.path(path)), path
