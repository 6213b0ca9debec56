# SPDX-License-Identifier: Apache-2.0
"""A session with hundreds of hosts has files whose numbers select(2) does not know, and more of them than a
process usually may have.
"""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path
from typing import Iterator

import pytest

from semishared.cli import main as cli
from semishared.model import steps as s
from tools.world import MiB, World

SELECTED = 1024
"""FD_SETSIZE."""


@pytest.fixture()
def usual_limit() -> Iterator[None]:
    """What a login has: 1024 files, and leave to have more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SELECTED, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("usual_limit")
def test_host_is_spoken_to_through_files_above_those_that_select_knows(tmp_path: Path) -> None:
    world, content = World(tmp_path), os.urandom(8 * MiB)
    path = world.system / "5" / "file"
    cli.allow_open_files()
    taken: list[int] = []
    try:
        while not taken or taken[-1] < 2 * SELECTED:
            taken.append(os.open("/dev/null", os.O_RDONLY))
        step = s.ReceiveFile(str(path), 5, len(content), hashlib.sha256(content).hexdigest())
        # More than a pipe holds: whoever sends has to wait for it, too.
        pieces = [content[at : at + MiB] for at in range(0, len(content), MiB)]
        world.on(s.PrepareVm(5, str(path.parent)), step, data=pieces, sha256=step.sha256)
    finally:
        for fd in taken:
            os.close(fd)
    assert path.read_bytes() == content


@pytest.mark.usefixtures("usual_limit")
def test_command_may_have_as_many_files_as_its_user_may() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    cli.allow_open_files()
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert allowed[1] == most and (allowed[0] == cli.OPEN_FILES or allowed[0] == most < cli.OPEN_FILES)
    cli.allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == allowed
