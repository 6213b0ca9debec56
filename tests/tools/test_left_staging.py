# SPDX-License-Identifier: Apache-2.0
"""What a killed or failed run has left of a base, and a second fault on top of it: the next run has the base,
or says why not.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path
from typing import List

import pytest

from semishared.errors import NoSpace
from semishared.model import steps as s
from semishared.model.base import names as base_names
from semishared.model.base import steps as base_steps
from semishared.stage import partial
from semishared.stage.ensure import ensure
from semishared.tools import extents
from tools.test_base_care import flip, verify
from tools.test_several_bases import EXTENTS, abandoned, good, images, of, step, stored
from tools.world import World

__all__ = ["images", "stored"]


def staging(world: World, image: s.ImageRef) -> str:
    return base_names.staging(str(world.root), image.base_prefix)


@pytest.mark.parametrize("inodes", [1, 3])
def test_without_space_to_begin_with_nobody_is_told_that_the_base_is_there(
    world: World, images: List[s.ImageRef], inodes: int
) -> None:
    """Of bytes there are enough, of inodes there are not; a clone would try for ever."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m,nr_inodes=16", "small", str(world.root)], check=True
    )
    try:
        for name in ("bases", "locks", "staging", "holders"):
            (world.root / name).mkdir()
        while os.statvfs(world.root).f_favail > inodes:
            (world.root / f"filler-{os.statvfs(world.root).f_favail}").touch()
        with pytest.raises(NoSpace):
            world.on(step(world, base_steps.Part(images[0])))
        with pytest.raises(NoSpace):
            ensure(str(world.root), images[0], None, (5, 0))
    finally:
        subprocess.run(["umount", "-l", str(world.root)], check=True)


def test_of_a_removal_that_was_killed_only_the_name_of_the_generation_is_left(
    world: World, images: List[s.ImageRef]
) -> None:
    abandoned(world, images[0], 2)
    left = Path(staging(world, images[0]))
    for path in left.iterdir():
        if path.name != "generation":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert os.path.exists(ensure(str(world.root), images[0], None, (5, 0)).path)
    good(world, images[0])


def test_manifest_that_has_rotted_in_staging_is_written_again(world: World, images: List[s.ImageRef]) -> None:
    abandoned(world, images[0], 2)
    flip(Path(base_names.manifest(staging(world, images[0]))), 30)
    world.on(step(world, base_steps.Part(images[0])))
    assert verify(world, images[0].base_name)["bad"] == []


@pytest.mark.parametrize("is_finished", [False, True], ids=["begun", "finished"])
def test_killed_while_it_reads_again_what_was_left_it_has_that_the_next_time(
    world: World, images: List[s.ImageRef], is_finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(world, images[0], EXTENTS)
    place = staging(world, images[0])
    if is_finished:
        for name in (base_names.have(place), base_names.generation(place)):
            os.unlink(name)
    looked: List[int] = []

    def killed(index: int) -> bool:
        looked.append(index)
        if len(looked) == 3:
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patch:
        patch.setattr(partial.Partial, "_is_there", lambda self, index: killed(index))
        with pytest.raises(KeyboardInterrupt):
            partial.Partial(str(world.root), images[0])
    assert partial.have(place) == {0, 1}, "others are served what was read again"
    (found,) = world.on(step(world, base_steps.Part(images[0])))
    assert isinstance(found, dict) and found["sources"] == {}, "all of it is here"
    good(world, images[0])


def test_extent_that_cannot_be_read_again_is_fetched(
    world: World, images: List[s.ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(world, images[0], EXTENTS)
    real = os.pread

    def bad(fd: int, count: int, at: int) -> bytes:
        if at == 2 * extents.EXTENT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, count, at)

    monkeypatch.setattr(os, "pread", bad)
    found = partial.Partial(str(world.root), images[0])
    assert found.missing() == [2]
    found.close()


@pytest.mark.parametrize("harm", ["gone", "rotten"])
def test_store_that_has_lost_a_manifest_is_read_whole_and_has_it_again(world: World, harm: str) -> None:
    image = world.image()
    generation = ensure(str(world.root), image, None).base.generation
    (manifest,) = world.store.glob(".semishared/*/manifest")
    text = manifest.read_bytes()
    shutil.rmtree(world.root)
    if harm == "gone":
        manifest.unlink()
    else:
        flip(manifest, 30)
    assert ensure(str(world.root), image, None, (5, 0)).base.generation == generation
    good(world, image._replace(generation=generation))
    assert manifest.read_bytes() == text and os.path.exists(
        of(world, image._replace(generation=generation)).lease(5, 0)
    )
