# SPDX-License-Identifier: Apache-2.0
"""The units of memory under systemd itself: enabled, at boot, killed, stopped in the order in which a host
goes down, disabled.
"""

from __future__ import annotations

import time
from typing import Callable

import pytest

from lab.kernel_host import KernelHost
from nfs.test_memory import INSTALL, MEMORY, ROOT, MemoryHost
from semishared.model.device import steps as device_steps

MEMORY_UNIT, WATCH, LIBVIRT = "semishared-ram.service", "semishared-ram-watch.service", "libvirtd.service"
LONG_S = 300
GUEST = f"exec 9>{MEMORY}/open; trap 'sleep 3; exit 0' TERM; while :; do sleep 0.2; done"
"""What takes its time to end, and has a file open until then."""


class Machine(MemoryHost):
    """A host on which systemd runs, with libvirt to be started at boot."""

    def __init__(self) -> None:
        KernelHost.__init__(
            self, "ram", memory_mib=1400, disks={"local": 400}, kernel_arguments="kh_systemd=1"
        )
        self._side = None

    def systemctl(self, *words: str, check: bool = True) -> str:
        done = self.run(["systemctl", "--no-pager", *words], timeout=LONG_S, check=False)
        assert not (check and done.code), f"systemctl {words}: {done.err}{self.journal()}"
        return (done.out + done.err).strip()

    def shown(self, unit: str, what: str) -> str:
        return self.systemctl("show", "--value", "-p", what, unit)

    def at(self, unit: str, what: str) -> int:
        """Return when a unit was last what is said, in microseconds since the boot (systemd's D-Bus
        interface).
        """
        return int(self.shown(unit, f"{what}TimestampMonotonic"))

    def enable(self, *words: str) -> None:
        self.run(["sh", f"{INSTALL}/semishared-ram.sh", "enable", *words], timeout=LONG_S)

    def journal(self) -> str:
        return self.run(["journalctl", "-q", "--no-pager", "-n", "40"], timeout=LONG_S).out

    def is_mounted(self) -> bool:
        return self.run(["mountpoint", "-q", MEMORY], check=False).code == 0


def until(is_so: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {seconds} s"
        time.sleep(0.5)


def look_at(host: Machine, script: str) -> None:
    """Have something open for a while, as of now."""
    host.start_program(["bash", "-c", script]).wait_for("open")


def check_boot(host: Machine) -> None:
    """Let all that is enabled end and begin again, in the order of a host that goes down and boots."""
    host.systemctl("enable", LIBVIRT)
    host.systemctl("start", LIBVIRT)
    # What is active already is in no cycle: so the whole order of a boot, too.
    boot = host.run(
        ["systemd-analyze", "--man=no", "verify", "multi-user.target"], timeout=LONG_S, check=False
    )
    assert "cycle" not in boot.err and "semishared" not in boot.err, boot.err
    host.systemctl("isolate", "rescue.target")
    # It waits for the target alone, which comes up while the others go down.
    until(lambda: host.shown(MEMORY_UNIT, "ActiveState") in ("inactive", "failed"), "end of memory")
    assert not host.is_mounted() and host.shown(MEMORY_UNIT, "Result") == "success", host.journal()
    assert host.at(LIBVIRT, "InactiveEnter") <= host.at(MEMORY_UNIT, "ActiveExit"), (
        "who runs guests ends before"
    )
    host.systemctl("isolate", "multi-user.target")
    until(
        lambda: host.systemctl("is-active", MEMORY_UNIT, WATCH, LIBVIRT, check=False).split()
        == ["active"] * 3,
        "boot",
    )
    assert host.at(MEMORY_UNIT, "ActiveEnter") <= host.at(LIBVIRT, "InactiveExit"), "and begins after"
    assert host.at(LIBVIRT, "ActiveEnter") <= host.at(WATCH, "InactiveExit")


def check_watcher(host: Machine) -> None:
    """Kill who looks after memory: it is there again, and no second one."""
    until(lambda: host.row()["watched"] is True, "watcher")
    was, again = host.shown(WATCH, "MainPID"), int(host.shown(WATCH, "NRestarts"))
    host.systemctl("kill", "-s", "KILL", WATCH)
    until(
        lambda: int(host.shown(WATCH, "NRestarts")) > again and host.shown(WATCH, "SubState") == "running",
        "start of it",
    )
    until(lambda: host.row()["watched"] is True, "watcher")
    assert host.shown(WATCH, "MainPID") not in (was, "0")
    time.sleep(5)
    assert int(host.shown(WATCH, "NRestarts")) == again + 1, "it stays"


@pytest.mark.long
def test_systemd_makes_memory_at_boot_and_takes_it_away_after_its_guests() -> None:
    with Machine() as host:
        host.wait_up()
        host.systemctl("is-system-running", "--wait", check=False)
        host.prepare()
        host.enable("320M", "zram", "2")
        assert host.systemctl("is-enabled", MEMORY_UNIT, WATCH).split() == ["enabled"] * 2
        assert host.run(["findmnt", "-n", "-o", "SOURCE,FSTYPE", MEMORY]).out.split() == [
            "/dev/mapper/semishared-ram",
            "xfs",
        ]
        host.on(device_steps.SetDevices(ROOT, (f"{MEMORY}=ram:2",)))
        uuid = host.row()["uuid"]
        check_boot(host)
        assert (host.row()["uuid"], host.row()["state"]) == (uuid, ""), "its label is the one of before"
        check_watcher(host)

        # As systemd does when the host goes down: guests are scopes of that slice, and end when they like.
        guest = host.start_program(
            ["systemd-run", "-q", "--scope", "--slice=machine.slice", "--unit=guest", "bash", "-c", GUEST]
        )
        until(lambda: host.run(["test", "-e", f"{MEMORY}/open"], check=False).code == 0, "guest")
        # systemctl does not tell of an ExecStop that fails.
        host.systemctl("stop", MEMORY_UNIT)
        assert host.is_mounted() and host.shown(MEMORY_UNIT, "Result") == "exit-code", (
            "a guest has a disk open there"
        )
        host.systemctl("start", MEMORY_UNIT)
        host.systemctl("stop", "machine.slice", MEMORY_UNIT, LIBVIRT)
        assert (
            guest.wait().code == 0
            and not host.is_mounted()
            and host.shown(MEMORY_UNIT, "Result") == "success"
        ), host.journal()
        host.systemctl("start", MEMORY_UNIT)

        # By hand, past systemd: enabled once more it is there.
        # Somebody looks there for a moment, and at the device, as a round of the watcher does and udev.
        look_at(
            host,
            f"exec 8</dev/zram0 9<{MEMORY}/.semishared/device.json; echo open; sleep 3; exec 9<&-; sleep 3",
        )
        host.run(["/usr/local/sbin/semishared-ram", "stop"])
        look_at(host, "exec 8</dev/zram0; echo open; sleep 3")
        host.enable("330M")
        assert host.is_mounted() and host.systemctl("is-enabled", WATCH, check=False) == "disabled"
        host.run(["/usr/local/sbin/semishared-ram", "disable"], timeout=LONG_S)
        assert not host.is_mounted() and host.systemctl("is-active", MEMORY_UNIT, check=False) == "inactive"
        assert "could not be found" in host.systemctl("status", MEMORY_UNIT, check=False)
        host.enable("320M")
        assert (
            host.is_mounted()
            and host.systemctl("list-units", "--failed", "--plain", "--no-legend", "semishared-ram*") == ""
        )
