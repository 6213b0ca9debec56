# SPDX-License-Identifier: Apache-2.0
"""Fetch several bases at once, each under the lock of its image (sources: stage/fetch_from_sources.py).

The host publishes each base, and frees its lock, as soon as that base is complete: a VM that needs the first
of many bases does not wait for the others. If another action of this host is making a base, the fetch waits
for it last, and holds no lock meanwhile: two fetches of the same bases cannot deadlock. If all sources fail,
the extents that came stay, and the next run asks for the rest only.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import IO, Callable, Sequence

from .. import store
from ..base import cache, room
from ..config import load
from ..device import folders
from ..errors import (
    BaseBusy,
    HostFailed,
    HostUnreachable,
    ImageChanged,
    NoSpace,
    SemisharedError,
    ToolTimeout,
    UnsafeImage,
    WrongFormat,
)
from ..model.base import names as base_names
from ..model.base.steps import FetchBases, Fetched, Part
from ..model.disk import names as disk_names
from ..model.steps import ImageRef
from ..named import to_data
from ..plan.base import eviction
from ..tools import files, inspection, locks, progress
from ..tools.rate_limit import standing_back
from . import manifests
from .bases_in_progress import Account, Orders, Target, Targets, Tell
from .fetch_from_sources import Filling

OF_NO_USE = (NoSpace, ImageChanged, UnsafeImage, WrongFormat)
"""After these errors the host removes a partial base: it lacks the space, or no source has the content."""
PAUSE_S = 0.1
"""Seconds between two looks at whether another action has finished a base."""

Held = Sequence[tuple[Part, "IO[str] | None"]]
"""Bases whose image locks are held; the lock is None if the caller holds it."""


def receive(step: FetchBases, tell: Tell, poll: Callable[[], object]) -> Fetched:
    """Fetch the bases of a step; return what came from where.

    Raise the error of a base that no source delivers, after all others are here. Raise BaseBusy if another
    action is making one and the step does not `wait`.
    """
    reception, left = _Reception(step, tell, poll), list(step.parts)
    os.makedirs(disk_names.locks(step.root), exist_ok=True)
    waiting_since = 0.0
    while True:
        with ExitStack() as locked:
            left, free = reception.begin(left, locked)
            if free:
                waiting_since = 0.0
                reception.fill(free)
        if not left or reception.is_full:
            return reception.end()
        if free:
            continue
        lock = {part.image: base_names.image_lock(step.root, part.image.base_prefix) for part in left}
        busy = [image for image, path in lock.items() if locks.is_held(path)]
        if busy and not step.wait:
            return reception.end(BaseBusy(f"base {busy[0].base_name} is being made on {os.uname().nodename}"))
        # `is_held` takes a lock for a moment, so a lock that seemed busy may be free by now.
        waiting_since = waiting_since or time.monotonic()
        reception.wait(waiting_since)


def fill(step: FetchBases, tell: Tell, poll: Callable[[], object]) -> Fetched:
    """Fetch and publish bases whose locks the caller holds; raise the error of the first that fails."""
    reception = _Reception(step, tell, poll)
    reception.fill([(part, None) for part in step.parts])
    return reception.end()


class _Reception:
    """The bases that one step receives."""

    def __init__(self, step: FetchBases, tell: Tell, poll: Callable[[], object]) -> None:
        self.step, self._tell, self._evict = step, tell, step.evict
        self._full: NoSpace | None = None
        self._orders = Orders(poll)
        self._targets = Targets(self._settle)
        self.account = Account(self._targets, tell)
        self._filling = Filling(step, self._targets, self.account, self._orders, load())

    @property
    def is_full(self) -> bool:
        """Return True if the host has no space for the rest."""
        return self._full is not None

    def begin(
        self, parts: Sequence[Part], locked: ExitStack
    ) -> tuple[list[Part], list[tuple[Part, IO[str] | None]]]:
        """Take the free locks of the bases that are not here.

        Return the bases that other actions are making, and the others with their locks.
        """
        busy: list[Part] = []
        free: list[tuple[Part, IO[str] | None]] = []
        for part in parts:
            base = cache.at(self.step.root, part.image.base_name)
            if cache.is_published(base):
                self._has(part)
                continue
            lock = locks.attempt(cache.lock_path(self.step.root, base))
            if lock is None:
                busy.append(part)
                continue
            locked.enter_context(lock)
            if cache.is_published(base):
                lock.close()
                self._has(part)
            else:
                free.append((part, lock))
        return busy, free

    def wait(self, since: float) -> None:
        """Sleep while other actions hold the locks; raise ToolTimeout after locks.LIMIT_S seconds."""
        if time.monotonic() - since > locks.LIMIT_S:
            where, limit = os.uname().nodename, f"{locks.LIMIT_S:.0f} s"
            raise ToolTimeout(f"a base is being made on {where} by another action for over {limit}")
        self._orders.hear()
        self.account.tell("another session")
        progress.touch()
        time.sleep(PAUSE_S)

    def fill(self, held: Held) -> None:
        """Receive these bases, as far as sources deliver them."""
        with standing_back():
            self._fill(held)

    def _fill(self, held: Held) -> None:
        root = self.step.root
        paths = tuple(base_names.image_lock(root, part.image.base_prefix) for part, _ in held)
        room.evict_all(root, self._evict, paths)
        self._evict = ()
        try:
            with files.enough_space(root):
                for part, lock in held:
                    manifests.place(root, part)
                    self._targets.add(Target(root, part, lock))
                self._filling.run(self._give_up)
        except NoSpace as e:
            self._full = e
            for target in self._targets.open:
                target.error = e
                self._give_up(target)
        finally:
            self._targets.close()

    def end(self, busy: SemisharedError | None = None) -> Fetched:
        """Return the account; raise the error of a base that is missing, else `busy`."""
        lacking = [target for target in self._targets.all if not target.is_published]
        error: SemisharedError | None = next((target.error for target in lacking if target.error), None)
        if self._full and not error and not all(map(self._is_here, self.step.parts)):
            error = self._full  # a base that had no space to begin with is no target
        if lacking and not error:
            error = self._filling.error or HostUnreachable("nobody has the base")
        error = error or busy
        if error:
            self._tell(event="came", **to_data(self.account.data()))
            raise error
        return self.account.data()

    def _is_here(self, part: Part) -> bool:
        return cache.is_published(cache.at(self.step.root, part.image.base_name))

    def _has(self, part: Part) -> None:
        self._tell(event="base", name=part.image.base_name)

    def _settle(self, target: Target) -> None:
        """Publish a complete base and free its lock."""
        root, image = self.step.root, target.part.image
        try:
            with files.enough_space(root):
                target.partial.finish()
                inspection.check(base_names.image(target.partial.directory), image.format, image.source)
                cache.publish(root, cache.named(root, image, image.generation), image)
            target.is_published = True
            self._has(target.part)
        except SemisharedError as e:
            target.error = e
        except OSError as e:
            target.error = HostFailed(f"on {os.uname().nodename}: {e}")
        finally:
            self._give_up(target)

    def _give_up(self, target: Target) -> None:
        """End a base; remove what came of it if no later run can use that (OF_NO_USE)."""
        if target.is_over:
            return
        target.partial.close()
        if not target.is_published and isinstance(target.error, OF_NO_USE):
            folders.remove(target.partial.directory)
        target.end()


def fetch(
    root: str,
    image: ImageRef,
    content: store.Content,
    seen: object,
    current: str,
    ask: room.Ask | None,
    want: room.Want,
) -> None:
    """Fetch a base of a known generation; the caller holds its lock. Sources: as the front-end answers.

    `seen` and `current` are the image and its generation in the store, None and '' if it is out of reach.
    """
    expected = content.expected(current) if seen and current == image.generation else None
    needed = manifests.needed(content, seen, expected) if seen else 0
    # A killed action's partial base: `fill` resumes it, or removes another generation's.
    folders.stage(root, image.base_prefix, needed, base_names.base(root, image.base_name))
    needed = max(0, needed - files.allocated(base_names.image(base_names.staging(root, image.base_prefix))))
    answer = room.ask_for_base(root, image, needed, ask, want)
    fill(_of_answer(root, image, answer), lambda **_: None, lambda: None)


def _of_answer(root: str, image: ImageRef, answer: dict[str, object]) -> FetchBases:
    holders, rate = answer.get("sources"), eviction.number(answer, "rate")
    part = Part(image, tuple(map(str, holders if isinstance(holders, list) else ())))
    when = "quicker" if answer.get("from_store") == "quicker" else "rest"
    step = FetchBases(
        root, (part,), (), when, "", str(answer.get("codec", "auto")), rate, rate, (), room.chosen(answer)
    )
    told = answer.get("addresses")
    addresses = {str(host): str(address) for host, address in told.items()} if isinstance(told, dict) else {}
    return step._replace(addresses=addresses)
