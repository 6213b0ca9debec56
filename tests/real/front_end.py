# SPDX-License-Identifier: Apache-2.0
"""The front-end of a lab as an OpenNebula that was built by root.sh makes it: its files, its daemons."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List

from lab import Lab, Node, NodeProcess
from real.api import Api
from real.oned import RealOned

ETC, REMOTES, LOG = "/etc/one", "/var/lib/one/remotes", "/var/log/one"
VMS = "/var/lib/one/vms"
PATH = "/usr/lib/one/sh/override:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""As OpenNebula's unit has it."""
CHANGES: Dict[str, Dict[str, str]] = {
    "defaultrc": {r"(?m)^PRIORITY=19": "PRIORITY=0"},
    "monitord.conf": {r"(SYSTEM_HOST *= *)\d+": r"\g<1>60", r"(STATE_VM *= *)\d+": r"\g<1>20"},
    "sched.conf": {r"(SCHED_INTERVAL *= *)\d+": r"\g<1>3"},
    "oned.conf": {
        r"(SCHED_MAX_WND_TIME *= *)\d+": r"\g<1>3",
        r"(SCHED_RETRY_TIME *= *)\d+": r"\g<1>10",
        r'(DEFAULT_DEVICE_PREFIX *= *)"[a-z]+"': r'\g<1>"vd"',
    },
}
"""Disks are called as the lab's guests know them. Seconds between looks, other than OpenNebula ships them:
tests wait less for a host, and the dozen Ruby programs of each host take the processors less often. Drivers
are not the last to get a processor, where other tests run beside these.
"""


def is_before_7() -> bool:
    """Tell whether the OpenNebula of this root has a scheduler that is a daemon of its own."""
    return Path("/usr/bin/mm_sched").exists()


def version() -> tuple[int, ...]:
    """Return the version of the OpenNebula of this root."""
    return tuple(map(int, Path(REMOTES, "VERSION").read_text().strip().split(".")))


class OpenNebula:
    """The daemons of one front-end."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.fe = lab, lab.fe
        self._running: Dict[str, NodeProcess] = {}

    @property
    def version(self) -> str:
        """Return OpenNebula's version, as hosts are told it."""
        return Path(REMOTES, "VERSION").read_text().strip()

    def lay_out(self) -> None:
        """Bring what OpenNebula's install.sh has left in this root to the front-end's own disks."""
        for place in (ETC, REMOTES, VMS):
            target = self.fe.path(place)
            shutil.rmtree(target, ignore_errors=True)
            subprocess.run(["cp", "-a", "--", place, str(target)], check=True)
            subprocess.run(["chown", "-R", f"{self.lab.uid}:{self.lab.gid}", str(target)], check=True)
        self._configure()

    def _configure(self) -> None:
        for name, changes in CHANGES.items():
            file = self.fe.path(f"{ETC}/{name}")
            if file.exists():
                text = file.read_text()
                for pattern, new in changes.items():
                    text = re.sub(pattern, new, text)
                file.write_text(text)
        self.fe.run(["chown", "-R", "root:oneadmin", ETC], user="root")
        self.fe.run(["chmod", "-R", "g+rX,o=", ETC], user="root")

    def upgrade(self, kept: Path) -> None:
        """Put another version in the place of this one, as its packages do: its programs in this root, its
        configuration and its scripts on the front-end's disks; oned must be off.

        `kept`: where root.sh has built it. What was changed in files of configuration is gone.
        """
        new = kept / "upper"
        for name in ("lib/one", "share/one"):
            shutil.rmtree(f"/usr/{name}")
            _copy(new / "usr" / name, Path("/usr", name))
        Path("/usr/bin/mm_sched").unlink(missing_ok=True)  # before 7.0
        for name in ("bin", "lib/ruby/vendor_ruby"):
            _copy(new / "usr" / name, Path("/usr", name))
        shutil.rmtree(self.fe.path(ETC))
        for name in (ETC, REMOTES):
            _copy(new / name[1:], self.fe.path(name))
        self.fe.run(["chown", "-R", "oneadmin:", REMOTES], user="root")
        self._configure()

    def start(self) -> None:
        """Start oned, before 7.0 the scheduler, and the hook manager; return when oned answers."""
        # As systemd makes them for its units.
        self.fe.run(["install", "-d", "-o", "oneadmin", "/run/lock/one", "/run/one"], user="root")
        self._start_oned()
        if is_before_7():
            self._daemon("mm_sched", ["mm_sched"])
        self._daemon("onehem", ["ruby", "/usr/lib/one/onehem/onehem-server.rb"])

    def _start_oned(self, times: int = 8) -> None:
        """Start oned until it answers: as its unit does, once more if it ends.

        It gives each of its drivers 10 s to start, which is not enough where all processors are busy.
        """
        self._daemon("oned", ["oned", "-f"])
        deadline = time.monotonic() + 120
        while self.fe.run(["onezone", "list"], check=False, timeout=60).returncode:
            ended = self._running["oned"].poll()
            if ended is not None and times > 1:
                return self._start_oned(times - 1)
            if ended is not None or time.monotonic() > deadline:
                said = self.log("oned.out") + self.log("oned.log")
                raise RuntimeError(f"oned does not answer (exit code {ended}): {said[-1500:]}")
            time.sleep(0.5)
        return None

    def _daemon(self, name: str, words: List[str]) -> None:
        out = self.fe.path(f"{LOG}/{name}.out").open("ab")
        # Its unit sets no LANG: what a driver says then is read as US-ASCII.
        self._running[name] = self.fe.popen(
            ["env", "-u", "LANG", *words],
            env={"PATH": PATH},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
        out.close()

    def stop(self) -> None:
        """End what `start` has started, oned last."""
        for name in reversed(list(self._running)):
            process = self._running.pop(name)
            self.fe.run(["pkill", "-TERM", "-u", "oneadmin", "-f", name], check=False)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart(self) -> None:
        """As `systemctl restart opennebula`."""
        self.stop()
        self.start()

    def log(self, name: str) -> str:
        """Return a log: oned.log, sched.log, or 12.log of VM 12."""
        file = self.fe.path(f"{LOG}/{name}")
        return file.read_text(errors="replace") if file.exists() else ""

    def cli(self, *words: str, node: Node | None = None) -> str:
        """Run one of OpenNebula's commands as its administrator; return what it prints."""
        return (node or self.fe).run(list(words), timeout=120).stdout.decode()


def _copy(source: Path, target: Path) -> None:
    """Copy what is in a directory over what is in another."""
    target.mkdir(exist_ok=True)
    words = ["cp", "-a", "--remove-destination", "--no-preserve=xattr", "--", f"{source}/.", str(target)]
    subprocess.run(words, check=True)


@contextmanager
def up(
    hosts: int = 2, stores: tuple[int, ...] = (100,), ceph: bool = False
) -> Iterator[tuple[OpenNebula, RealOned]]:
    """Put up a lab with a real OpenNebula, whose hosts are registered and on; without our drivers."""
    with Lab.up(hosts=hosts, stores=stores, ceph=ceph) as lab:
        one = OpenNebula(lab)
        one.lay_out()
        one.start()
        try:
            oned = RealOned(Api(lab.fe), lab.virt)
            for host in lab.hosts:
                oned.host_create(host.name)
            yield one, oned
        finally:
            one.stop()
