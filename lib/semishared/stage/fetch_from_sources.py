# SPDX-License-Identifier: Apache-2.0
"""Sources of missing extents: other bases here, a session's stream, its hosts, holders, the store.

The receiver asks each source for the missing extents only. What came stays if a source fails.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Sequence

from .. import store
from ..config import Config
from ..errors import (
    HostUnreachable,
    ImageChanged,
    MissingImage,
    NoSpace,
    SemisharedError,
    ToolTimeout,
    TransferCorrupt,
)
from ..model.base import names as base_names
from ..model.base.names import ranges, within
from ..model.base.steps import FetchBases, ServeBase, ServeExtents
from ..plan.base import sharing
from ..tools import extents, files
from ..tools.effects import point
from ..tools.rate_limit import Pace
from ..wire import packets
from . import extent_index, manifests, peers, rotten, source_speed
from .bases_in_progress import Account, Orders, Target, Targets
from .manifests import check_unchanged

ROUNDS = 2
"""How often the receiver asks peers before it asks the store, or gives up."""
MANY = 32768
"""Hashes in one request to a peer: wire/messages.py limits the length of a line."""


class Filling:
    """Fetches the missing extents of `targets` from the sources that `step` names."""

    def __init__(
        self, step: FetchBases, targets: Targets, account: Account, orders: Orders, config: Config
    ) -> None:
        self.step, self.targets, self.account = step, targets, account
        self.orders, self.config = orders, config
        self.error: SemisharedError | None = None
        """The last error of any source."""
        self._addresses = dict(step.addresses)
        """Where peers take bulk data, but for those that were not reached there."""
        self._gone: set[str] = set()
        """Unreachable hosts."""
        self._slow: set[str] = set()
        """Hosts that the receiver left for faster ones."""
        self._is_dear: Callable[[], bool] = lambda: False
        """Returns True if another source would be quicker than the present one."""

    def run(self, give_up: Callable[[Target], None]) -> None:
        """Fetch what is missing; raise NoSpace. Call `give_up` for each base that no source delivers."""
        step, targets, self._gone = self.step, self.targets, set()
        self._try("here", self._reuse)
        if step.stream:
            self._try("stream", self._stream)
            # The stream is sent once, so a later round must not wait for it.
            self.step = step = step._replace(stream=())
        for target in targets.open:
            if target.part.first and not target.part.holders:
                # The store comes first: the other hosts wait for this host's part.
                self._try("store", lambda target=target: self._store(target, is_first=True))  # type: ignore[misc]
        self._ask(step.sources, lambda: not targets.has_shared, self._shared)
        for target in targets.open:
            self._own(target)
            if target.error:
                give_up(target)

    def _own(self, target: Target) -> None:
        """Fetch the extents of one base that the session does not share; publish it before the next one."""
        if self.step.from_store == "quicker" and target.part.holders and target.is_known:
            self._quickest(target)
        self._ask(
            target.part.holders,
            lambda: not target.is_over and target.lacks,
            lambda host: self._peer(host, target),
        )
        if not target.is_over and (self.step.from_store == "all" or target.lacks):
            choice = source_speed.Choice(self.step.root, [_store_of(target)], target.partial)
            error = self._priced(target, choice)
            target.error = target.error or error

    def _quickest(self, target: Target) -> None:
        """Fetch one base from its holders or the store, always from the quicker one.

        A source that fails, or lacks an extent, is not asked again.
        """
        sources = [*target.part.holders, _store_of(target)]
        choice = source_speed.Choice(self.step.root, sources, target.partial)
        while not target.is_over and target.lacks and not self.orders.ended and not choice.is_over:
            self._priced(target, choice)

    def _priced(self, target: Target, choice: source_speed.Choice) -> SemisharedError | None:
        """Ask the source that `choice` picks, and note its speed."""
        name, error = choice.begin(), None
        self._is_dear = choice.is_dear
        try:
            if choice.tried:
                error = self._beside(target, choice)
            elif name == _store_of(target):
                error = self._try("store", lambda: self._store(target))
            else:
                error = self._try(name, lambda: self._peer(name, target))
        finally:
            self._is_dear = lambda: False
            choice.end(has_failed=error is not None)
        return error

    def _beside(self, target: Target, choice: source_speed.Choice) -> SemisharedError | None:
        """Read the store and, at the same time, some extents from the untried peer, to measure that peer."""
        host, had = choice.tried, [self.targets.count]
        looked, was_unseen = time.monotonic(), False

        def came(_: int, packed: int) -> None:
            choice.gave(self.targets.count - had[0], coming.at)
            self.account.came(host, had[0], packed)

        def look() -> bool:
            """Store what the peer has sent by now; return True if the store is to be left."""
            nonlocal looked, was_unseen
            before, looked = looked, time.monotonic()
            was_unseen = was_unseen or looked - before > peers.STALL_S
            more: bool | None = True
            try:
                while choice.tried and more and not choice.is_dear():
                    had[0] = self.targets.count
                    more = coming.turn(0)
                if more is None and not choice.is_dear():
                    raise _lacking(host, target)
            except NoSpace:
                raise
            except SemisharedError as e:
                self._failed(host, e)
                # A peer gives up if its receiver takes nothing for long (stage/peers.py). If the
                # store stood still meanwhile, the peer is not to blame.
                choice.drop(has_failed=not was_unseen)
            return choice.is_dear()

        what = (self._serve(target, choice.asked), self.targets, self.config, came)
        with peers.Coming(host, *what, *self._way(host)) as coming:
            self._is_dear = look
            return self._try("store", lambda: self._store(target, but=choice.asked))

    def _ask(self, hosts: Sequence[str], is_lacking: Callable[[], bool], work: Callable[[str], None]) -> None:
        left = [host for host in hosts if host not in self._gone]
        for _ in range(ROUNDS):
            failures: dict[str, SemisharedError | None] = {}
            for host in left:
                if is_lacking() and not self.orders.ended:
                    failures[host] = self._try(host, lambda host=host: work(host))  # type: ignore[misc]
            # To ask an unreachable host again for each of many bases costs a time limit each time.
            gone = {host for host, error in failures.items() if isinstance(error, HostUnreachable)}
            self._gone |= gone - self._slow
            # A source without the extents, or too slow, does not improve in the next round.
            left = [host for host in left if not isinstance(failures.get(host), (MissingImage, ToolTimeout))]
            lasting = (HostUnreachable, MissingImage, ToolTimeout)
            if all(isinstance(error, lasting) for error in failures.values()):
                break

    def _try(self, source: str, work: Callable[[], None]) -> SemisharedError | None:
        error = None
        try:
            work()
        except NoSpace:
            raise
        except SemisharedError as e:
            error = self._failed(source, e)
        self.account.tell(source, now=True)
        return error

    def _failed(self, source: str, error: SemisharedError) -> SemisharedError:
        self.error = error
        self.account.troubles.append(f"{source}: {error.detail}")
        return error

    def _reuse(self) -> None:
        for target in self.targets.open:
            found = None if target.is_known else manifests.manifest(self.step.root, target.part.image)
            if found:
                self.targets.begin(found.text())
        rotted = extent_index.reuse(
            self.step.root, self.targets, lambda count, size: self.account.count("here", count, size)
        )
        own = {target.part.image.base_prefix for target in self.targets.open}
        for directory, indices in rotted.items():
            name = os.path.basename(directory)
            if base_names.named(name):
                rotten.doubt(self.step.root, name, indices, is_locked=base_names.prefix_of(name) in own)

    def _stream(self) -> None:
        from . import multicast

        multicast.receive(self.step, self.targets, self.account, self.orders)

    def _shared(self, host: str) -> None:
        """Take the session's shared extents from a host; raise TransferCorrupt if some do not come."""
        for target in self.targets.open:
            if target.part.shared and not target.is_known:
                self._peer(host, target)
        had, wanted = -1, self._lacking()
        while wanted and self.targets.count > had:
            had = self.targets.count
            how = (packets.Session.new().text, self.step.codec, self.step.rate)
            self._fetch(host, ServeExtents(self.step.root, wanted[:MANY], *how))
            wanted = self._lacking() if len(wanted) > MANY else ()
        if not self.targets.has_shared:
            raise TransferCorrupt(f"{host} does not have all that is shared, or not as it should be")

    def _lacking(self) -> tuple[str, ...]:
        return tuple(self.targets.digests((target, target.shared()) for target in self.targets.open))

    def _peer(self, host: str, target: Target) -> None:
        wanted = target.rest() if self.step.sources else target.partial.missing()
        self._fetch(host, self._serve(target, wanted))
        if not target.is_over and target.lacks:
            raise _lacking(host, target)

    def _serve(self, target: Target, wanted: Sequence[int]) -> ServeBase:
        what = (self.step.root, target.part.image.base_name, ranges(wanted))
        how = (packets.Session.new().text, self.step.codec, self.step.rate)
        return ServeBase(*what, *how, knows=target.is_known)

    def _fetch(self, host: str, step: ServeBase | ServeExtents) -> None:
        had = [self.targets.count]

        def came(_: int, packed: int) -> None:
            self.account.came(host, had[0], packed)
            had[0] = self.targets.count

        peers.fetch(host, step, self.targets, self.config, came, self._skip, *self._way(host))

    def _way(self, host: str) -> tuple[str, Callable[[str], None]]:
        """Return a peer's bulk address, and what to call if it is not reached there."""

        def detoured(why: str) -> None:
            # Each further try would cost a time limit.
            self._addresses.pop(host, None)
            self.account.troubles.append(why)

        return self._addresses.get(host, ""), detoured

    def _skip(self, host: str) -> bool:
        is_left = self.orders.skip(host) or self._is_dear()
        if is_left:
            self._slow.add(host)
        return is_left

    def _store(self, target: Target, *, is_first: bool = False, but: Sequence[int] = ()) -> None:
        """Read the missing extents from the store, without the indices `but`.

        `is_first`: read only the part that the session's other hosts wait for; nothing without a manifest.
        """
        image, partial = target.part.image, target.partial
        content = store.content(image)
        seen = content.see()
        current = content.generation(seen)
        if current and current != image.generation:
            raise ImageChanged(
                f"{image.source} does not have the content of generation {image.generation} any more"
            )
        if not target.is_known or not current:
            # An image without a known generation may still have that content: a session may have
            # changed nothing.
            expected = content.expected(image.generation) if current else None
            if expected is None:
                if not is_first:
                    self._store_without_manifest(target, content, seen)
                return
            self.targets.begin(expected.text())
        lacking = partial.missing() if self.step.from_store == "all" else target.rest()
        wanted = [index for index in lacking if index not in but]
        first = within(target.part.first, wanted)
        self._read(target, content, seen, first, Pace(self.step.rate))
        if not is_first:
            self._read(target, content, seen, sorted(set(wanted) - set(first)), Pace(self.step.store_rate))
        point("base copied")
        check_unchanged(image, content, seen)

    def _read(
        self, target: Target, content: store.Content, seen: object, indices: list[int], pace: Pace
    ) -> None:
        if not indices:
            return
        for index, data in content.read(indices, seen):
            assert target.partial.manifest is not None
            pace.wait(len(data))
            had = self.targets.count
            if not self.targets.put(index, data, target.partial.manifest.extents[index]):
                where = f"first at byte {index * extents.EXTENT}"
                raise ImageChanged(
                    f"{target.part.image.source} does not have the content of its generation, {where}"
                )
            self.account.came("store", had, len(data))
            if self._is_dear():
                return

    def _store_without_manifest(self, target: Target, content: store.Content, seen: object) -> None:
        """Copy the whole image; only the hash at the end shows whether it is the generation."""
        image, path = target.part.image, base_names.image(target.partial.directory)
        if not target.is_known:
            files.unlink(path)
        # Known: the file stays open. Extents of another base may belong to it as well.
        staged = files.staged_name(path)
        try:
            found = content.copy(seen, staged, image.format)
            if found.generation != image.generation or content.see() != seen:
                raise ImageChanged(f"{image.source} does not have the content of its generation")
            # Also an image whose generation the store knows: its manifest may be lost.
            content.publish(found, seen)
            os.rename(staged, path)
        except BaseException:
            files.unlink(staged)
            raise
        had = self.targets.count
        self.targets.adopt(target, found)
        self.account.came("store", had, len(found.extents) * extents.EXTENT)


def _lacking(host: str, target: Target) -> TransferCorrupt:
    name = target.part.image.base_name
    return TransferCorrupt(f"{host} does not have all of base {name}, or not as it should be")


def _store_of(target: Target) -> str:
    """Return the name of the base's store among the sources."""
    return sharing.STORE + str(target.part.image.store)
