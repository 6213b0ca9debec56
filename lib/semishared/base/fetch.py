# SPDX-License-Identifier: Apache-2.0
"""Have a base from wherever it can be had: the stream of a session, then peers, then the store, each for what is missing.

All of it happens under the lock of the image's bases: a second request for the same base waits and then finds it. What
came stays if a source fails: the next one is asked for the rest only, and so is the next run after a crash.
"""

from __future__ import annotations

import os
import shutil
from typing import Callable

from .. import store
from ..config import Config, load
from ..errors import BaseBusy, HostUnreachable, ImageChanged, NoSpace, SemisharedError, TransferCorrupt, UnsafeImage, WrongFormat
from ..model import layout_base
from ..model.steps import ImageRef
from ..model.steps_base import DescribeBase, FetchBase, ServeBase
from ..plan import eviction
from ..tools import compress, extents, files, inspection, locks
from ..tools.crash_points import point
from ..tools.rate_limit import Pace, stand_back
from ..tools.run import PATH
from ..wire import packets
from . import cache, partial, peers, room
from .account import Account, Orders, Tell
from .partial import Partial, ranges

ROUNDS = 2
"""How often all peers are asked before the store is (or nobody is left)."""


def receive(step: FetchBase, tell: Tell, poll: Callable[[], object]) -> dict[str, object]:
    """Have the base; return {"name", "sources", "troubles"}: `sources` is empty if it was here already."""
    image = step.image
    base = cache.at(step.root, image.base_name)
    lock = cache.lock_path(step.root, base)
    name = os.path.basename(base.directory)
    if cache.is_published(base):
        return {"name": name, "sources": {}, "troubles": []}
    if locks.is_held(lock):
        # A clone or another session is at it: nothing of this one's stream can be taken.
        if not step.wait:
            raise BaseBusy(f"base {name} is being made on {os.uname().nodename}")
        tell(event="progress", have=0, of=0, source="another session")
    with locks.exclusive(lock):
        if cache.is_published(base):
            return {"name": name, "sources": {}, "troubles": []}
        account = fill(step, tell, poll)
        cache.publish(step.root, base, image)
    return {"name": name, "sources": account.sources, "troubles": account.troubles}


def fill(step: FetchBase, tell: Tell, poll: Callable[[], object]) -> Account:
    """Make the base in staging, under its lock; raise what the last source said if something stays missing."""
    stand_back()
    room.evict_all(step.root, step.evict, cache.lock_path(step.root, cache.named(step.root, step.image, step.image.generation)))
    config = load()
    try:
        with files.enough_space(step.root):
            target = Partial(step.root, step.image)
            try:
                account = Account(target, tell)
                _Filling(step, target, account, Orders(poll), config).run()
                target.finish()
            finally:
                target.close()
            inspection.check(layout_base.image(target.directory), step.image.format, step.image.source)
    except (NoSpace, ImageChanged, UnsafeImage, WrongFormat):
        # What has come is space that the host lacks, or of a content that nobody has any more.
        shutil.rmtree(layout_base.staging(step.root, step.image.base_prefix), ignore_errors=True)
        raise
    return account


class _Filling:
    def __init__(self, step: FetchBase, target: Partial, account: Account, orders: Orders, config: Config) -> None:
        self.step, self.target, self.account, self.orders, self.config = step, target, account, orders, config
        self.error: SemisharedError | None = None

    def run(self) -> None:
        if self.step.stream:
            self._try("stream", self._stream)
        if self.step.from_store == "first":
            self._try("store", self._store)
        for _ in range(ROUNDS):
            failures = []
            for host in self.step.sources:
                if not self.target.is_complete and not self.orders.ended:
                    failures.append(self._try(host, lambda host=host: self._peer(host)))  # type: ignore[misc]
            if all(isinstance(error, HostUnreachable) for error in failures):
                break
        if not self.target.is_complete and self.step.from_store != "no":
            self._try("store", self._store)
        if not self.target.is_complete:
            raise self.error or HostUnreachable("nobody has the base")

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

    def _stream(self) -> None:
        from . import multicast

        multicast.receive(self.step, self.target, self.account, self.orders)

    def _peer(self, host: str) -> None:
        image = self.step.image
        name = image.base_name
        wanted = ranges(self.target.missing())
        if len(wanted) == 1 and self.target.manifest and len(self.target.missing()) == len(self.target.manifest.extents):
            wanted = ()
        step = ServeBase(self.step.root, name, wanted, packets.Session.new().text, self.step.codec, self.step.rate)
        had = [len(self.target.have)]

        def came(_: int, packed: int) -> None:
            self.account.came(host, had[0], packed)
            had[0] = len(self.target.have)

        peers.fetch(host, step, self.target, self.config, came, self.orders.skip)
        if not self.target.is_complete:
            raise TransferCorrupt(f"{host} does not have all of base {name}, or not as it should be")

    def _store(self) -> None:
        image, target, pace = self.step.image, self.target, Pace(self.step.rate)
        content = store.content(image)
        seen = content.see()
        current = content.generation(seen)
        if current and current != image.generation:
            raise ImageChanged(f"{image.source} does not have the content of generation {image.generation} any more")
        if target.manifest is None or not current:
            # A content that nobody has hashed may be that one all the same: a session may have changed nothing.
            expected = content.expected(image.generation) if current else None
            if expected is None:
                self._store_without_manifest(content, seen)
                return
            target.begin(expected.text())
        for index, data in content.read(target.missing()):
            pace.wait(len(data))
            had = len(target.have)
            if not target.put(index, data):
                where = f"first at byte {index * extents.EXTENT}"
                raise ImageChanged(f"{image.source} does not have the content of its generation, {where}")
            self.account.came("store", had, len(data))
        point("base copied")
        if content.see() != seen:
            raise ImageChanged(f"{image.source} was written to while it was copied")

    def _store_without_manifest(self, content: store.Content, seen: object) -> None:
        """Copy the image whole: that its hash is its generation shows only at the end."""
        target, path = self.target, layout_base.image(self.target.directory)
        files.unlink(path)
        found = content.copy(seen, path, self.step.image.format)
        if found.generation != self.step.image.generation or content.see() != seen:
            files.unlink(path)
            raise ImageChanged(f"{self.step.image.source} does not have the content of its generation")
        if not content.generation(seen):
            content.publish(found, seen)
        target.adopt(found)
        self.account.came("store", 0, len(found.extents) * extents.EXTENT)


def describe(step: DescribeBase) -> dict[str, object]:
    """Return what the front-end plans a session with."""
    image = step.image
    content = store.content(image)
    seen, current, expected, trouble = None, "", None, ""
    try:
        seen = content.see()
        current = content.generation(seen)
        expected = content.expected(current) if current else None
    except SemisharedError as e:
        # A host that does not reach the store can still have the base from a peer.
        trouble = e.line()
    wanted = image.generation or current
    has = bool(wanted) and cache.is_published(cache.named(step.root, image, wanted))
    staging = layout_base.staging(step.root, image.base_prefix)
    there = partial.generation_in(staging) == wanted
    tools = [*compress.available(), *(name for name in ("udp-sender", "udp-receiver") if shutil.which(name, path=PATH))]
    return {
        "generation": wanted, "current": current, "has": has, "manifest": expected is not None,
        "needed": 0 if has or trouble else _needed(content, seen, expected),
        "tools": tools, "trouble": trouble,
        "partial": len(partial.have(staging)) if there else 0,
        **room.list_bases(step.root),
    }  # fmt: skip


def _needed(content: store.Content, seen: object, expected: extents.Manifest | None) -> int:
    """Return about how many bytes the base will take: extents are not full where blocks of zeros are."""
    found = content.allocated(seen)
    return min(found, len(expected.extents) * extents.EXTENT) if expected else found


def fetch(
    root: str, image: ImageRef, content: store.Content, seen: object, current: str, ask: room.Ask | None, want: room.Want
) -> None:
    """Make the base of a known generation in staging, under its lock, from where the front-end says, or else from the store.

    `seen` and `current` are what the store has, None and '' if nothing.
    """
    needed = _needed(content, seen, content.expected(current) if current == image.generation else None) if seen else 0
    # What a killed action has left is gone on with, or removed.
    needed = max(0, needed - files.allocated(layout_base.image(layout_base.staging(root, image.base_prefix))))
    answer = room.ask_for_base(root, image, needed, ask, want)
    fill(_of_answer(root, image, answer), lambda **_: None, lambda: None)


def _of_answer(root: str, image: ImageRef, answer: dict[str, object]) -> FetchBase:
    sources = answer.get("sources")
    return FetchBase(
        root, image, tuple(map(str, sources if isinstance(sources, list) else ())), str(answer.get("from_store", "last")),
        "", str(answer.get("codec", "auto")), eviction.number(answer, "rate"), (), room.chosen(answer),
    )  # fmt: skip
