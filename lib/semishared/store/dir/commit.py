# SPDX-License-Identifier: Apache-2.0
"""Diffs in a mounted store: claims of its images, commits to them, and epochs of VMs.

The journal (store/dir/journal.py) makes a commit atomic.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial

from ...errors import AnotherWriter
from ...model.refs import ImageRef, Owner
from ...model.store import dir_names
from ...tools import beneath, extents, files, progress, qemu_img, whole_pages
from ...tools.effects import point
from ...tools.rate_limit import Pace
from ..commit import change as commit_change
from ..commit import claims
from ..commit.change import Change
from ..commit.claims import Claim, Committed, Diff
from . import epochs, journal, redo, snapshots
from . import image as dir_image
from .image import Stored
from .journal import Decided

KEPT = len(dir_image.Seen._fields) - len(dir_image.LATER)
"""Fields of an image's state that a copy with its times, or a chmod, preserves."""


def _now(image: ImageRef, owner: Owner) -> Claim:
    """Return a record that describes the image as it is."""
    stored = Stored(image.source)
    seen = dir_image.see(stored, image.access.marker)
    snapshots.refuse(image.source, image.format)
    generation = dir_image.generation(stored, seen, image.format)
    return Claim(owner, generation, seen.size, tuple(seen), tuple(snapshots.numbers(image.source)))


def _claim(image: ImageRef) -> Claim | None:
    """Return the image's record, under its lock; update it if the image was moved but not changed."""
    stored = Stored(image.source)
    found, now = journal.claim(stored), dir_image.see(stored, image.access.marker)
    if (
        found is None
        or claims.is_as(found.state, tuple(now))
        or not found.generation
        or found.state[:KEPT] != tuple(now)[:KEPT]
    ):
        return found
    with dir_image.opened(image.source) as path:
        is_it = (
            extents.copy(path, None, image.format, "store_read", direct=True).generation == found.generation
        )
    if is_it and dir_image.see(stored, image.access.marker) == now:
        found = found._replace(state=tuple(now))
        journal.write_claim(stored, found)
    return found


def claim(image: ImageRef, owner: Owner) -> Owner | None:
    """See store.Store.claim."""
    stored = Stored(image.source)
    with files.enough_space(stored.datastore), journal.settled(stored):
        claims.check_epoch(image.source, owner, epochs.read(image, owner.vm))
        before = _claim(image)
        new = claims.claimed(image.source, before, _now(image, owner))
        if new != before:
            journal.write_claim(stored, new)
    return before.owner if before else None


def owner(image: ImageRef) -> Owner | None:
    """See store.Store.owner."""
    found = journal.claim(Stored(image.source))
    return found.owner if found else None


def disown(image: ImageRef, owner: Owner) -> None:
    """See store.Store.disown."""
    stored = Stored(image.source)
    if claims.is_of(journal.claim(stored), owner):
        with journal.settled(stored):
            if claims.is_of(journal.claim(stored), owner):
                journal.write_claim(stored, None)


def _may(image: ImageRef, owner: Owner) -> Claim:
    claims.check_epoch(image.source, owner, epochs.read(image, owner.vm))
    return claims.check(image.source, _claim(image), owner, _now(image, owner))


def may_commit(image: ImageRef, owner: Owner) -> None:
    """See store.Store.may_commit."""
    with journal.settled(Stored(image.source)):
        _may(image, owner)


def commit(image: ImageRef, owner: Owner, diff: Diff) -> Committed:
    """See store.Store.commit."""
    stored = Stored(image.source)
    with files.enough_space(stored.datastore), journal.settled(stored) as fd:
        before = _may(image, owner)
        size = (
            qemu_img.virtual_size(beneath.path_of(fd), image.format) if image.format != "raw" else before.size
        )
        with (
            commit_change.opened(diff, before, size) as change,
            journal.draft(stored) as directory,
            ExitStack() as room,
        ):
            staging = _Staging(image, diff, fd, directory, room)
            manifest, done = commit_change.carry_out(change, staging.write)
            if not staging.how:
                return done._replace(generation=before.generation)
            point("commit staged")
            # A host that takes the VM over records its epoch without waiting for the lock.
            claims.check_epoch(image.source, owner, epochs.read(image, owner.vm))
            after = before._replace(
                owner=owner, generation=done.generation, touched=frozenset(change.extents)
            )
            decided = Decided(
                change.size, staging.digest, after, journal.named(before), dir_image.new_token()
            )
            journal.decide(stored, directory, decided, manifest)
            sent = progress.moved["store_written"]
            if not journal.end(stored, fd, trusted=True):
                raise AnotherWriter(
                    f"{image.source} was given to somebody else while {os.uname().nodename} was cut off"
                )
            commit_change.remember(diff, change, manifest)
    return done._replace(written=done.written + progress.moved["store_written"] - sent, how=staging.how)


class _Staging:
    """The new content on its way into a journal."""

    def __init__(self, image: ImageRef, diff: Diff, fd: int, directory: str, room: ExitStack) -> None:
        self._image, self._diff, self._fd, self._directory, self._room = image, diff, fd, directory, room
        self.how = ""
        self.digest = ""

    def write(self, change: Change) -> int:
        """Write a change into the journal; return the bytes sent to the store."""
        if not change.writes and self._image.format == "raw" and change.size == os.fstat(self._fd).st_size:
            return 0
        if self._image.format != "raw":
            return self._whole()
        pace = Pace(self._diff.rate)
        new = redo.cloned(self._fd, self._directory)
        if new < 0:
            self.how = "journal"
            self.digest, written = redo.note(self._directory, change, pace)
            self._room.enter_context(journal.room_counted(Stored(self._image.source)))
            journal.check_room(Stored(self._image.source), self._fd, written, change.size)
            return written
        self.how = "reflink"
        try:
            redo.as_before(self._fd, new)
            with whole_pages.opened(new) as file:
                return redo.put(new, change.size, change.each(partial(redo.write, file), pace))
        finally:
            os.close(new)

    def _whole(self) -> int:
        """Convert the diff to a new image: only QEMU can write qcow2, and no other host could redo a part."""
        self.how, path, diff = "whole", dir_names.journal_image(self._directory), self._diff
        chain = qemu_img.chain(diff.layers, diff.base, diff.format)
        progress.expect(qemu_img.measure(chain, "qcow2"), target="the store")
        with files.made(path) as made:
            qemu_img.convert(chain, "qcow2", made, self._image.format, rate=int(diff.rate))
        new = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            redo.as_before(self._fd, new)
            files.fsync_open(new)
        finally:
            os.close(new)
        written = files.allocated(path)
        progress.count("store_written", written)
        return written
