# SPDX-License-Identifier: Apache-2.0
"""What another user of a machine finds of guests: by the real executables, whatever umask oned or ssh had."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterator, List

import pytest

from tools.oned_site import ActionSite

SECRET = "of the guest alone"
HASHES = {"manifest", "generation.json", "session"}
"""What is known of an image on a store, which is no content of it."""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    was = os.umask(0)
    try:
        with ActionSite.up(tmp_path / "one") as site:
            for path in (site.top, site.location, site.store, site.system):
                path.chmod(0o755)  # as a site has them
            yield site
    finally:
        os.umask(was)


def open_to_others(top: Path) -> List[str]:
    """Return what below a directory another user can read, write to, or look for names in; a directory closed
    to him hides all in it.
    """
    found: List[str] = []
    for folder, names, files in os.walk(top):
        for name in files:
            mode = os.lstat(f"{folder}/{name}")
            if not stat.S_ISLNK(mode.st_mode) and mode.st_mode & 0o006:
                found.append(f"{folder}/{name}")
        names[:] = [name for name in names if os.lstat(f"{folder}/{name}").st_mode & 0o007]
    return found


def test_another_user_reads_nothing_that_guests_wrote_or_were_told(site: ActionSite) -> None:
    vm = site.vm(
        site.image("a"),
        site.image("b", persistent=True),
        site.image("c", format="qcow2", SEMISHARED_LOCAL="copy"),
    )
    for number, action in enumerate(("clone", "ln", "clone")):
        site.make(action, vm, number)
    context = site.top / "context.sh"
    context.write_text(f"PASSWORD='{SECRET}'\n")
    target = f"{os.uname().nodename}:{site.disk(vm, 3)}"
    site.tm("context", context, target, vm, 101)
    assert SECRET.encode() in site.disk(vm, 3).read_bytes()
    below = (site.system / str(vm), site.store, site.location / ".semishared")
    found = [path for top in below if top.stat().st_mode & 0o007 for path in open_to_others(top)]
    assert {os.path.basename(path) for path in found} <= HASHES
