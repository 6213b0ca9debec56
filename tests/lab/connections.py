# SPDX-License-Identifier: Apache-2.0
"""Have the machines of a lab share ssh connections, as OpenNebula's share/ssh has it, where how one is made
is not the point.

To connect takes ssh and sshd three times what a session on a connection does. One that is not there is made
as ever: after a host has been started anew, or for what wants its own (ControlPath=none).
"""

from __future__ import annotations

import os
import subprocess
import time

from lab import Lab

SOCKET = "/run/one/ssh-%h"
CONFIG = f"""\
Host *
    ControlMaster no
    ControlPath {SOCKET}
"""
# A host that is lost is to be missed soon, as by what connects to it.
MASTER = [
    "ssh",
    "-N",
    "-o",
    "ControlMaster=yes",
    "-o",
    "ServerAliveInterval=1",
    "-o",
    "ServerAliveCountMax=3",
]


def share(lab: Lab) -> None:
    """Connect front-end and hosts with all hosts until they end, and let ssh use these connections."""
    made = []
    for node in (*lab.front_ends, *lab.hosts):
        config = node.path("/var/lib/one/.ssh/config")
        config.write_text(CONFIG)
        os.chown(config, lab.uid, lab.gid)
        for host in lab.hosts:
            if host is not node:
                node.popen(
                    [*MASTER, host.name],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                made.append(node.path(SOCKET.replace("%h", host.name)))
    deadline = time.monotonic() + 60
    while not all(socket.exists() for socket in made):
        assert time.monotonic() < deadline, "no connection to share"
        time.sleep(0.02)
