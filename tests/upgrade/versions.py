# SPDX-License-Identifier: Apache-2.0
"""Bring versions of semishared into a lab: the older one from this repository's own history, and that of this
checkout.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from lab import Lab, Node, caches
from lab.caches import PARTS
from lab.hosts import REMOTES, SCRIPTS

OLDER, RELEASE = "84b7bda", "0.1.0"
"""The commit that is upgraded from, and what it calls itself."""
KILLED = "2a155d3f"
"""The commit whose jobs are killed, and go on under this checkout's version: the one before the house was
built anew.
"""
TREES = {OLDER: f"/opt/semishared-{RELEASE}", KILLED: f"/opt/semishared-{KILLED}", "": "/opt/semishared"}
"""Where the front-end has which version, '' is this checkout's."""


def lay_out(target: Path, commit: str = OLDER) -> None:
    """Put what is installed of `commit` into `target`; the test fails in one line where this clone does not
    have it.
    """
    git = ["git", "-c", "safe.directory=*", "-C", str(caches.CHECKOUT)]
    top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    if (
        top.returncode
        or subprocess.run(
            [*git, "cat-file", "-e", f"{commit}^{{tree}}"], stderr=subprocess.DEVNULL, check=False
        ).returncode
    ):
        pytest.fail(f"{commit} is not in this clone: git fetch --unshallow brings it", pytrace=False)
    words = ["git", "-c", "safe.directory=*", "-C", top.stdout.strip(), "archive", commit, "--", *PARTS]
    archive = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    target.mkdir(parents=True)
    subprocess.run(["tar", "--extract", "--file=-", "--no-same-owner"], cwd=target, check=True, input=archive)


def unpack(lab: Lab, commit: str = OLDER) -> None:
    """Bring both versions to the front-end; install neither."""
    lab.unpack()
    target = lab.fe.path(TREES[commit])
    shutil.rmtree(target, ignore_errors=True)
    lay_out(target, commit)
    lab.fe.run(["chmod", "-R", "a+rX", TREES[commit]], user="root")


def install(lab: Lab, version: str = "") -> str:
    """Install a version with its own install.sh, as an administrator does; return what that says."""
    said = lab.fe.run([f"{TREES[version]}/install.sh"], user="root").stdout.decode()
    # oned notes its configuration when it is started again.
    lab.fe.run(["sh", "-c", "sleep 0.1; touch /var/lib/one/config"])
    return said


def sync(lab: Lab) -> None:
    """Bring the front-end's remotes to all hosts, as `onehost sync --force` does."""
    for node in lab.hosts:
        lab.fe.run(["rsync", "-LRaz", "--delete", ".", f"oneadmin@{node.name}:{SCRIPTS}/"], cwd=REMOTES)


def keep(lab: Lab) -> None:
    """Keep what machines have now, the older version, beside it, for `not_upgraded`."""
    for node in (lab.fe, *lab.hosts):
        place = _place(node)
        node.run(["cp", "-a", place, f"{place}-{RELEASE}"], user="root")


@contextmanager
def not_upgraded(node: Node) -> Iterator[None]:
    """Have the older version on one machine within the block: a host as if it had been away when the others
    were synced, the front-end as after a fail-over to one that was forgotten.
    """
    exchange = [
        "sh",
        "-euc",
        'mv "$0" "$0.other"; mv "$1" "$0"; mv "$0.other" "$1"',
        _place(node),
        f"{_place(node)}-{RELEASE}",
    ]
    node.run(exchange, user="root")
    try:
        yield
    finally:
        node.run(exchange, user="root")


def _place(node: Node) -> str:
    return REMOTES if node.name == "fe" else SCRIPTS
