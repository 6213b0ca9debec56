# SPDX-License-Identifier: Apache-2.0
"""Fork programs of ours instead of starting them (fork_server.py), in the nodes of a lab and here: half of a
suite is python's start.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Sequence

from lab import Lab, Node, caches, fork_server, layout
from lab.hosts import REMOTES, SCRIPTS

REAL = "/run/python3"
SOCKETS = "/run/fork-server"
# The interpreter keeps a name; its usual one is the client's from then on. Both are gone when the node is.
PLACE = f"""
touch {REAL}
mount --bind "$(readlink -f /usr/bin/python3)" {REAL}
mkdir {SOCKETS}
chmod 1777 {SOCKETS}
"""
IS_PLACED = ["test", "-d", SOCKETS]
COVER = 'mount --bind "$1" "$(readlink -f /usr/bin/python3)"'


def _serve(lab: Lab, node: Node, client: Path) -> None:
    lib = f"{REMOTES if node in lab.front_ends else SCRIPTS}/lib"
    is_placed = not node.run(IS_PLACED, check=False).returncode
    if not is_placed:
        for source, name in ((client, "fork_client"), (Path(fork_server.__file__), "fork_server.py")):
            target = node.path(f"/opt/{name}")
            target.write_bytes(source.read_bytes())
            target.chmod(0o755)
        node.run(["sh", "-euc", PLACE], user="root")
    words = [
        "/usr/bin/python3",
        "-IS",
        "/opt/fork_server.py",
        "--listen",
        f"{SOCKETS}/{node.uid_of(layout.USER)}",
        lib,
    ]
    # As what sshd and oned start has it.
    server = node.popen(
        ["env", "-i", "PATH=/usr/bin:/bin", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert server.stdout
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the fork server of {node.name} did not start")
    if not is_placed:
        node.run(["sh", "-euc", COVER, "sh", "/opt/fork_client"], user="root")


def _client(real: str) -> Path:
    return caches.build([caches.HERE / "fork_client.c"], ["-static", f'-DREAL="{real}"'])


def serve(lab: Lab) -> None:
    """Let front-end and hosts fork from now on, each until it is started anew; the drivers are installed.
    Once more for other ones.
    """
    client = _client(REAL)
    for node in (*lab.front_ends, *lab.hosts):
        _serve(lab, node, client)


def start(
    folder: Path, within: Sequence[str] = (), checkout: Path = caches.CHECKOUT
) -> subprocess.Popen[bytes]:
    """Start a server in a folder of this machine, where `python3` is the client that asks it; `within`: words
    that run it elsewhere.
    """
    python = folder / "python3"
    shutil.copy(_client("/usr/bin/python3"), python)
    words = [
        "/usr/bin/python3",
        "-IS",
        fork_server.__file__,
        "--listen",
        str(folder / "server"),
        str(checkout / "lib"),
        str(python),
    ]
    server = subprocess.Popen([*within, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert server.stdout
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the fork server in {folder} did not start")
    return server


@cache
def _here(checkout: Path) -> Path:
    """Start a server on this machine for the rest of this process; return the client that asks it."""
    folder = Path(tempfile.mkdtemp(prefix="semishared-forks-"))
    server = start(folder, checkout=checkout)

    def end() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return folder / "python3"


def python(checkout: Path = caches.CHECKOUT) -> list[str]:
    """Return the words before the path of a program of a checkout that run it here; its host sides are forked
    too.
    """
    return [str(_here(checkout)), "-IS"]


def words(module: str) -> list[str]:
    """Return what runs a module of the tests as a program here, as `python3 -m` would."""
    return [*python(), str(caches.HERE.parent / f"{module.replace('.', '/')}.py")]
