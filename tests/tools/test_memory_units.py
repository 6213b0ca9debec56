# SPDX-License-Identifier: Apache-2.0
"""What semishared-ram.sh installs, and refuses to: its units, and where it finds the drivers. What it makes
of memory: tests/nfs.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from semishared.host import watch

INSTALL = Path(watch.__file__).parents[1] / "install"
SCRIPT, WATCH = "semishared-ram.sh", "semishared-ram-watch.service"
MACHINE = """
set -eu
cp -a /etc "$1/etc"
mount --bind "$1/etc" /etc
mount -t tmpfs none /run
mount -t tmpfs none /usr/local/sbin
echo oneadmin:x:9869:9869::/:/bin/sh >>/etc/passwd
mkdir -p /run/systemd/system /run/bin /etc/systemd/system
# As systemd answers: what is not installed cannot be disabled.
printf '%s\\n' '#!/bin/sh' 'echo "$*" >>/run/said' 'case $1 in disable) [ -f "/etc/systemd/system/$3" ] ;; esac' >/run/bin/systemctl
chmod 755 /run/bin/systemctl
export PATH="/run/bin:$PATH"
cd "$2"
shift 2
code=0
"$@" || code=$?
echo "code $code"
cat /etc/semishared-ram.conf /run/said 2>/dev/null || true
"""  # noqa: E501


def machine(top: Path, directory: Path, *argv: str) -> str:
    """Run a command as root of a machine with systemd; return what it says, its code, its settings and what
    systemd is told.
    """
    (top / "machine").mkdir()
    words = ["unshare", "-m", "sh", "-c", MACHINE, "sh", str(top / "machine"), str(directory), *argv]
    return subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, timeout=60
    ).stdout.decode()


def test_who_ends_the_watcher_does_not_end_what_is_under_way_nor_who_wakes_its_guest() -> None:
    unit = configparser.ConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read(INSTALL / WATCH)
    assert unit["Service"]["KillMode"] == "process" and unit["Service"]["Restart"] == "always"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd says what it makes of its units")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    for name in (WATCH, "semishared-ram.service"):
        text = (INSTALL / name).read_text().replace("/usr/local/sbin/semishared-ram", "/bin/true")
        (tmp_path / name).write_text(text)
    words = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
    assert (done.returncode, done.stdout.decode()) == (0, "")


def test_the_drivers_are_found_beside_the_script_also_by_its_name_alone(tmp_path: Path) -> None:
    told = machine(tmp_path, INSTALL, "sh", SCRIPT, "enable", "400M", "zram", "2")
    assert "code 0\n" in told and f"\nLIB={INSTALL.parent}\n" in told, told
    assert told.splitlines()[-1] == "enable --now semishared-ram-watch.service"


def test_memory_that_was_stopped_by_hand_is_none_that_systemd_need_not_start(tmp_path: Path) -> None:
    told = machine(tmp_path, INSTALL, "sh", SCRIPT, "enable", "400M").splitlines()
    enabled = told.index("enable --now semishared-ram.service")
    assert told[enabled - 1] == "stop semishared-ram.service", told


def test_what_is_disabled_is_nothing_that_systemd_takes_for_started(tmp_path: Path) -> None:
    told = machine(
        tmp_path, INSTALL, "sh", "-c", f"sh {SCRIPT} enable 400M && sh {SCRIPT} disable"
    ).splitlines()
    assert "disable --now semishared-ram.service" in told, told


def test_without_the_drivers_memory_is_promised_once(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(INSTALL / SCRIPT, alone)
    told = machine(tmp_path, alone, "sh", SCRIPT, "enable", "400M", "zram", "2")
    assert (
        told
        == f"semishared-ram: TIMES = 2: watch needs the drivers, and there are none beside {SCRIPT}\ncode 1\n"
    )
    shutil.rmtree(tmp_path / "machine")
    told = machine(tmp_path, alone, "sh", SCRIPT, "enable", "400M")
    assert "code 0\n" in told and "add /run/semishared-ram=ram to SEMISHARED_POOL" in told, (
        "there is no unit yet that could be disabled"
    )
