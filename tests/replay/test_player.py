# SPDX-License-Identifier: Apache-2.0
"""Recorded calls against our drivers: what is on disk afterwards."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Iterator, Optional, Set

import pytest

import traces
from lab import Lab, connections
from lab.forks import serve
from replay import catalog
from replay.player import Player

pytestmark = pytest.mark.root
PLAYED = catalog.played()


class Stage:
    """One lab for all recordings; a new one after a recording that failed half-way."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._player: Optional[Player] = None

    def player(self) -> Player:
        """Return a player with the images of the first recording, which all others use."""
        if self._player is None:
            lab = self._stack.enter_context(Lab.up(hosts=2, stores=(100,), ceph=True))
            lab.put()
            serve(lab)
            connections.share(lab)
            self._player = Player(lab)
            self._stack.callback(self._player.close)
            self._player.prepare()
            self._player.play("01-datastore-image")
            self._player.check_images()
        return self._player

    def close(self) -> None:
        """Take the lab down."""
        self._player = None
        self._stack.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    if os.geteuid():
        pytest.skip("the lab needs root")
    stage = Stage()
    try:
        yield stage
    finally:
        stage.close()


@pytest.mark.parametrize("name", PLAYED)
def test_recording(stage: Stage, name: str) -> None:
    status = PLAYED[name]
    if status.status != catalog.PASS:
        pytest.skip(f"not yet: {status.reason}")
    try:
        player = stage.player()
        if name != "01-datastore-image":
            player.play(name)
        player.check_images()
        assert not player.left()
    except BaseException:
        stage.close()
        raise


def test_the_checks_find(stage: Stage) -> None:
    player = stage.player()
    player.images[0][0] ^= 1
    with pytest.raises(AssertionError, match="verification failed"):
        player.check_images()
    player.images[0][0] ^= 1
    stray = player.lab.hosts[0].path("/var/lib/one/datastores/101/999")
    stray.mkdir(parents=True)
    assert player.left() == ["h1:101/999"]
    stray.rmdir()


def test_every_recording_is_classified() -> None:
    assert set(PLAYED) == set(traces.names())
    wanted = {f"{number:02}" for number in (*range(1, 19), 20, 21, 22, 24)}
    assert wanted <= {name.split("-")[0] for name, status in PLAYED.items() if status.status == catalog.PASS}
    open_: Set[str] = {name for name, status in PLAYED.items() if status.status != catalog.PASS}
    assert all(PLAYED[name].reason for name in open_)
