# SPDX-License-Identifier: Apache-2.0
"""Image datastores are mounted beside system datastores, and one of them hangs: who moves disks between devices does not wait with it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from semishared.base import devices, systems
from semishared.disk import moved_layers
from semishared.errors import ToolTimeout
from semishared.host import unlinked
from semishared.model import steps_device as d
from semishared.tools.run import DIES_WITH_US
from tools.test_hung_device import hanging
from tools.test_pool import Pool, of_size
from tools.world import World

LIMIT_S = 30
LISTED = """
import sys
sys.path.insert(0, sys.argv[1])
from semishared.host import watching
found = watching.Round(sys.argv[2], 0)
print([row["name"] for row in found._held(sys.argv[3])], found._in_memory())
"""


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    systems._silent.clear()


def test_the_round_of_the_watcher_does_not_wait_for_a_store_that_hangs(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    link = devices.link_of(f"{world.disk().path}.snap")
    assert link
    (world.location / "104").mkdir()
    with hanging(world, str(world.location / "104")):
        lib = str(Path(systems.__file__).parents[2])
        words = [*DIES_WITH_US, "/usr/bin/python3", "-c", LISTED, lib, str(world.root), link.uuid]
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
        assert done.stdout.decode() == f"['{link.name}'] []\n"
        # Nor does it take for left over what it may not have seen.
        started = time.monotonic()
        with pytest.raises(ToolTimeout, match=r"/104 on \S+ does not answer"):
            devices.layers_links(str(world.location))
        assert unlinked.look(str(world.location)) == [] and os.path.isdir(f"{world.disk().path}.snap")
        moved_layers._discard_unlinked(str(world.root), world.disk())
        assert time.monotonic() - started < LIMIT_S
    systems._silent.clear()
    assert devices.layers_links(str(world.location)) == {link}
    assert [row["name"] for row in moved_layers.held(d.ListHeld(str(world.root)))] == [link.name]


def test_what_is_mounted_is_a_system_datastore_if_it_says_so(world: World) -> None:
    location = str(world.location)
    (world.location / "no number").mkdir()
    os.symlink("101", world.location / "105")
    os.symlink(str(world.top), world.location / "106")
    (world.system / ".monitor").write_text("semishared\n")
    assert systems.systems(location) == ["100", "101", "105"]
    with of_size(world.store, "50%"):
        assert systems.systems(location, whole=True) == ["101", "105"]
        (world.store / ".monitor").write_text("semishared\n")
        assert systems.systems(location, whole=True) == ["100", "101", "105"]
    place = world.location.with_name("with a space")
    place.joinpath("100").mkdir(parents=True)
    with of_size(place / "100", "50%"):
        assert systems.systems(str(place)) == []
    assert systems.systems(str(place)) == ["100"]
