# SPDX-License-Identifier: Apache-2.0
"""How any store commits a diff: opened, written while it is hashed, remembered."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator, Optional

from ...errors import CommitRefused, NoSpace, TooLarge
from ...tools import files
from ...tools.extents import Manifest
from .. import writers
from .change import LAST_LIMIT, Change
from .claims import Claim, Committed, Diff


@contextmanager
def opened(diff: Diff, claim: Claim, size: int) -> Iterator[Change]:
    """Yield what a diff changes in an image of `size` bytes, as a guest sees it; raise AnotherWriter if
    somebody writes to a layer.
    """
    for layer in diff.layers:
        writers.check_file(layer)
    with ExitStack() as stack:
        fds = []
        for path in (*diff.layers, diff.base):
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        change = Change(diff, fds, claim, stack.enter_context(ThreadPoolExecutor(1)))
        if change.size < size:
            raise CommitRefused(f"{diff.layers[-1]} has {change.size} bytes, and its image {size}")
        yield change


def carry_out(change: Change, write: Callable[[Change], int]) -> tuple[Optional[Manifest], Committed]:
    """Let `write` write a change, by `Change.each`; return the new content's manifest, and what was done.

    `write` returns how many bytes it has sent to the store.
    """
    began = time.monotonic()
    if change.last:
        change.hash()
        if change.manifest():
            change.leave_out(change.last.manifest)
    written = write(change)
    done = time.monotonic()
    change.hash()
    manifest = change.manifest()
    name, waited = manifest.generation if manifest else "", time.monotonic() - done
    return manifest, Committed(
        name, change.size, change.dirty, written, done - began, change.hashed, waited, ""
    )


def remember(diff: Diff, change: Change, manifest: Optional[Manifest]) -> None:
    """Keep on this machine what the image now has: that spares the next commit work, and is not worth a
    failure of this one.
    """
    if not diff.last:
        return
    ranges = [[found.start, found.length] for found in change.own]
    try:
        files.remove_staged(*os.path.split(diff.last))
        if manifest:
            files.write_json(diff.last, {"manifest": manifest.text().decode(), "ranges": ranges}, LAST_LIMIT)
            return
    except (OSError, NoSpace, TooLarge):
        pass
    files.unlink(diff.last)
