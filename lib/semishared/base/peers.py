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
from typing import Callable, Iterator

from ..config import Config
from ..errors import HostUnreachable, ImageChanged, MissingImage, TransferCorrupt
from ..model import layout_base
from ..model.steps_base import ServeBase
from ..tools import compress, extents, locks, progress
from ..tools.compress import Bytes
from ..tools.rate_limit import Pace, stand_back
from ..wire import packets
from ..wire.session import Session
from . import cache, partial
from .partial import Partial

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
        """Look at what there is by now; tell whether there is anything, or may soon be."""
        if self._fd >= 0 and self._have is None:
            return True
        for directory, whole in ((self._base.directory, True), (self._directory, False)):
            if not whole and partial.generation_in(directory) != self._base.generation:
                continue
            try:
                fd = os.open(layout_base.image(directory), os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                with open(layout_base.manifest(directory), "rb") as file:
                    text = file.read()
                if extents.generation_of(text) != self._base.generation:
                    raise ImageChanged("a manifest of another generation")
                self.manifest = extents.parse(text)
            except (FileNotFoundError, ImageChanged):
                os.close(fd)
                continue
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = fd
            self._have = None if whole else partial.have(directory)
            return True
        return locks.is_held(self._lock)

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
        if not here.look() and time.monotonic() - begun > GRACE_S:
            raise MissingImage(f"base {name} is not on {os.uname().nodename}")
        if left is None and here.manifest is not None:
            known = here.manifest.extents
            chosen = [index for first, end in wanted for index in range(first, min(end, max(known, default=0) + 1))]
            left = [index for index in chosen if index in known] if wanted else sorted(known)
            yield here.manifest.text(), []
        ready = here.ready(left) if left else []
        if not ready:
            if time.monotonic() - last > FOLLOW_S:
                raise MissingImage(f"no more of base {name} arrives on {os.uname().nodename}")
            time.sleep(POLL_S)
            progress.touch()
            continue
        # While it arrives extents go on one by one: a chain is as much slower as its packets are larger.
        size = GROUP if left is not None and len(ready) == len(left) and not 0 < rate < GROUP_RATE else 1
        for at in range(0, len(ready), size):
            yield b"", [here.read(index) for index in ready[at : at + size]]
        last = time.monotonic()
        sent = set(ready)
        left = [index for index in left or [] if index not in sent]


def serve(step: ServeBase, write: Callable[[Bytes], None]) -> dict[str, object]:
    """Write a base as packets."""
    stand_back()
    pace = Pace(step.rate)
    sealer, name, plain = None, step.codec, 0
    for text, group in groups(step.root, step.name, step.wanted, step.rate):
        if sealer is None:
            sealer = packets.Sealer(packets.Session.of(step.session), compress.NONE)
            _send(sealer.manifest(text), write, pace)
            continue
        if not plain:
            name = compress.choose(step.codec, b"".join(item.content for item in group), step.rate)
            sealer.compressor = name
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
    host: str, step: ServeBase, target: Partial, config: Config, tell: Callable[[int, int], None], skip: Callable[[str], bool]
) -> None:
    """Take from `host` what `target` lacks. Raise HostUnreachable, MissingImage, TransferCorrupt or what else stops it.

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
                    raise HostUnreachable(f"nothing came from {host} for {STALL_S:.0f} s")
                continue
            if not isinstance(message, bytes):
                return
            progress.count("received", len(message))
            for packet in opener.feed(message):
                last = time.monotonic()
                take(target, opener, packet)
            tell(0, len(message))


def take(target: Partial, opener: packets.Opener, packet: packets.Packet) -> None:
    """Put what is in a packet where it belongs; raise TransferCorrupt."""
    kind, group, content = opener.open(packet)
    if kind == packets.MANIFEST:
        target.begin(bytes(content))
    elif target.manifest is None:
        raise TransferCorrupt("extents before their manifest")
    for item in group:
        # One that is damaged where it comes from, or on the way, is asked for elsewhere.
        target.put(item.number, item.content, item.sha256)
    opener.reuse(packet)
