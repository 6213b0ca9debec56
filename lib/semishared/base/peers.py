# SPDX-License-Identifier: Apache-2.0
"""Extents from host to host, over ssh: serve what is here, also while it is still arriving; fetch what is missing.

Who serves: any host, to whoever comes in as the drivers' user; OpenNebula's hosts reach one another as oneadmin for moves
and live migration already. What can be asked for is a base by its name, and nothing is changed by it. What came is taken
only if it is what the manifest says, and a manifest only if the generation is its hash.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Iterable, Iterator, Sequence

from ..config import Config
from ..errors import HostUnreachable, MissingImage, ToolTimeout
from ..model import layout_base
from ..model.ranges import ALL, within
from ..model.steps_base import ServeBase, ServeExtents
from ..tools import compress, extents, locks, progress
from ..tools.compress import Bytes
from ..tools.rate_limit import Pace, stand_back
from ..wire import packets
from ..wire.session import Session
from . import cache, partial
from .held import Held, manifest_in
from .partial import Partial
from .targets import Targets

FOLLOW_S = 20.0
"""Seconds without a further extent after which a base that is still arriving is not waited for any more."""
STALL_S = 12.0
"""Seconds without a packet after which a peer is given up; longer than a host needs to start and to compress the first."""
GRACE_S = 5.0
"""Seconds within which a host that is to receive a base too must have begun to."""
POLL_S = 0.05
WRITE_S = 30
"""Seconds after which a receiver that takes nothing any more is lost; ssh would wait for a quarter of an hour."""
GROUP = 4
"""Extents in one packet where there are more at once and nothing slows them down: fewer runs of the compressor."""
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
        """Look at what there is by now; tell whether there may be more soon: somebody is at it, or it is whole."""
        if self._fd >= 0 and self._have is None:
            return True
        # Before the look: who frees the lock has published by then, or leaves it as it is.
        is_made = locks.is_held(self._lock)
        for directory, whole in ((self._base.directory, True), (self._directory, False)):
            if not whole and partial.generation_in(directory) != self._base.generation:
                continue
            try:
                fd = os.open(layout_base.image(directory), os.O_RDONLY)
            except FileNotFoundError:
                continue
            self.manifest = manifest_in(directory, self._base.generation)
            if self.manifest is None:
                os.close(fd)
                continue
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._have = None if whole else partial.have(directory)
            return whole or is_made
        return is_made

    def ready(self, wanted: list[int]) -> list[int]:
        """Return which of the extents `wanted` are here."""
        return wanted if self._have is None else [index for index in wanted if index in self._have]

    def read(self, index: int) -> packets.Extent:
        assert self.manifest is not None
        return packets.Extent(index, self.manifest.extents[index], extents.read_at(self._fd, index))


def groups(root: str, name: str, wanted: tuple[tuple[int, int], ...], rate: int) -> Iterator[tuple[bytes, list[packets.Extent]]]:
    """Yield ("manifest text", []) once, then (b"", extents) as they are here; raise MissingImage when no more are to come."""
    here, last = _Here(root, name), time.monotonic()
    begun = last
    left: list[int] | None = None
    while left is None or left:
        may_come = here.look()
        if left is None and here.manifest is not None:
            left = within(wanted or ALL, sorted(here.manifest.extents))
            yield here.manifest.text(), []
        ready = here.ready(left) if left else []
        if not ready and left != []:
            now = time.monotonic()
            if not may_come and now - begun > GRACE_S:
                raise MissingImage(f"{'no more of ' * (left is not None)}base {name} is on {os.uname().nodename}")
            if now - last > FOLLOW_S:
                raise MissingImage(f"no more of base {name} arrives on {os.uname().nodename}")
            time.sleep(POLL_S)
            progress.touch()
            continue
        size = _size(left is not None and len(ready) == len(left), rate)
        for at in range(0, len(ready), size):
            yield b"", [here.read(index) for index in ready[at : at + size]]
        last = time.monotonic()
        sent = set(ready)
        left = [index for index in left or [] if index not in sent]


def groups_of(
    root: str, wanted: Sequence[str], rate: int, otherwise: Callable[[list[str]], Iterator[packets.Extent]] | None = None
) -> Iterator[list[packets.Extent]]:
    """Yield extents by their hashes, as they are here; `otherwise` reads those that neither are nor come, else they are left out.

    Raise MissingImage when no more of what was about to come does, and nothing reads it otherwise.
    """
    held, left = Held(root, wanted), list(dict.fromkeys(wanted))
    begun = last = time.monotonic()
    try:
        while left:
            held.look(arriving=True)
            ready = [digest for digest in left if digest in held]
            # Whoever is to receive something himself may be about to begin.
            is_early = otherwise is None and len(left) == len(wanted) and time.monotonic() - begun < GRACE_S
            if ready:
                size = _size(len(ready) == len(left), rate)
                for at in range(0, len(ready), size):
                    found = [(digest, held.read(digest)) for digest in ready[at : at + size]]
                    yield [packets.Extent(0, digest, content) for digest, content in found if content is not None]
                last = time.monotonic()
                left = [digest for digest in left if digest not in held]
            elif held.coming or held.is_beginning or is_early:
                # Who takes a stream leaves it not much later.
                if otherwise and time.monotonic() - last > STALL_S:
                    break
                if time.monotonic() - last > FOLLOW_S:
                    raise MissingImage(f"no more of what was to come arrives on {os.uname().nodename}")
                time.sleep(POLL_S)
                progress.touch()
            else:
                break
    finally:
        held.close()
    for item in otherwise(left) if otherwise else ():
        yield [item]


def _size(is_rest: bool, rate: int) -> int:
    """Return how many extents go in a packet: one by one while they arrive, as a chain is as much slower as packets are larger."""
    return GROUP if is_rest and not 0 < rate < GROUP_RATE else 1


def serve_extents(step: ServeExtents, write: Callable[[Bytes], None]) -> dict[str, object]:
    """Write extents as packets."""
    return _serve(((b"", group) for group in groups_of(step.root, step.wanted, step.rate)), step, write)


def serve(step: ServeBase, write: Callable[[Bytes], None]) -> dict[str, object]:
    """Write a base as packets."""
    return _serve(groups(step.root, step.name, step.wanted, step.rate), step, write)


def _serve(
    pieces: Iterable[tuple[bytes, list[packets.Extent]]], step: ServeBase | ServeExtents, write: Callable[[Bytes], None]
) -> dict[str, object]:
    stand_back()
    pace = Pace(step.rate)
    sealer, name, plain = packets.Sealer(packets.Session.of(step.session), compress.NONE), step.codec, 0
    for text, group in pieces:
        if text:
            _send(sealer.manifest(text), write, pace)
        if not group:
            continue
        if not plain:
            name = sealer.compressor = compress.choose(step.codec, b"".join(item.content for item in group), step.rate)
        plain += sum(len(item.content) for item in group)
        _send(sealer.extents(group), write, pace)
    return {"codec": name, "plain": plain}


PIECE = 256 << 10


def _send(pieces: list[Bytes], write: Callable[[Bytes], None], pace: Pace) -> None:
    for piece in pieces:
        for at in range(0, len(piece), PIECE):
            part = piece[at : at + PIECE]
            pace.wait(len(part))
            signal.alarm(WRITE_S)
            write(part)
            signal.alarm(0)
            progress.count("sent", len(part))


def fetch(
    host: str, step: ServeBase | ServeExtents, target: Partial | Targets, config: Config, tell: Callable[[int, int], None],
    skip: Callable[[str], bool],
) -> None:  # fmt: skip
    """Take from `host` what `target` lacks. Raise HostUnreachable, MissingImage, ToolTimeout, TransferCorrupt or what else stops it.

    `tell` is told (extents, packed bytes) after each packet; `skip` says whether to leave this source.
    """
    opener = packets.Opener(packets.Session.of(step.session))
    with Session(host, "fetch", config, bulk=True) as session:
        session.begin([step], last=True)
        last = time.monotonic()
        while True:
            message = session.read(within_s=1.0)
            if skip(host):
                raise HostUnreachable(f"{host} is left for a faster source")
            if message is None:
                if time.monotonic() - last > STALL_S:
                    raise ToolTimeout(f"nothing came from {host} for {STALL_S:.0f} s")
                continue
            if not isinstance(message, bytes):
                return
            progress.count("received", len(message))
            for packet in opener.feed(message):
                last = time.monotonic()
                take(target, opener, packet)
            tell(0, len(message))


def take(target: Partial | Targets, opener: packets.Opener, packet: packets.Packet) -> None:
    """Put what is in a packet where it belongs; raise TransferCorrupt."""
    kind, group, content = opener.open(packet)
    if kind == packets.MANIFEST:
        target.begin(bytes(content))
    for item in group:
        # One that is damaged where it comes from, or on the way, is asked for elsewhere.
        target.put(item.number, item.content, item.sha256)
    opener.reuse(packet)
