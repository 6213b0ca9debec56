# SPDX-License-Identifier: Apache-2.0
"""install.sh and its --uninstall in what a real OpenNebula has put down."""

from __future__ import annotations

import hashlib
import os
from typing import Dict

from lab import Lab, Node
from real.conftest import INSTALL, SEMISHARED, RealCloud
from real.front_end import ETC, REMOTES, OpenNebula


def _tree(node: Node, *places: str) -> Dict[str, str]:
    """Return a hash, mode and owner of all that is below some directories of a node."""
    found: Dict[str, str] = {}
    for place in places:
        for folder, _, files in os.walk(node.path(place)):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                known = os.lstat(path)
                content = (
                    os.readlink(path)
                    if os.path.islink(path)
                    else hashlib.sha256(open(path, "rb").read()).hexdigest()
                    if os.path.isfile(path)
                    else ""
                )
                inside = path[len(str(node.path("/"))) :]
                found[inside] = f"{known.st_mode:o} {known.st_uid}:{known.st_gid} {content}"
    return found


def test_uninstall_leaves_what_was_there_to_the_byte() -> None:
    with Lab.up(hosts=1, stores=()) as lab:
        OpenNebula(lab).lay_out()
        lab.bring_checkout()
        before = _tree(lab.fe, ETC, REMOTES)
        lab.fe.run([INSTALL, "--yes"], user="root", timeout=300)
        installed = _tree(lab.fe, ETC, REMOTES)
        assert installed[f"{ETC}/oned.conf"] != before[f"{ETC}/oned.conf"]
        lab.fe.run([INSTALL, "--yes"], user="root", timeout=300)
        assert _tree(lab.fe, ETC, REMOTES) == installed
        lab.fe.run([INSTALL, "--uninstall", "--yes", "--force"], user="root", timeout=300)  # oned is off
        left = {path: row for path, row in _tree(lab.fe, ETC, REMOTES).items() if before.get(path) != row}
        assert not left, left
        assert not set(before) - set(_tree(lab.fe, ETC, REMOTES))


def test_doctor_finds_nothing_broken(cloud: RealCloud) -> None:
    said = cloud.lab.fe.run([SEMISHARED, "doctor"], check=False, timeout=300)
    assert said.returncode == 0, said.stdout.decode() + said.stderr.decode()
