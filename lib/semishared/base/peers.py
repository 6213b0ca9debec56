# SPDX-License-Identifier: Apache-2.0
"""Extents from host to host, over ssh (apart.py: or beside it): serve what is here, also while it is still
arriving; fetch what is missing.

Who serves: any host, to whoever comes in as the drivers' user; OpenNebula's hosts reach one another as
oneadmin for moves and live migration already. What can be asked for is a base by its name, and nothing is
changed by it. What came is taken only if it is what the manifest says, and a manifest only if the generation
is its hash.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Callable, Iterable, Iterator, Sequence, TypeVar

from ..config import Config, load
from ..errors import HostUnreachable, MissingImage, ToolTimeout
from ..model import layout_base
from ..model.ranges import ALL, within
from ..model.steps_base import ServeBase, ServeExtents
from ..tools import compress, extents, locks, progress
from ..tools.compress import Bytes
from ..tools.rate_limit import stand_back
from ..wire import packets
from ..wire.session import Session
from . import apart, cache, partial, rotten
from .held import Held, manifest_in
from .incoming import Incoming
from .outgoing import Out
from .partial import Partial
from .targets import Targets

FOLLOW_S = 20.0
"""Seconds without a further extent after which a base that is still arriving is not waited for any more."""
STALL_S = 12.0
"""Seconds after which a peer is given up that has sent neither a packet nor LITTLE; longer than a host needs
to start and to compress the first.
"""
LITTLE = 1 << 20
"""Bytes of a packet that are a sign of life: on a slow network, or at a low rate, a whole one takes longer
than that.
"""
GRACE_S = 5.0
"""Seconds within which a host that is to receive a base too must have begun to."""
POLL_S = 0.05
GROUP = 4
"""Extents in one packet where there are more at once and nothing slows them down: fewer runs of the
compressor.
"""
GROUP_RATE = 64 << 20
"""Bytes per second below which extents go one by one: a packet that takes seconds looks like a standstill."""


class _Here:
    """A base of this machine, whole or arriving."""

    def __init__(self, root: str, name: str) -> None:
        self._base, self._directory = cache.at(root, name), partial.directory_of(root, name)
        self._lock = cache.lock_path(root, self._base)
        self._fd = -1
        self._have: set[int] | None = None
        self.manifest: extents.Manifest | None = None

    def look(self) -> bool:
        """Look at what there is by now; tell whether there may be more soon: somebody is at it, or it is
        whole.
        """
        if self._fd >= 0 and self._have is None:
            return True
        # Before the look: who frees the lock has published by then, or leaves it as it is.
        is_made = locks.is_held(self._lock)
        for directory, whole in ((self._base.directory, True), (self._directory, False)):
            fd = self._opened(directory, whole)
            if fd < 0:
                continue
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._have = None if whole else partial.have(directory)
            return whole or is_made
        return is_made

    def _opened(self, directory: str, whole: bool) -> int:
        """Open the image in `directory`, whose manifest is known then; return -1 if it is not there, or not
        that of this base.
        """
        try:
            fd = os.open(layout_base.image(directory), os.O_RDONLY)
        except FileNotFoundError:
            return -1
        if whole or partial.generation_in(directory) == self._base.generation:
            # A generation is its manifest's hash: what was read once is what it is. Of 1 TiB to read it takes
            # most of a second.
            if self.manifest is None:
                self.manifest = manifest_in(directory, self._base.generation)
            if self.manifest is not None:
                return fd
        os.close(fd)
        return -1

    def ready(self, wanted: list[int]) -> list[int]:
        """Return which of the extents `wanted` are here."""
        return wanted if self._have is None else [index for index in wanted if index in self._have]

    def read(self, index: int, memory: mmap.mmap) -> packets.Extent:
        assert self.manifest is not None
        return packets.Extent(index, self.manifest.extents[index], extents.read_into(memory, self._fd, index))


def _limit(seconds: float, rate: int) -> float:
    """Return a limit for who keeps to a rate, and may be waiting for an extent that comes to him at it."""
    return seconds + (2 * extents.EXTENT / rate if rate else 0)


def groups(
    root: str, name: str, wanted: tuple[tuple[int, int], ...], rate: int, knows: bool = False
) -> Iterator[tuple[bytes, list[packets.Extent]]]:
    """Yield (the manifest's text, []) unless who asks `knows` it, then (b"", extents) as they are here.

    Raise MissingImage when no more are to come. The extents are in memory that the next ones are read into.
    """
    here, memories = _Here(root, name), _memories()
    begun = last = time.monotonic()
    left: list[int] | None = None
    while left is None or left:
        may_come = here.look()
        if left is None and here.manifest is not None:
            left = within(wanted or ALL, sorted(here.manifest.extents))
            if not knows:
                yield here.manifest.text(), []
        ready = here.ready(left) if left else []
        if not ready and left != []:
            now = time.monotonic()
            if not may_come and now - begun > GRACE_S:
                raise MissingImage(
                    f"{'no more of ' * (left is not None)}base {name} is on {os.uname().nodename}"
                )
            if now - last > _limit(FOLLOW_S, rate):
                raise MissingImage(f"no more of base {name} arrives on {os.uname().nodename}")
            time.sleep(POLL_S)
            progress.touch()
            continue
        for some in _in_groups(ready, len(ready) == len(left or ()), rate):
            yield b"", [here.read(index, memory) for index, memory in zip(some, memories)]
        last = time.monotonic()
        sent = set(ready)
        left = [index for index in left or [] if index not in sent]


def groups_of(
    root: str,
    wanted: Sequence[str],
    rate: int,
    otherwise: Callable[[list[str]], Iterator[packets.Extent]] | None = None,
) -> Iterator[list[packets.Extent]]:
    """Yield extents by their hashes, as they are here; `otherwise` reads those that neither are nor come,
    else they are left out. They are in memory that the next ones are read into.

    Raise MissingImage when no more of what was about to come does, and nothing reads it otherwise.
    """
    held, left, memories = Held(root, wanted), list(dict.fromkeys(wanted)), _memories()
    begun = last = time.monotonic()
    try:
        while left:
            held.look(arriving=True)
            ready = [digest for digest in left if digest in held]
            # Whoever is to receive something himself may be about to begin.
            is_early = otherwise is None and len(left) == len(wanted) and time.monotonic() - begun < GRACE_S
            if ready:
                for some in _in_groups(ready, len(ready) == len(left), rate):
                    found = [(digest, held.read(digest, memory)) for digest, memory in zip(some, memories)]
                    yield [
                        packets.Extent(0, digest, content) for digest, content in found if content is not None
                    ]
                last = time.monotonic()
                left = [digest for digest in left if digest not in held]
            elif held.coming or held.is_beginning or is_early:
                # Who takes a stream leaves it not much later.
                if otherwise and time.monotonic() - last > STALL_S:
                    break
                if time.monotonic() - last > _limit(FOLLOW_S, rate):
                    raise MissingImage(f"no more of what was to come arrives on {os.uname().nodename}")
                time.sleep(POLL_S)
                progress.touch()
            else:
                break
    finally:
        held.close()
    for item in otherwise(left) if otherwise else ():
        yield [item]


def _memories() -> list[mmap.mmap]:
    return [mmap.mmap(-1, extents.EXTENT) for _ in range(GROUP)]


Wanted = TypeVar("Wanted", int, str)


def _in_groups(ready: Sequence[Wanted], is_rest: bool, rate: int) -> Iterator[Sequence[Wanted]]:
    """Yield what is ready in groups: one by one while it arrives, as a chain is as much slower as packets are
    larger.
    """
    size = GROUP if is_rest and not 0 < rate < GROUP_RATE else 1
    return (ready[at : at + size] for at in range(0, len(ready), size))


def serve_extents(
    step: ServeExtents, send: Callable[..., None], write: Callable[[Bytes], None]
) -> dict[str, object]:
    """Write extents as packets; `send` says what there is to be said beside them."""
    return _serve(((b"", group) for group in groups_of(step.root, step.wanted, step.rate)), step, send, write)


def serve(step: ServeBase, send: Callable[..., None], write: Callable[[Bytes], None]) -> dict[str, object]:
    """Write a base as packets; `send` says what there is to be said beside them."""
    return _serve(groups(step.root, step.name, step.wanted, step.rate, step.knows), step, send, write)


def _serve(
    pieces: Iterable[tuple[bytes, list[packets.Extent]]],
    step: ServeBase | ServeExtents,
    send: Callable[..., None],
    write: Callable[[Bytes], None],
) -> dict[str, object]:
    stand_back()
    with ExitStack() as stack:
        if step.apart and load().is_network_trusted:
            write = stack.enter_context(apart.offered(packets.Session.of(step.session), send, write))
        out = Out(step, write)
        for text, group in pieces:
            if text:
                out.send(out.sealer.manifest(text))
            if group:
                out.choose(group)
                # What is not packed need not wait for what comes behind it in its group.
                for some in [group] if out.packs else [[item] for item in group]:
                    out.send(out.sealer.extents(some))
                    out.plain += sum(len(item.content) for item in some)
    return {"codec": out.sealer.compressor, "plain": out.plain}


class Coming:
    """What `host` sends of what `target` lacks, within a `with` block. It, or its `turn`, raises
    HostUnreachable, MissingImage, ToolTimeout, TransferCorrupt or what else stops it.

    `tell` is told (extents, packed bytes) after each packet.
    """

    def __init__(
        self,
        host: str,
        step: ServeBase | ServeExtents,
        target: Partial | Targets,
        config: Config,
        tell: Callable[[int, int], None],
    ) -> None:
        self._host, self._step, self._target, self._config, self._tell = host, step, target, config, tell
        self._opener = packets.Opener(packets.Session.of(step.session))
        self._stack, self._is_over, self._refused = ExitStack(), False, list[int]()

    def __enter__(self) -> Coming:
        with ExitStack() as stack:
            session = stack.enter_context(Session(self._host, "fetch", self._config, bulk=True))
            step = self._step._replace(
                apart=self._config.is_network_trusted, unpacks=tuple(compress.available())
            )
            session.begin([step], last=True)
            self._last, self._told, self._unheard = time.monotonic(), 0, 0
            self._incoming = stack.enter_context(
                Incoming(apart.Source(session, packets.Session.of(self._step.session)), self._opener)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # Who is left before he has said all is not waited for.
        self._stack.__exit__(
            kind, error or (None if self._is_over else HostUnreachable(f"{self._host} is left")), tb
        )
        rotten.tell(self._host, self._step, self._refused, self._config)

    @property
    def at(self) -> float:
        """When that packet was here of which `tell` is told: time.monotonic()."""
        return self._incoming.at

    def turn(self, within_s: float) -> bool | None:
        """Take the next packet, if there is one in that time; tell whether there was, None if no other
        comes.
        """
        try:
            packet, has_come = self._incoming.next(within_s), True
        except TimeoutError:
            packet, has_come = None, False
        if has_come and packet is None:
            self._is_over = True
            return None
        # Also of a packet that is still coming: at a low rate that takes a while.
        more, self._told = self._incoming.came - self._told, self._incoming.came
        self._unheard += more
        limit = _limit(STALL_S, self._step.rate)
        if has_come or self._unheard >= LITTLE:
            self._last, self._unheard = time.monotonic(), 0
        elif time.monotonic() - self._last > limit:
            raise ToolTimeout(f"{self._unheard} bytes came from {self._host} in {limit:.0f} s")
        progress.count("received", more)
        if packet:
            self._refused += take(self._target, self._opener, packet)
        self._tell(0, more)
        return has_come


def fetch(
    host: str,
    step: ServeBase | ServeExtents,
    target: Partial | Targets,
    config: Config,
    tell: Callable[[int, int], None],
    skip: Callable[[str], bool],
) -> None:
    """Take from `host` what `target` lacks, as Coming does; `skip` says whether to leave this source."""
    with Coming(host, step, target, config, tell) as coming:
        while not skip(host):
            if coming.turn(1.0) is None:
                return
        raise HostUnreachable(f"{host} is left for a faster source")


def take(target: Partial | Targets, opener: packets.Opener, packet: packets.Packet) -> list[int]:
    """Put what is in a packet where it belongs; return the numbers of what belongs nowhere. Raise
    TransferCorrupt.
    """
    kind, group, content = opener.open(packet)
    if kind == packets.MANIFEST:
        target.begin(bytes(content))
    # One that is damaged where it comes from, or on the way, is asked for elsewhere.
    wrong = [item.number for item in group if not target.put(item.number, item.content, item.sha256)]
    opener.reuse(packet)
    return wrong
