# SPDX-License-Identifier: Apache-2.0
"""systemd in a node: units that are installed there run as on a machine, in the lab's network, on its files.

It is the first process of a process namespace of its own, with /run, /tmp and units of its own (systemd.sh);
no other service of the machine is there but its journal. It is up after 2 s of processor.

    with Systemd(lab.fe) as systemd:
        systemd.systemctl("start", "x.service")
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from types import TracebackType
from typing import Optional, Sequence

from lab.node import Node, NodeProcess

SCRIPT = Path(__file__).with_suffix(".sh")
UP_S, LONG_S = 300, 600


class Systemd:
    """One systemd in a node, up while the context lasts."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._pid = 0
        self._process: Optional[NodeProcess] = None

    def __enter__(self) -> Systemd:
        # The checkout is not in the node.
        self._put("/opt/systemd.sh", SCRIPT.read_text())
        words = ["sh", "/opt/systemd.sh", "outside", f"semishared-lab-{secrets.token_hex(4)}"]
        with (self.node.folder / "systemd.log").open("ab") as log:
            self._process = self.node.popen(words, user="root", cwd="/", stdin=-3, stdout=-1, stderr=log)
        assert self._process.stdout
        self._pid = int(self._process.stdout.readline())
        end = time.monotonic() + UP_S
        while self.run("systemctl", "is-system-running", check=False) not in ("running", "degraded"):
            assert time.monotonic() < end, (self.node.folder / "systemd.log").read_text()
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], tb: Optional[TracebackType]
    ) -> None:
        assert self._process
        self.node.run(["kill", "-KILL", str(self._pid)], user="root")
        self._process.wait(timeout=UP_S)

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command beside it, as root; return what it printed."""
        inside = ["nsenter", "-t", str(self._pid), "--mount", "--ipc", "--pid", "--cgroup", "--", *words]
        done = self.node.run(inside, user="root", cwd="/", check=False, timeout=LONG_S)
        said = (done.stdout + done.stderr).decode().strip()
        assert not (check and done.returncode), f"{words}: {said}"
        return said

    def put(self, unit: str, text: str) -> None:
        """Write a unit, which is read when it is used."""
        self._put("/opt/unit", text)
        self.run("cp", "/opt/unit", f"/etc/systemd/system/{unit}")
        self.systemctl("daemon-reload")

    def edit(self, unit: str, text: str) -> None:
        """Have `systemctl edit` write what an administrator types: it does that at a terminal alone."""
        self._put("/opt/typed", text)
        self._put("/opt/editor", '#!/bin/sh\ncp /opt/typed "$1"\n')
        self.run("script", "-qec", f"SYSTEMD_EDITOR=/opt/editor systemctl edit {unit}", "/dev/null")

    def _put(self, path: str, text: str) -> None:
        self.node.path(path).write_text(text)
        self.node.path(path).chmod(0o755)

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *words, check=check)

    def shown(self, unit: str, what: str) -> str:
        return self.systemctl("show", "--value", "-p", what, unit)

    def units(self, *options: str) -> Sequence[str]:
        """Return the names of units of ours."""
        listed = self.systemctl("list-units", *options, "--plain", "--no-legend", "semishared*")
        return [line.split()[0] for line in listed.splitlines()]

    def journal(self, *options: str) -> str:
        return self.run("journalctl", "-q", "--no-pager", *options)
