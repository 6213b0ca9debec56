# SPDX-License-Identifier: Apache-2.0
"""Extents from host to host, over ssh or beside it (stage/clear_tcp.py): serve what is here, fetch the rest.

A host serves a base while it is still receiving it. It serves every peer that logs in as the drivers' user;
OpenNebula's hosts already log in to one another as oneadmin for migration. A peer can read a base by its
name, and change nothing. The receiver refuses an extent that the manifest does not list, and a manifest whose
hash is not the generation.
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Callable, Iterable, Iterator, Sequence, TypeVar

from ..base import cache
from ..config import Config, load
from ..errors import HostUnreachable, MissingImage, SemisharedError, ToolTimeout
from ..model.base import names as base_names
from ..model.base.names import ALL, within
from ..model.base.steps import ServeBase, Served, ServeExtents
from ..tools import compress, extents, locks, progress
from ..tools.compress import Bytes
from ..tools.rate_limit import Pace, stand_back
from ..wire import packets
from ..wire.session import Session
from . import clear_tcp, partial, rotten
from .bases_in_progress import Targets
from .clear_tcp import Source
from .extent_index import Held, manifest_in
from .partial import Partial

AHEAD = 2
"""Complete packets that wait to be stored, beside the one that is coming."""
LOOK_S = 0.25
"""Seconds between two looks at whether the reader is to end."""


class Incoming:
    """The packets of a serving peer, within a `with` block.

    A thread reads ahead: while one packet comes, the receiver hashes and writes the one before.
    """

    def __init__(self, source: Source, opener: packets.Opener) -> None:
        self._source, self._opener = source, opener
        self.came = 0
        """Bytes received so far."""
        self.at = 0.0
        """When the packet that `next` returned last was complete (time.monotonic())."""
        self._error: SemisharedError | None = None
        self._is_left = False
        self._queue: queue.Queue[tuple[packets.Packet | None, float]] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Incoming:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._is_left = True
        # Join first: the session then closes its files, and others may reuse their numbers.
        self._thread.join()
        self._source.close()

    def _read(self) -> None:
        try:
            while not self._is_left:
                part = self._source.read_into(self._opener.get_buffer, LOOK_S)
                if isinstance(part, memoryview):
                    self.came += len(part)
                    packet = self._opener.buffer_updated(len(part))
                    if packet:
                        self._put(packet)
                elif part is not None:
                    break
        except SemisharedError as e:
            self._error = e
        except OSError as e:
            # A local error of this source does not end the plan: the receiver asks another source.
            self._error = HostUnreachable(f"{self._source.host}: {e}")
        self._put(None)

    def _put(self, packet: packets.Packet | None) -> None:
        at = time.monotonic()
        while not self._is_left:
            try:
                return self._queue.put((packet, at), timeout=LOOK_S)
            except queue.Full:
                pass  # the disk is slow, or the receiver has left

    def next(self, within_s: float) -> packets.Packet | None:
        """Return the next packet, None at the end.

        Raise TimeoutError if none came within `within_s` seconds, or the error that ended the source.
        """
        try:
            packet, self.at = self._queue.get(timeout=within_s)
        except queue.Empty:
            raise TimeoutError from None
        if packet is None and self._error:
            raise self._error
        return packet


WRITE_S = 30
"""Seconds after which a receiver that reads nothing counts as lost; ssh would wait for 15 minutes."""
PIECE = 1 << 20
"""Bytes of one write. At a lower rate one second's bytes, so that the receiver sees progress."""
IN_FLIGHT, TRIED, TRIED_S = 12 << 20, 48 << 20, 0.5
"""Bytes that pipes and sockets buffer before the network's rate shows; bytes, or seconds, to measure it."""


class Out:
    """Packets on their way out, at the rate asked for. It measures the link to decide on compression."""

    def __init__(self, step: ServeBase | ServeExtents, write: Callable[[Bytes], None]) -> None:
        self._write, self._pace, self._rate = write, Pace(step.rate), step.rate
        self._codec, self._unpacks = step.codec, step.unpacks
        self.sealer = packets.Sealer(packets.Session.of(step.session), compress.NONE)
        self.plain, self._is_chosen = 0, False
        self._seen, self._seconds = 0, 0.0
        """Bytes sent after the first IN_FLIGHT, and the seconds that their writes took."""

    @property
    def packs(self) -> bool:
        return self.sealer.compressor != compress.NONE

    def choose(self, group: list[packets.Extent]) -> None:
        """Choose the compressor with this group as sample, as soon as the link's rate is known."""
        if self._is_chosen:
            return
        link = float(self._rate)
        if self._codec == compress.AUTO and not link:
            if self._seen < TRIED and self._seconds < TRIED_S:
                return
            link = self._seen / max(self._seconds, 1e-6)
        self._is_chosen = True
        if self._codec != compress.AUTO or self._rate or compress.pays(link):
            sample = b"".join(item.content for item in group)
            self.sealer.compressor = compress.choose(self._codec, self._unpacks, sample, link)

    def send(self, pieces: list[Bytes]) -> None:
        """Write a packet at the rate asked for."""
        size = min(PIECE, self._rate or PIECE)
        for piece in pieces:
            for at in range(0, len(piece), size):
                part = piece[at : at + size]
                self._pace.wait(len(part))
                started = time.monotonic()
                signal.alarm(WRITE_S)
                self._write(part)
                signal.alarm(0)
                if self.plain > IN_FLIGHT:
                    self._seen += len(part)
                    self._seconds += time.monotonic() - started
                progress.count("sent", len(part))


FOLLOW_S = 20.0
"""Seconds without a new extent after which the sender gives up a base that is still arriving."""
STALL_S = 12.0
"""Seconds without a packet, or LITTLE bytes, after which the receiver gives up a peer.

Longer than a host needs to start and to compress the first packet.
"""
LITTLE = 1 << 20
"""Bytes of a packet that count as a sign of life: at a low rate a whole one takes longer than STALL_S."""
GRACE_S = 5.0
"""Seconds in which a host that is itself to receive a base must begin to."""
POLL_S = 0.05
GROUP = 4
"""Extents in one packet, if as many are ready and the rate is high: fewer runs of the compressor."""
GROUP_RATE = 64 << 20
"""Bytes per second below which a packet has one extent: a packet that takes seconds looks like a stall."""


class _Here:
    """A base of this machine, whole or arriving."""

    def __init__(self, root: str, name: str) -> None:
        self._base, self._directory = cache.at(root, name), partial.directory_of(root, name)
        self._lock = cache.lock_path(root, self._base)
        self._fd = -1
        self._have: set[int] | None = None
        self.manifest: extents.Manifest | None = None

    def look(self) -> bool:
        """Open what is here by now.

        Return False if nothing more will come: the base is not complete, and no action holds its lock.
        """
        if self._fd >= 0 and self._have is None:
            return True
        # Before the look: the action that frees the lock has published the base by then, or left it.
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
        """Open the image in `directory`, read its manifest; return -1 if missing or of another generation."""
        try:
            fd = os.open(base_names.image(directory), os.O_RDONLY)
        except FileNotFoundError:
            return -1
        if whole or partial.generation_in(directory) == self._base.generation:
            # Read once, as the generation is its hash: a manifest of 1 TiB takes most of a second.
            if self.manifest is None:
                self.manifest = manifest_in(directory, self._base.generation)
            if self.manifest is not None:
                return fd
        os.close(fd)
        return -1

    def ready(self, wanted: list[int]) -> list[int]:
        """Return those of the extents `wanted` that are here."""
        return wanted if self._have is None else [index for index in wanted if index in self._have]

    def read(self, index: int, memory: mmap.mmap) -> packets.Extent:
        assert self.manifest is not None
        return packets.Extent(index, self.manifest.extents[index], extents.read_into(memory, self._fd, index))


def _limit(seconds: float, rate: int) -> float:
    """Return a limit in seconds, plus the time in which two extents arrive at `rate` bytes per second."""
    return seconds + (2 * extents.EXTENT / rate if rate else 0)


def groups(
    root: str, name: str, wanted: tuple[tuple[int, int], ...], rate: int, knows: bool = False
) -> Iterator[tuple[bytes, list[packets.Extent]]]:
    """Yield (the manifest's text, []) unless the receiver `knows` it, then (b"", extents) as they come.

    Raise MissingImage when no more will come. The next group overwrites the memory of these extents.
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
                what = f"base {name}" if left is None else f"no more of base {name}"
                raise MissingImage(f"{what} is on {os.uname().nodename}")
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
    """Yield extents by their hashes, as they arrive here. The next group overwrites their memory.

    `otherwise` reads those that neither are nor will be here; without it they are left out. Raise
    MissingImage if extents that were to arrive stop coming, and there is no `otherwise`.
    """
    held, left, memories = Held(root, wanted), list(dict.fromkeys(wanted)), _memories()
    begun = last = time.monotonic()
    try:
        while left:
            held.look(arriving=True)
            ready = [digest for digest in left if digest in held]
            # This host may be about to begin to receive the same bases.
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
                # Receivers of a stream leave it soon after STALL_S.
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
    """Yield what is ready in groups; one by one while it still arrives, as large packets slow a chain."""
    size = GROUP if is_rest and not 0 < rate < GROUP_RATE else 1
    return (ready[at : at + size] for at in range(0, len(ready), size))


def serve_extents(step: ServeExtents, tell: Callable[..., None], write: Callable[[Bytes], None]) -> Served:
    """Write the extents as packets; `tell` sends events beside them."""
    return _serve(((b"", group) for group in groups_of(step.root, step.wanted, step.rate)), step, tell, write)


def serve(step: ServeBase, tell: Callable[..., None], write: Callable[[Bytes], None]) -> Served:
    """Write a base as packets; `tell` sends events beside them."""
    return _serve(groups(step.root, step.name, step.wanted, step.rate, step.knows), step, tell, write)


def _serve(
    pieces: Iterable[tuple[bytes, list[packets.Extent]]],
    step: ServeBase | ServeExtents,
    tell: Callable[..., None],
    write: Callable[[Bytes], None],
) -> Served:
    stand_back()
    with ExitStack() as stack:
        if step.apart and load().is_network_trusted:
            write = stack.enter_context(clear_tcp.offered(packets.Session.of(step.session), tell, write))
        out = Out(step, write)
        for text, group in pieces:
            if text:
                out.send(out.sealer.manifest(text))
            if group:
                out.choose(group)
                # Without compression each extent is a packet: it need not wait for the rest.
                for some in [group] if out.packs else [[item] for item in group]:
                    out.send(out.sealer.extents(some))
                    out.plain += sum(len(item.content) for item in some)
    return Served(out.sealer.compressor, out.plain)


class Coming:
    """Receives from `host`, within a `with` block, what `target` lacks; calls `tell` with (0, packed bytes).

    The block and `turn` raise HostUnreachable, MissingImage, ToolTimeout, TransferCorrupt, or the peer's
    error.
    """

    def __init__(
        self,
        host: str,
        step: ServeBase | ServeExtents,
        target: Partial | Targets,
        config: Config,
        tell: Callable[[int, int], None],
        address: str = "",
        detoured: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`address`: where the host takes bulk data; `detoured` is called when it is reached by its name
        instead.
        """
        self._host, self._step, self._target, self._config, self._tell = host, step, target, config, tell
        self._address, self._detoured = address, detoured
        self._opener = packets.Opener(packets.Session.of(step.session))
        self._stack, self._is_over, self._refused = ExitStack(), False, list[int]()

    def __enter__(self) -> Coming:
        with ExitStack() as stack:
            session = Session(self._host, "fetch", self._config, bulk=True, address=self._address)
            self._session = stack.enter_context(session)
            unpacks, keys = tuple(compress.available()), packets.Session.of(self._step.session)
            step = self._step._replace(apart=self._config.is_network_trusted, unpacks=unpacks)
            session.begin([step], last=True)
            self._last, self._told, self._unheard = time.monotonic(), 0, 0
            incoming = Incoming(clear_tcp.Source(session, keys), self._opener)
            self._incoming = stack.enter_context(incoming)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        # An error ends the session at once, without waiting for a peer that is not done.
        left = None if self._is_over else HostUnreachable(f"{self._host} is left")
        self._stack.__exit__(kind, error or left, tb)
        if self._address and not self._session.address:
            self._detoured(" ".join(self._session.warnings[:1]))
        rotten.tell(self._host, self._step, self._refused, self._config)

    @property
    def at(self) -> float:
        """When the packet of the last `turn` was complete (time.monotonic())."""
        return self._incoming.at

    def turn(self, within_s: float) -> bool | None:
        """Store the next packet; return True if one came within `within_s` seconds, None at the end."""
        try:
            packet, has_come = self._incoming.next(within_s), True
        except TimeoutError:
            packet, has_come = None, False
        if has_come and packet is None:
            self._is_over = True
            return None
        # Also bytes of an incomplete packet: at a low rate one takes a while.
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
    address: str = "",
    detoured: Callable[[str], None] = lambda why: None,
) -> None:
    """Receive from `host` what `target` lacks, as Coming does, until `skip` says to leave this source."""
    with Coming(host, step, target, config, tell, address, detoured) as coming:
        while not skip(host):
            if coming.turn(1.0) is None:
                return
        raise HostUnreachable(f"{host} is left for a faster source")


def take(target: Partial | Targets, opener: packets.Opener, packet: packets.Packet) -> list[int]:
    """Store a packet; return the numbers of the extents that no base takes. Raise TransferCorrupt."""
    kind, group, content = opener.open(packet)
    if kind == packets.MANIFEST:
        target.begin(bytes(content))
    # An extent that was damaged at the sender or on the way comes from another source.
    wrong = [item.number for item in group if not target.put(item.number, item.content, item.sha256)]
    opener.reuse(packet)
    return wrong
