# SPDX-License-Identifier: Apache-2.0
"""Have bases from wherever they can be had: other bases here, the stream of a session, then peers, then the store.

Each is asked for what is missing. All of it happens under the locks of the images' bases: a second request for the same base
waits and then finds it. What came stays if a source fails: the next one is asked for the rest only, and so is the next run
after a crash.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from typing import Callable, Sequence

from .. import store
from ..config import Config, load
from ..errors import (
    BaseBusy,
    HostFailed,
    HostUnreachable,
    ImageChanged,
    NoSpace,
    SemisharedError,
    TransferCorrupt,
    UnsafeImage,
    WrongFormat,
)
from ..model import layout_base
from ..model.ranges import ranges, within
from ..model.steps import ImageRef
from ..model.steps_base import FetchBases, Part, ServeBase, ServeExtents
from ..plan import eviction
from ..tools import extents, files, inspection, locks
from ..tools.crash_points import point
from ..tools.rate_limit import Pace, stand_back
from ..wire import packets
from . import cache, describe, held, manifests, peers, room
from .account import Account, Orders, Tell
from .targets import Target, Targets

ROUNDS = 2
"""How often all peers are asked before the store is (or nobody is left)."""
MANY = 32768
"""Extents that a peer is asked for by their hashes at once: a message has a longest line (wire/messages.py)."""
OF_NO_USE = (NoSpace, ImageChanged, UnsafeImage, WrongFormat)
"""After these, what has come of a base is space that the host lacks, or of a content that nobody has any more."""


def receive(step: FetchBases, tell: Tell, poll: Callable[[], object]) -> dict[str, object]:
    """Have the bases; return {"sources", "troubles"}: `sources` is empty if they were here already."""
    lacking, busy = [], ""
    with ExitStack() as locked:
        # All that want several take them in the same order.
        for part in sorted(step.parts, key=lambda part: part.image.base_prefix):
            base = cache.at(step.root, part.image.base_name)
            if cache.is_published(base):
                continue
            lock = cache.lock_path(step.root, base)
            if locks.is_held(lock):
                # A clone or another session is at it: nothing of this one's stream can be taken.
                if not step.wait:
                    busy = part.image.base_name
                    continue
                tell(event="progress", have=0, of=0, source="another session")
            locked.enter_context(locks.exclusive(lock))
            if not cache.is_published(base):
                lacking.append(part)
        account = fill(step._replace(parts=tuple(lacking)), tell, poll) if lacking else None
    if busy:
        raise BaseBusy(f"base {busy} is being made on {os.uname().nodename}")
    return account.data() if account else {"sources": {}, "troubles": []}


def fill(step: FetchBases, tell: Tell, poll: Callable[[], object]) -> Account:
    """Make the bases, under their locks, and publish each that is whole; raise why one is not."""
    stand_back()
    locked = tuple(layout_base.image_lock(step.root, part.image.base_prefix) for part in step.parts)
    room.evict_all(step.root, step.evict, locked)
    targets = Targets()
    account = Account(targets, tell)
    filling = _Filling(step, targets, account, Orders(poll), load())
    error: SemisharedError | None = None
    try:
        with files.enough_space(step.root):
            for part in step.parts:
                targets.add(Target(step.root, part))
            filling.run()
    except NoSpace as e:
        error = e
    finally:
        failed = [_publish(step.root, target, error) for target in targets.all]
    why = error or next((found for found in failed if found), None)
    if why or not targets.is_complete:
        have = [target.part.image.base_name for target in targets.all if target.is_published]
        tell(event="came", have=have, **account.data())
        raise why or filling.error or HostUnreachable("nobody has the base")
    return account


def _publish(root: str, target: Target, error: SemisharedError | None) -> SemisharedError | None:
    """Publish a base if it is whole; return why it cannot be used, or be had any more."""
    image, error = target.part.image, error or target.error
    staging = layout_base.staging(root, image.base_prefix)
    try:
        if target.partial.is_complete:
            with files.enough_space(root):
                target.partial.finish()
            inspection.check(layout_base.image(staging), image.format, image.source)
            cache.publish(root, cache.named(root, image, image.generation), image)
            target.is_published = True
            return None
    except SemisharedError as e:
        error = e
    except OSError as e:
        error = HostFailed(f"on {os.uname().nodename}: {e}")
    finally:
        target.partial.close()
    if isinstance(error, OF_NO_USE):
        shutil.rmtree(staging, ignore_errors=True)
    return error


class _Filling:
    def __init__(self, step: FetchBases, targets: Targets, account: Account, orders: Orders, config: Config) -> None:
        self.step, self.targets, self.account, self.orders, self.config = step, targets, account, orders, config
        self.error: SemisharedError | None = None

    def run(self) -> None:
        step, targets = self.step, self.targets
        self._try("here", self._reuse)
        if step.stream:
            self._try("stream", self._stream)
        self._ask(step.sources, lambda: not targets.has_shared, self._shared)
        for target in targets.all:
            self._ask(target.part.holders, lambda target=target: _lacks(target), lambda host, target=target: self._peer(host, target))  # type: ignore[misc]
        for target in targets.all:
            if not target.partial.is_complete and (step.from_store == "all" or _lacks(target)):
                target.error = self._try("store", lambda target=target: self._store(target))  # type: ignore[misc]

    def _ask(self, hosts: Sequence[str], is_lacking: Callable[[], bool], work: Callable[[str], None]) -> None:
        for _ in range(ROUNDS):
            failures = []
            for host in hosts:
                if is_lacking() and not self.orders.ended:
                    failures.append(self._try(host, lambda host=host: work(host)))  # type: ignore[misc]
            if all(isinstance(error, HostUnreachable) for error in failures):
                break

    def _try(self, source: str, work: Callable[[], None]) -> SemisharedError | None:
        error = None
        try:
            work()
        except NoSpace:
            raise
        except SemisharedError as e:
            self.error = error = e
            self.account.troubles.append(f"{source}: {e.detail}")
        self.account.tell(source, now=True)
        return error

    def _reuse(self) -> None:
        for target in self.targets.all:
            found = None if target.is_known else manifests.manifest(self.step.root, target.part.image)
            if found:
                self.targets.begin(found.text())
        held.reuse(self.step.root, self.targets, lambda count, size: self.account.count("here", count, size))

    def _stream(self) -> None:
        from . import multicast

        multicast.receive(self.step, self.targets, self.account, self.orders)

    def _shared(self, host: str) -> None:
        """Take what the session shares from one of its hosts."""
        for target in self.targets.all:
            if target.part.shared and not target.is_known:
                self._peer(host, target)
        had, wanted = -1, self._lacking()
        while wanted and self.targets.count > had:
            had = self.targets.count
            step = ServeExtents(self.step.root, wanted[:MANY], packets.Session.new().text, self.step.codec, self.step.rate)
            self._fetch(host, step)
            wanted = self._lacking() if len(wanted) > MANY else ()
        if not self.targets.has_shared:
            raise TransferCorrupt(f"{host} does not have all that is shared, or not as it should be")

    def _lacking(self) -> tuple[str, ...]:
        return tuple(self.targets.digests((target, target.shared()) for target in self.targets.all))

    def _peer(self, host: str, target: Target) -> None:
        name = target.part.image.base_name
        wanted = ranges(target.partial.missing() if not self.step.sources else target.rest())
        self._fetch(host, ServeBase(self.step.root, name, wanted, packets.Session.new().text, self.step.codec, self.step.rate))
        if _lacks(target):
            raise TransferCorrupt(f"{host} does not have all of base {name}, or not as it should be")

    def _fetch(self, host: str, step: ServeBase | ServeExtents) -> None:
        had = [self.targets.count]

        def came(_: int, packed: int) -> None:
            self.account.came(host, had[0], packed)
            had[0] = self.targets.count

        peers.fetch(host, step, self.targets, self.config, came, self.orders.skip)

    def _store(self, target: Target) -> None:
        image, partial = target.part.image, target.partial
        content = store.content(image)
        seen = content.see()
        current = content.generation(seen)
        if current and current != image.generation:
            raise ImageChanged(f"{image.source} does not have the content of generation {image.generation} any more")
        if not target.is_known or not current:
            # A content that nobody has hashed may be that one all the same: a session may have changed nothing.
            expected = content.expected(image.generation) if current else None
            if expected is None:
                self._store_without_manifest(target, content, seen)
                return
            self.targets.begin(expected.text())
        wanted = partial.missing() if self.step.from_store == "all" else target.rest()
        first = within(target.part.first, wanted)
        for indices, rate in ((first, self.step.rate), (sorted(set(wanted) - set(first)), self.step.store_rate)):
            self._read(target, content, indices, Pace(rate))
        point("base copied")
        if content.see() != seen:
            raise ImageChanged(f"{image.source} was written to while it was copied")

    def _read(self, target: Target, content: store.Content, indices: list[int], pace: Pace) -> None:
        assert target.partial.manifest is not None
        for index, data in content.read(indices):
            pace.wait(len(data))
            had = self.targets.count
            if not self.targets.put(index, data, target.partial.manifest.extents[index]):
                where = f"first at byte {index * extents.EXTENT}"
                raise ImageChanged(f"{target.part.image.source} does not have the content of its generation, {where}")
            self.account.came("store", had, len(data))

    def _store_without_manifest(self, target: Target, content: store.Content, seen: object) -> None:
        """Copy the image whole: that its hash is its generation shows only at the end."""
        image, path = target.part.image, layout_base.image(target.partial.directory)
        if not target.is_known:
            files.unlink(path)
        # Else it is open: what comes for another base may belong into it as well.
        staged = files.staged_name(path)
        try:
            found = content.copy(seen, staged, image.format)
            if found.generation != image.generation or content.see() != seen:
                raise ImageChanged(f"{image.source} does not have the content of its generation")
            if not content.generation(seen):
                content.publish(found, seen)
            os.rename(staged, path)
        except BaseException:
            files.unlink(staged)
            raise
        had = self.targets.count
        target.partial.adopt(found)
        self.account.came("store", had, len(found.extents) * extents.EXTENT)


def _lacks(target: Target) -> bool:
    """Tell whether something has not come that the session does not share."""
    return bool(target.rest()) if target.is_known else not target.part.shared


def fetch(
    root: str, image: ImageRef, content: store.Content, seen: object, current: str, ask: room.Ask | None, want: room.Want
) -> None:
    """Make the base of a known generation in staging, under its lock, from where the front-end says, or else from the store.

    `seen` and `current` are what the store has, None and '' if nothing.
    """
    needed = describe.needed(content, seen, content.expected(current) if current == image.generation else None) if seen else 0
    # What a killed action has left is gone on with, or removed.
    needed = max(0, needed - files.allocated(layout_base.image(layout_base.staging(root, image.base_prefix))))
    answer = room.ask_for_base(root, image, needed, ask, want)
    fill(_of_answer(root, image, answer), lambda **_: None, lambda: None)


def _of_answer(root: str, image: ImageRef, answer: dict[str, object]) -> FetchBases:
    holders, rate = answer.get("sources"), eviction.number(answer, "rate")
    part = Part(image, tuple(map(str, holders if isinstance(holders, list) else ())))
    return FetchBases(root, (part,), (), "rest", "", str(answer.get("codec", "auto")), rate, rate, (), room.chosen(answer))
