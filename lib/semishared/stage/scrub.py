# SPDX-License-Identifier: Apache-2.0
"""Bases at rest: whether each still is what it was, and what becomes of one that is not.

Under the base's lock, one rename, image -> damaged, takes a damaged base out of use. No VM gets a new lease,
and no old lease (all are the same file) brings the base back. Mending fetches the base again and replaces
each lease by a link to the new file: a VM reads good content when it next opens its disk. `damaged` goes
last. Each crash leaves either the damaged base out of use or the new one in use, and the next mending
resumes.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import time
from contextlib import suppress
from typing import Callable, Iterator

from ..base import cache, room
from ..device import hot
from ..errors import ImageChanged, MissingImage, SemisharedError
from ..model.base import names as base_names
from ..model.base.steps import MendBase, MendedBase, ReadBase, VerifiedBase, VerifyBase
from ..model.disk import names as disk_names
from ..tools import extents, files, locks, progress
from ..tools.effects import point
from ..tools.rate_limit import Pace, stand_back
from . import rotten
from .ensure import ensure

Tell = Callable[..., None]
"""Send an event to the front-end."""
TELL_S = 1.0
VERSION = 1
"""Of the note of a mending."""


def verify(step: VerifyBase, tell: Tell) -> VerifiedBase:
    """Compare a base with its manifest, read from the disk; take the base out of use if it differs."""
    base = cache.at(step.root, step.name)
    if not cache.is_published(base):
        if os.path.lexists(base.damaged):
            return VerifiedBase([], True, 0, 0.0, _held(base))
        raise MissingImage(f"base {step.name} is not there on {os.uname().nodename}")
    if step.only:
        doubted = rotten.doubt(step.root, step.name, step.only)
        return VerifiedBase(doubted, bool(doubted), 0, 0.0, _held(base))
    stand_back(19)
    started = time.monotonic()
    inode = os.stat(base.image).st_ino
    bad, size = _compare(base, base.image, Pace(step.rate), tell)
    if bad:
        rotten.take_out(step.root, base, inode)
    else:
        _note_verified(base)
    copy = hot.found(step.root, step.name)
    wrong = bool(copy) and not bad and bool(_compare(base, copy, Pace(step.rate), tell)[0])
    if wrong:
        # Guests that read from the copy keep it open; the next boot opens the base itself.
        hot.drop(step.root, step.name)
    return VerifiedBase(bad, bool(bad), size, time.monotonic() - started, _held(base), wrong)


def _note_verified(base: cache.Base) -> None:
    """Note that all of a base was good now; on a full or dead disk, or of one that goes, no note is left.

    `semishared attention` names the bases that nothing has read for long.
    """
    path = base_names.verified(base.directory)
    with suppress(OSError, SemisharedError):
        if files.is_absent(path):
            files.write(path, b"", 0o440)
        os.utime(path)
        point("verification noted")


def read(step: ReadBase, tell: Tell) -> VerifiedBase:
    """Compare a base with its manifest as `verify` does, but change nothing."""
    base = cache.at(step.root, step.name)
    if os.path.lexists(base.damaged) and not os.path.lexists(base.image):
        return VerifiedBase([], True, 0, 0.0, _held(base))
    # The leases of an evicted base still are its file.
    paths = [base.image, *(f"{base.leases}/{name}" for name in room.leases(base))]
    path = next((path for path in paths if os.path.exists(path)), "")
    if not path:
        raise MissingImage(f"base {step.name} is not there on {os.uname().nodename}")
    stand_back(19)
    started = time.monotonic()
    bad, size = _compare(base, path, Pace(step.rate), tell)
    return VerifiedBase(bad, bool(bad), size, time.monotonic() - started, _held(base))


def _held(base: cache.Base) -> tuple[str, ...]:
    described = room.describe(base)
    return described.leases if described else ()


def _compare(base: cache.Base, path: str, pace: Pace, tell: Tell) -> tuple[list[int], int]:
    """Return the indices of wrong extents (-1: manifest or size is wrong), and the bytes read."""
    try:
        with open(base.manifest, "rb") as file:
            text = file.read()
        if extents.generation_of(text) != base.generation:
            return [-1], 0
        manifest = extents.parse(text)
    except (FileNotFoundError, ImageChanged):
        return [-1], 0
    bad, read, last = [], 0, time.monotonic()
    left = dict(manifest.extents)
    size, whole = os.stat(path).st_size, files.allocated(path)
    if size != manifest.size:
        return [-1], 0
    for index, content in from_disk(path, size):
        pace.wait(len(content) if content else extents.EXTENT)
        expected = left.pop(index, None)
        if content is None:
            bad.append(index)
        elif expected is None:
            if not extents.is_zero(content):
                bad.append(index)
        elif hashlib.sha256(content).hexdigest() != expected:
            bad.append(index)
        read += len(content or b"")
        progress.touch()
        progress.reached(read, max(read, whole))
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            tell(event="progress", done=len(manifest.extents) - len(left), of=len(manifest.extents))
    return sorted(bad + list(left)), read


def from_disk(path: str, size: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (index, content) of each extent with data, past the page cache; content is None on EIO."""
    fd = _open_direct(path)
    with mmap.mmap(-1, extents.EXTENT) as buffer:
        try:
            for offset in extents.offsets(fd, size):
                wanted = min(extents.EXTENT, size - offset)
                done = 0
                try:
                    while done < wanted:
                        got = os.preadv(fd, [memoryview(buffer)[done:]], offset + done)
                        if not got:
                            break
                        done += got
                        if got % 4096 and done < wanted:
                            break
                    yield offset // extents.EXTENT, buffer[:done]
                except OSError as e:
                    if e.errno != errno.EIO:
                        raise
                    yield offset // extents.EXTENT, None
        finally:
            os.close(fd)


def _open_direct(path: str) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return _open_through_cache(path)
    try:
        with mmap.mmap(-1, 4096) as probe:
            os.preadv(fd, [probe], 0)
    except OSError as e:
        if e.errno == errno.EINVAL:
            os.close(fd)
            return _open_through_cache(path)
    return fd


def _open_through_cache(path: str) -> int:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return fd


def mend(step: MendBase, ask: room.Ask | None) -> MendedBase:
    """Fetch a base that is out of use again and relink its leases; return the names of those leases."""
    base, _ = ensure(step.root, step.image, ask, want=room.MENDED)
    inode = os.stat(base.image).st_ino
    _note_mended(base, inode)
    relinked = []
    for name in room.leases(base):
        holder = base_names.leased_to(name)
        if holder is None:
            continue
        # A VM releases its leases under its lock: a released lease must not come back.
        with locks.exclusive(disk_names.vm_lock(step.root, holder[0]), locks.VM_LIMIT_S):
            try:
                if os.stat(f"{base.leases}/{name}").st_ino == inode:
                    continue
            except FileNotFoundError:
                continue
            with files.published(f"{base.leases}/{name}") as staged:
                os.link(base.image, staged)
            relinked.append(name)
    with locks.exclusive(cache.lock_path(step.root, base)):
        files.unlink(base.damaged)
    point("base mended")
    return MendedBase(relinked)


def _note_mended(base: cache.Base, inode: int) -> None:
    """Note which leases are about to lead to the new content: guests that run have the old file open still.

    What a killed mending has noted stays; so do leases of an earlier one, of which some may still be open.
    """
    wrong = []
    for name in room.leases(base):
        with suppress(FileNotFoundError):
            if os.stat(f"{base.leases}/{name}").st_ino != inode:
                wrong.append(name)
    if not wrong:
        return
    before, path = room.mended(base), base_names.mended(base.directory)
    data = {"version": VERSION, "at": time.time(), "leases": sorted({*before.leases, *wrong})}
    files.write_json(path, data)
    point("mending noted")
