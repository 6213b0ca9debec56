# SPDX-License-Identifier: Apache-2.0
"""Several bases in one step: each is in use and free for others as soon as it is whole, and nobody waits who
holds a lock.

That one is slow is the store's rate, of one byte per second: what is to happen before it ends happens before,
or never.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

from rot import copied
from semishared.base import cache
from semishared.config import Config
from semishared.errors import (
    BaseBusy,
    HostFailed,
    HostUnreachable,
    ImageChanged,
    MissingImage,
    NoSpace,
    ToolTimeout,
)
from semishared.model import steps as s
from semishared.model.base import names as base_names
from semishared.model.base import steps as base_steps
from semishared.model.base.names import ALL
from semishared.stage import extent_index, peers
from semishared.stage.bases_in_progress import Account, Orders, Targets
from semishared.stage.ensure import ensure
from semishared.stage.fetch_from_sources import Filling
from semishared.stage.partial import Partial
from semishared.tools import extents, locks
from semishared.wire import packets
from semishared.wire.session import Session
from tools.test_base_care import flip
from tools.world import MiB, World

EXTENTS = 4
SLOWLY = 1
"""Bytes per second."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, List[s.ImageRef]]:
    """Three images that have nothing in common, of EXTENTS extents each; the store knows their hashes, and
    nobody has a base.
    """
    world, found = World(tmp_path_factory.mktemp("stored")), []
    for number in (1, 2, 3):
        path = world.store / f"image-{number}"
        path.write_bytes(os.urandom(EXTENTS * extents.EXTENT))
        image = s.ImageRef(100, number, "raw", str(path))
        generation = ensure(str(world.root), image, None).base.generation
        found.append(image._replace(generation=generation))
        cache.forget(of(world, found[-1]))
    return world, found


@pytest.fixture()
def images(world: World, stored: tuple[World, List[s.ImageRef]]) -> List[s.ImageRef]:
    """The same on a machine of the test's own: what it takes to make and to hash them is spent once."""
    theirs, found = stored
    subprocess.run(["cp", "-a", f"{theirs.location}/.", world.location], check=True)
    copied(world.location)
    return [image._replace(source=str(world.store / f"image-{image.id}")) for image in found]


def of(world: World, image: s.ImageRef) -> cache.Base:
    return cache.named(str(world.root), image, image.generation)


def lock(world: World, image: s.ImageRef) -> str:
    return base_names.image_lock(str(world.root), image.base_prefix)


def step(
    world: World, *parts: base_steps.Part, rate: int = 0, wait: bool = True, sources: tuple[str, ...] = ()
) -> base_steps.FetchBases:
    return base_steps.FetchBases(str(world.root), parts, sources, "rest", "", "none", 0, rate, (), (), wait)


def good(world: World, *images: s.ImageRef) -> None:
    for image in images:
        assert extents.copy(of(world, image).image, None, "raw", "test").generation == image.generation


class Run:
    """A step under way, and what it has said."""

    def __init__(self, session: Session, what: base_steps.FetchBases) -> None:
        self.session = session
        self.said: List[Dict[str, Any]] = []
        session.begin([what], last=True)

    def until(self, fits: Callable[[Dict[str, Any]], bool]) -> Dict[str, Any]:
        """Return what is said and fits; raise what ends the step before that."""
        while True:
            message = self.session.read(within_s=60)
            assert isinstance(message, dict), f"nothing came of it: {self.said}"
            self.said.append(message)
            if fits(message):
                return message
            assert message["event"] != "done", self.said

    def base(self, image: s.ImageRef) -> None:
        self.until(lambda said: said["event"] == "base" and said["name"] == image.base_name)

    def done(self) -> base_steps.Fetched:
        found: base_steps.Fetched = self.until(lambda said: said["event"] == "done")["results"][0]
        return found


@contextmanager
def begun(what: base_steps.FetchBases) -> Iterator[Run]:
    with Session("localhost", "stage", Config(), bulk=True) as session:
        yield Run(session, what)


@contextmanager
def holding(path: str) -> Iterator[Callable[[], None]]:
    """Have a lock; yield what lets it go."""
    with ExitStack() as held:
        held.enter_context(locks.exclusive(path))
        yield held.close


def test_first_base_is_in_use_while_the_second_one_still_comes(
    world: World, images: List[s.ImageRef]
) -> None:
    first, second, _ = images
    with begun(step(world, base_steps.Part(first, first=ALL), base_steps.Part(second), rate=SLOWLY)) as run:
        run.base(first)
        good(world, first)
        assert not locks.is_held(lock(world, first)) and locks.is_held(lock(world, second))
        # A cold clone of it, as it is done at any time; and its base may go and come again.
        assert ensure(str(world.root), first, None, (5, 0)).path.endswith("/leases/5-0")
        assert not cache.is_published(of(world, second))


def test_peer_has_the_first_base_from_here_while_the_second_one_still_comes(
    world: World, images: List[s.ImageRef], tmp_path: Path
) -> None:
    first, second, _ = images
    with begun(step(world, base_steps.Part(first, first=ALL), base_steps.Part(second), rate=SLOWLY)) as run:
        target = Partial(str(tmp_path / "other"), first)
        served = base_steps.ServeBase(
            str(world.root), first.base_name, (), "00" * 16 + ":" + "11" * 32, "none", 0
        )
        peers.fetch("localhost", served, target, Config(), lambda *_: None, lambda host: False)
        assert target.is_complete
        target.close()
        run.base(first)
        assert not cache.is_published(of(world, second))


def test_base_that_another_action_is_at_is_had_after_the_others(
    world: World, images: List[s.ImageRef]
) -> None:
    """Whatever the order in which they are named: no lock is waited for before the rest is done, or by who
    holds one.
    """
    first, _, third = images
    for busy in (first, third):
        for image in images:
            cache.forget(of(world, image))
        # First, or the step is quicker.
        with holding(lock(world, busy)) as let_go, begun(step(world, *map(base_steps.Part, images))) as run:
            for image in (image for image in images if image != busy):
                run.base(image)
            run.until(lambda said: said.get("source") == "another session")
            assert not any(locks.is_held(lock(world, image)) for image in images if image != busy)
            let_go()
            run.done()
        good(world, *images)


def test_two_that_want_the_same_in_opposite_order_have_each_base_once(
    world: World, images: List[s.ImageRef]
) -> None:
    first, second, third = images
    with begun(
        step(world, base_steps.Part(first, first=ALL), base_steps.Part(second, first=((0, 2),)), rate=SLOWLY)
    ) as slow:
        slow.until(lambda said: said.get("have") == EXTENTS + 2)
        with begun(
            step(world, base_steps.Part(third), base_steps.Part(second), base_steps.Part(first))
        ) as other:
            other.base(third)
            other.until(lambda said: said.get("source") == "another session")
            assert locks.is_held(lock(world, second)) and not locks.is_held(lock(world, third))
            # The one that has it in work is killed; the other one goes on with what has come.
            had = len(
                Path(base_names.have(base_names.staging(str(world.root), second.base_prefix)))
                .read_text()
                .split()
            )
            os.killpg(slow.session._process.pid, signal.SIGKILL)
            sources = other.done().sources
    good(world, *images)
    assert had == 2 and sources["store"].extents == EXTENTS + EXTENTS - had, (
        "its own, and the rest of the other's"
    )
    assert world.leftovers() == []


def test_what_is_busy_is_said_when_the_others_are_here(world: World, images: List[s.ImageRef]) -> None:
    first, second, _ = images
    with (
        locks.exclusive(lock(world, first)),
        begun(step(world, base_steps.Part(first), base_steps.Part(second), wait=False)) as run,
    ):
        run.base(second)
        came = run.until(lambda said: said["event"] == "came")
        assert came["sources"]["store"]["extents"] == EXTENTS
        with pytest.raises(BaseBusy, match=first.base_name):
            run.done()
    good(world, second)


def test_look_at_a_lock_makes_nobody_busy(world: World, images: List[s.ImageRef]) -> None:
    first, second, _ = images
    with open(lock(world, first)) as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as locks.is_held
        with begun(step(world, base_steps.Part(first), base_steps.Part(second), wait=False)) as run:
            run.base(second)
            run.until(lambda said: said.get("source") == "another session")
            fcntl.flock(file, fcntl.LOCK_UN)
            run.done()
    good(world, first, second)


def test_disk_that_is_full_keeps_what_was_whole_before(world: World, images: List[s.ImageRef]) -> None:
    first, second, third = images
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={EXTENTS * 4 * 3 // 2}m", "small", str(world.root)], check=True
    )
    try:
        with begun(
            step(world, base_steps.Part(first), base_steps.Part(second), base_steps.Part(third))
        ) as run:
            run.base(first)
            run.until(lambda said: said["event"] == "came")
            with pytest.raises(NoSpace):
                run.done()
        good(world, first)
        assert world.leftovers() == [], "what came of the others is space that the host lacks"
        assert not any(locks.is_held(lock(world, image)) for image in images)
    finally:
        subprocess.run(["umount", "-l", str(world.root)], check=True)


def test_base_that_cannot_be_had_is_given_up_before_the_next_one_is_begun(
    world: World, images: List[s.ImageRef]
) -> None:
    first, second, third = images
    flip(Path(first.source), 5)
    parts = (base_steps.Part(first), base_steps.Part(second, first=ALL), base_steps.Part(third))
    with begun(step(world, *parts, rate=64 * MiB)) as run:
        run.base(third)
        assert not locks.is_held(lock(world, first))
        run.until(lambda said: said["event"] == "came")
        with pytest.raises(ImageChanged):
            run.done()
    good(world, second, third)
    assert world.leftovers() == []


def there(staging: str) -> int:
    """Return how many extents a killed reception has left."""
    if os.path.exists(base_names.have(staging)):
        return len(Path(base_names.have(staging)).read_text().split())
    is_finished = os.path.exists(base_names.manifest(staging)) and not os.path.exists(
        base_names.generation(staging)
    )
    return EXTENTS if is_finished else 0


def test_reception_of_two_killed_at_any_step_is_gone_on_with(
    world: World, images: List[s.ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = images
    what, root = step(world, base_steps.Part(first), base_steps.Part(second)), str(world.root)
    alone = 0
    for kill_at in range(1, 60):
        for image in (first, second):
            cache.forget(of(world, image))
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(kill_at))
        try:
            world.on(what)
            is_killed = False
        except HostFailed:
            is_killed = True
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        whole = [image for image in (first, second) if cache.is_published(of(world, image))]
        good(world, *whole)
        alone += len(whole) == 1
        had = sum(
            there(base_names.staging(root, image.base_prefix))
            for image in (first, second)
            if image not in whole
        )
        (found,) = world.on(what)
        assert isinstance(found, dict)
        read = found["sources"].get("store", {"extents": 0})["extents"]
        assert read == EXTENTS * (2 - len(whole)) - had, "what had come of each is not read again"
        good(world, first, second)
        assert world.leftovers() == []
        if not is_killed:
            break
    assert alone >= 2, "the first was in use, and of the second came what there was"


def abandoned(world: World, image: s.ImageRef, count: int) -> None:
    """Leave what a killed reception leaves."""
    with open(image.source, "rb") as file:
        partial = Partial(str(world.root), image)
        partial.begin(extents.copy(image.source, None, "raw", "test").text())
        for index in range(count):
            assert partial.put(index, extents.read_at(file.fileno(), index))
    partial.close()


def ends(work: Callable[[], object]) -> BaseException | None:
    """Return what `work` raises; fail if it does not come to an end."""
    raised: List[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - looked at by who asked
            raised.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for what nobody is at"
    return raised[0] if raised else None


def test_what_nobody_is_at_any_more_is_served_and_not_waited_for(
    world: World, images: List[s.ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned(world, images[0], 2)
    monkeypatch.setattr(peers, "FOLLOW_S", 1e9)
    monkeypatch.setattr(peers, "GRACE_S", 0)
    served: List[int] = []

    def serve() -> None:
        for _, group in peers.groups(str(world.root), images[0].base_name, (), 0):
            served.extend(extent.number for extent in group)

    assert isinstance(ends(serve), MissingImage)
    assert served == [0, 1]


def test_stream_reads_itself_what_somebody_else_does_not_get_on_with(
    world: World, images: List[s.ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base is read whole on the sender: it may have what is to be sent, or not; its being long is no reason
    to fail.
    """
    for limit in ("FOLLOW_S", "STALL_S"):
        monkeypatch.setattr(peers, limit, 0)
    digest = extents.copy(images[0].source, None, "raw", "test").extents[0]
    content = Path(images[0].source).read_bytes()[: extents.EXTENT]
    with locks.exclusive(lock(world, images[1])):
        read = lambda left: iter([packets.Extent(0, left[0], content)])  # noqa: E731
        assert [group[0].sha256 for group in peers.groups_of(str(world.root), [digest], 0, read)] == [digest]
        with pytest.raises(MissingImage):
            list(peers.groups_of(str(world.root), [digest], 0))


def test_who_has_no_more_is_not_asked_again_in_vain(world: World) -> None:
    asked: List[str] = []
    targets = Targets(lambda target: None)
    filling = Filling(
        step(world), targets, Account(targets, lambda **_: None), Orders(lambda: None), Config()
    )
    answers = {
        "none": MissingImage("no more of it"),
        "lost": HostUnreachable("gone"),
        "slow": ToolTimeout("slow"),
        "bad": ImageChanged("once more"),
    }

    def ask(host: str) -> None:
        asked.append(host)
        raise answers[host]

    filling._ask(("none", "bad"), lambda: True, ask)
    assert asked == ["none", "bad", "bad"]
    asked.clear()
    filling._ask(("none", "slow", "lost"), lambda: True, ask)
    assert asked == ["none", "slow", "lost"]
    asked.clear()
    # For the next base: who was not reached is not tried again, who is only slow with one of them is.
    filling._ask(("slow", "lost"), lambda: True, ask)
    assert asked == ["slow"]


def test_what_is_published_under_a_look_is_found_where_it_is_then(
    world: World, images: List[s.ImageRef]
) -> None:
    first = images[0]
    abandoned(world, first, EXTENTS)
    digests = list(extents.copy(first.source, None, "raw", "test").extents.values())
    there = extent_index.Held(str(world.root), digests)
    there.look(arriving=True)
    assert all(digest in there for digest in digests)
    world.on(step(world, base_steps.Part(first)))
    memory = mmap.mmap(-1, extents.EXTENT)
    assert [there.read(digest, memory) for digest in digests] == [None] * EXTENTS, "moved"
    there.look(arriving=True)
    assert all(there.read(digest, memory) for digest in digests)
    there.close()


def test_another_generation_in_the_same_place_is_read_from_its_own_file(
    world: World, images: List[s.ImageRef]
) -> None:
    first = images[0]
    abandoned(world, first, 1)
    old, new = os.urandom(extents.EXTENT), os.urandom(extents.EXTENT)
    path = world.store / "anew"
    path.write_bytes(new + old)
    wanted = [
        digest
        for name in (first.source, str(path))
        for digest in extents.copy(name, None, "raw", "test").extents.values()
    ]
    there = extent_index.Held(str(world.root), wanted)
    there.look(arriving=True)
    memory = mmap.mmap(-1, extents.EXTENT)
    assert there.read(wanted[0], memory)
    again = first._replace(
        source=str(path), generation=extents.copy(str(path), None, "raw", "test").generation
    )
    abandoned(world, again, 2)
    there.look(arriving=True)
    assert there.read(wanted[EXTENTS], memory) == new and there.read(wanted[EXTENTS + 1], memory) == old
    assert wanted[0] not in there
    there.close()


def test_manifest_of_what_still_arrives_is_read_once(
    world: World, images: List[s.ImageRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever passes it on looks at it again for each extent; of a large base the manifest alone is
    megabytes.
    """
    first, root, parse = images[0], str(world.root), extents.parse
    looked: List[str] = []

    class Extents(Dict[int, str]):
        def items(self) -> Any:
            looked.append("items")
            return super().items()

        def values(self) -> Any:
            looked.append("values")
            return super().values()

    def parsed(text: bytes) -> extents.Manifest:
        looked.append("parse")
        found = parse(text)
        return found._replace(extents=Extents(found.extents))

    abandoned(world, first, 1)
    with locks.exclusive(lock(world, first)):
        partial = Partial(root, first)
        monkeypatch.setattr(extents, "parse", parsed)
        serving = peers.groups(root, first.base_name, (), 0)
        assert next(serving)[0] and [item.number for item in next(serving)[1]] == [0]
        there = extent_index.Held(root, list(partial.manifest.extents.values()))  # type: ignore[union-attr]
        there.look(arriving=True)
        assert looked.count("parse") == 2
        looked.clear()
        with open(first.source, "rb") as file:
            for index in range(1, EXTENTS):
                assert partial.put(index, extents.read_at(file.fileno(), index))
                there.look(arriving=True)
                assert [item.number for item in next(serving)[1]] == [index]
        assert looked == [] and len(there._where) == EXTENTS and there.coming == set()
        there.close()
        partial.close()


def test_whole_partial_is_published_without_a_byte_from_anywhere(
    world: World, images: List[s.ImageRef]
) -> None:
    first = images[0]
    abandoned(world, first, EXTENTS)
    subprocess.run(["mv", first.source, f"{first.source}.away"], check=True)
    (found,) = world.on(step(world, base_steps.Part(first)))
    assert found == {"sources": {}, "troubles": []}
    assert cache.is_published(of(world, first)) and world.leftovers() == []


def test_finished_base_that_was_not_published_is_verified_and_not_fetched(
    world: World, images: List[s.ImageRef]
) -> None:
    first, root = images[0], str(world.root)
    for rotten in (False, True):
        cache.forget(of(world, first))
        abandoned(world, first, EXTENTS)
        place = base_names.staging(root, first.base_prefix)
        for name in (base_names.have(place), base_names.generation(place)):
            os.unlink(name)
        os.chmod(base_names.image(place), 0o440)
        if rotten:
            flip(Path(base_names.image(place)), 5 * MiB)
        (found,) = world.on(step(world, base_steps.Part(first)))
        good(world, first)
        assert os.stat(of(world, first).image).st_mode & 0o777 == 0o440
        assert isinstance(found, dict) and found["sources"].get("store", {"extents": 0})["extents"] == (
            1 if rotten else 0
        )


def test_file_that_others_have_is_not_gone_on_with(
    world: World, images: List[s.ImageRef], tmp_path: Path
) -> None:
    first, root = images[0], str(world.root)
    abandoned(world, first, EXTENTS)
    place = base_names.staging(root, first.base_prefix)
    for name in (base_names.have(place), base_names.generation(place)):
        os.unlink(name)
    theirs = tmp_path / "theirs"
    os.link(base_names.image(place), theirs)
    os.chmod(theirs, 0o440)
    world.on(step(world, base_steps.Part(first)))
    good(world, first)
    assert theirs.stat().st_nlink == 1 and theirs.stat().st_mode & 0o777 == 0o440
