# SPDX-License-Identifier: Apache-2.0
"""Take a base out of use that is not what it was, whether verify, a peer or a copy has seen it.

A host that hears of a doubt reads only the doubted extents itself, so that the base is out of use before its
next lease.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import nullcontext, suppress
from typing import Sequence

from ..base import cache, room
from ..config import Config
from ..errors import SemisharedError
from ..model.base.steps import ServeBase, ServeExtents, VerifyBase
from ..tools import extents, files, locks
from ..tools.effects import point
from ..wire.session import Session
from .extent_index import manifest_in

MOST = 16
"""Extents of one base that a host compares at once; one wrong extent is enough."""
WAIT_S = 5.0
"""Limit for the lock: a host that reports a doubt may hold the lock that this host wants."""


def doubt(root: str, name: str, indices: Sequence[int], is_locked: bool = False) -> list[int]:
    """Compare extents of a base with its manifest; take the base out of use and return those that are wrong.

    `is_locked`: the caller holds the image's lock. Raise ToolTimeout if another action holds it for WAIT_S.
    """
    base = cache.at(root, name)
    manifest = manifest_in(base.directory, base.generation)
    try:
        fd = os.open(base.image, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        # Read from the device: the page cache could hide, or invent, an error.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        bad = [
            index
            for index in indices[:MOST]
            if manifest is None or _is_wrong(fd, index, manifest.extents.get(index))
        ]
        inode = os.fstat(fd).st_ino
    finally:
        os.close(fd)
    if bad:
        take_out(root, base, inode, WAIT_S, is_locked)
    return bad


def _is_wrong(fd: int, index: int, expected: str | None) -> bool:
    try:
        content = extents.read_at(fd, index)
    except OSError:
        return True
    return hashlib.sha256(content).hexdigest() != expected if expected else not extents.is_zero(content)


def take_out(
    root: str, base: cache.Base, inode: int, wait_s: float = locks.LIMIT_S, is_locked: bool = False
) -> None:
    """Take a base out of use, if its file still is the one with that inode."""
    with nullcontext() if is_locked else locks.exclusive(cache.lock_path(root, base), wait_s):
        try:
            if os.stat(base.image).st_ino == inode:
                os.rename(base.image, base.damaged)
                files.fsync(base.directory)
                point("base taken out of use")
        except FileNotFoundError:
            # Evicted meanwhile; its leases still are that file and must not bring it back.
            for name in room.leases(base):
                try:
                    os.link(f"{base.leases}/{name}", base.damaged)
                    break
                except FileExistsError:
                    break  # it was out of use before
                except FileNotFoundError:
                    continue  # released meanwhile


def tell(host: str, step: ServeBase | ServeExtents, refused: Sequence[int], config: Config) -> None:
    """Tell `host` which extents of its base are wrong: its guests read them. Errors are ignored."""
    if refused and isinstance(step, ServeBase):
        with suppress(SemisharedError), Session(host, "doubt", config) as session:
            session.run([VerifyBase(step.root, step.name, 0, tuple(refused[:MOST]))])
