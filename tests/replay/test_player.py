# SPDX-License-Identifier: Apache-2.0
"""Recorded calls against our drivers: what is on disk afterwards."""

from __future__ import annotations

import os
from typing import Iterator, Set

import pytest
import traces
from lab import Lab

from replay import catalog
from replay.player import Player

pytestmark = pytest.mark.root
PLAYED = catalog.played()


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    if os.geteuid():
        pytest.skip("the lab needs root")
    with Lab.up(hosts=2, stores=(100,)) as lab:
        lab.install()
        player = Player(lab)
        try:
            player.prepare()
            # The other recordings use the images made in the first one.
            player.play("01-datastore-image")
            player.check_images()
            yield player
        finally:
            player.close()


@pytest.mark.parametrize("name", PLAYED)
def test_recording(player: Player, name: str) -> None:
    status = PLAYED[name]
    if status.status != catalog.PASS:
        pytest.skip(f"not yet: {status.reason}")
    if name != "01-datastore-image":
        player.play(name)
    player.check_images()
    assert not player.left()


def test_every_recording_is_classified() -> None:
    assert set(PLAYED) == set(traces.names())
    open_: Set[str] = {name for name, status in PLAYED.items() if status.status != catalog.PASS}
    assert all(PLAYED[name].reason for name in open_)
