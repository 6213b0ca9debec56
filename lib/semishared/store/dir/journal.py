# SPDX-License-Identifier: Apache-2.0
"""Commits to images in mounted stores: one rename decides a commit, and the next action completes it.

    .semishared/NAME/commits/.staged-*  a journal being written; the next claim or commit removes it
    .semishared/NAME/commit/            a complete journal, put here by one rename: from then on the new
                                        content counts, for every reader settles the commit first
        journal.json    {version, size, digest, claim, before, session}: the image's record after the
                        commit, the claim before it, and the session token that completing it sets
        image           the new content, a reflink clone of the image (or a full copy), which replaces it; or
        ranges  data    what to write into the image
        manifest        of the new content, if it is known

The lock on the image itself (writers.alone) covers all of it: no QEMU opens the image meanwhile. A process
that lost this lock, because its machine was cut off, finds its journal removed and can no longer decide; its
file system refuses its writes. If it has decided late all the same, the journal is void: the image was
claimed, committed to, or given to a guest since.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager
from typing import Iterator

from ...errors import AnotherWriter, JournalDamaged, NoSpace
from ...model.store import dir_names
from ...named import NamedTuple
from ...tools import beneath, extents, files, locks
from ...tools.effects import point
from ...units import human
from .. import writers
from ..commit import change, claims
from ..commit.claims import Claim
from . import image, redo
from .image import Seen, Stored

VERSION = 2
LIMIT = claims.LIMIT + 4096
"""Most bytes of journal.json, which includes the image's record."""
BEFORE = 1
"""The version whose journals do not name their claim."""


class Decided(NamedTuple):
    """The content of journal.json."""

    size: int
    digest: str
    """Digest of the ranges and data, '' if the journal has an image."""
    after: Claim
    before: object
    """What identifies the claim that the commit was decided under; None of an older version."""
    session: str
    """The token that completing the commit sets; '' of an older version."""


def is_decided(stored: Stored) -> bool:
    """Return True if a commit to the image is decided and not completed."""
    try:
        with image.side(stored) as side:
            return not files.is_absent(dir_names.commit(side))
    except (FileNotFoundError, NotADirectoryError):
        return False


def settle(stored: Stored) -> None:
    """Complete a decided commit; wait for another process that does so."""
    while is_decided(stored):
        with _alone(stored) as fd:
            if is_decided(stored):
                end(stored, fd)


@contextmanager
def _alone(stored: Stored) -> Iterator[int]:
    with ExitStack() as stack:
        with image.explained(stored.source):
            fd = stack.enter_context(writers.alone(stored.datastore, stored.name))
        yield fd


@contextmanager
def settled(stored: Stored) -> Iterator[int]:
    """Yield the locked image, open for writing, with no commit decided and no journal that could still be."""
    while True:
        settle(stored)
        with _alone(stored) as fd:
            if not is_decided(stored):
                throw_away(stored)
                yield fd
                return


def throw_away(stored: Stored) -> None:
    """Remove journals of undecided commits; the caller holds the lock."""
    try:
        with image.side(stored, dir_names.COMMITS) as commits:
            for name in os.listdir(commits):
                files.remove_folder(f"{commits}/{name}")
    except FileNotFoundError:
        pass


# -- the record of the image ------------------------------------------------------------------------


def claim(stored: Stored) -> Claim | None:
    """Return the image's record, None if no disk has claimed it; raise UnknownClaim."""
    try:
        with image.side(stored) as side:
            text = files.read(dir_names.owner(side), claims.LIMIT)
    except FileNotFoundError:
        return None
    return claims.parse(f"{dir_names.owner(stored.side)}", text)


def write_claim(stored: Stored, found: Claim | None) -> None:
    """Write or remove the image's record; the caller holds the lock."""
    with image.side(stored, make=True) as side:
        if found:
            files.write_json(dir_names.owner(side), found.to_data(), claims.LIMIT)
        elif files.unlink(dir_names.owner(side)):
            files.fsync(side)
    point("claim written")


# -- a journal --------------------------------------------------------------------------------------


@contextmanager
def draft(stored: Stored) -> Iterator[str]:
    """Yield the directory of a new journal; remove it unless the block decides the commit."""
    with image.side(stored, dir_names.COMMITS, make=True) as commits:
        directory = files.staged_name(f"{commits}/{dir_names.COMMIT}")
        os.mkdir(directory)
        try:
            with beneath.directory(commits, os.path.basename(directory)) as path:
                yield path
        finally:
            files.remove_folder(directory, ignore_errors=True)


def decide(stored: Stored, directory: str, it: Decided, manifest: extents.Manifest | None) -> None:
    """Decide a commit whose data is in the journal `directory`; the caller holds the lock.

    Raise AnotherWriter if another machine has taken the lock, or decided a commit, meanwhile.
    """
    said = {"version": VERSION, **it._asdict(), "claim": it.after.to_data()}
    del said["after"]
    lost = (
        f"{stored.source}: another machine has taken its lock from {os.uname().nodename}, which was cut off"
    )
    try:
        text = manifest.text() if manifest else b""
        if 0 < len(text) <= extents.MANIFEST_LIMIT:
            files.write(dir_names.manifest(directory), text)
        files.write_json(dir_names.journal(directory), said, LIMIT)
        point("commit written")
        with image.side(stored) as side:
            # By its name: another machine may have removed the journal.
            os.rename(
                f"{dir_names.commits(side)}/{os.path.basename(os.readlink(directory))}",
                dir_names.commit(side),
            )
            files.fsync(side)
    except FileNotFoundError:
        raise AnotherWriter(lost) from None
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise AnotherWriter(f"{stored.source}: another commit to it was decided meanwhile") from None
    point("commit decided")


@contextmanager
def room_counted(stored: Stored) -> Iterator[None]:
    """Hold the lock on the store's free space: a decided commit uses its space only on completion."""
    with ExitStack() as stack:
        path = stack.enter_context(beneath.directory(stored.datastore, dir_names.side(), make=True))
        stack.enter_context(locks.exclusive(f"{path}/{dir_names.ROOM_LOCK}", locks.VM_LIMIT_S))
        yield


def check_room(stored: Stored, fd: int, wanted: int, size: int) -> None:
    """Raise NoSpace unless the image can take `wanted` bytes and grow to `size`: completion must not fail."""
    needed = min(wanted, max(size, os.fstat(fd).st_size) - os.fstat(fd).st_blocks * 512)
    free = image.capacity(stored.datastore)[2]
    if needed > free:
        raise NoSpace(
            f"{stored.datastore} has {human(free)} free, and what is to be committed needs "
            f"{human(needed)} beside its journal"
        )


def end(stored: Stored, fd: int, *, trusted: bool = False) -> bool:
    """Complete a decided commit and remove its journal; `fd` is the locked image.

    Return False if the image was claimed or replaced since; the journal is then only removed. `trusted`: the
    caller has just written the journal.
    """
    with image.side(stored, dir_names.COMMIT) as directory:
        it = _read(directory)
        if not _is_due(stored, it):
            _forget(stored, directory)
            return False
        if it.digest and not trusted and redo.digest(directory, it.size) != it.digest:
            raise JournalDamaged(f"the data in {beneath.readable(directory)} are not those that were written")
        token = image.begin_session(stored, it.session)
        with _content(stored, directory, fd, it.size, bool(it.digest)) as found:
            seen = Seen.of(token, found)
            # After a lost lock another process may have completed it, and a disk may have claimed the image
            # anew.
            if not _is_due(stored, it):
                return False
            manifest = change.manifest_at(dir_names.manifest(directory))
            if manifest:
                image.publish_generation(stored, manifest, seen)
            write_claim(stored, it.after._replace(size=seen.size, state=tuple(seen)))
            _forget(stored, directory)
    return True


def _read(directory: str) -> Decided:
    """Return the content of a journal; raise JournalDamaged."""
    said = files.hint(dir_names.journal(directory), LIMIT)  # an empty answer means a damaged journal
    after, size, digest, session = (
        Claim.from_data(said.get("claim")),
        said.get("size"),
        said.get("digest"),
        said.get("session", ""),
    )
    version = VERSION if session else BEFORE
    if (
        said.get("version") != version
        or after is None
        or type(size) is not int
        or not isinstance(digest, str)
        or type(session) is not str
    ):
        raise JournalDamaged(f"{beneath.readable(dir_names.journal(directory))} cannot be read")
    return Decided(size, digest, after, said.get("before"), session)


def named(claim: Claim) -> list[object]:
    """Return what identifies a claim: its owner and state, a pair that never recurs."""
    return [claim.owner.to_data(), list(claim.state)]


def _is_due(stored: Stored, it: Decided) -> bool:
    """Return True if the image is still as the commit expects it, or as an interrupted completion left it."""
    found = claim(stored)
    if not it.session:
        return True  # an older version: its journals do not tell
    if found is None:
        return False
    if image.session(stored) != it.session:
        return named(found) == it.before and claims.is_as(found.state, tuple(image.see(stored)))
    return named(found) == it.before or (found.owner, found.state[:1]) == (it.after.owner, (it.session,))


@contextmanager
def _content(stored: Stored, directory: str, fd: int, size: int, in_ranges: bool) -> Iterator[os.stat_result]:
    """Give the image its new content and yield its status; the image stays locked within the block."""
    if in_ranges:
        with files.enough_space(stored.datastore):
            redo.put(fd, size, redo.replayed(directory, size, fd))
        point("commit replayed")
        yield os.fstat(fd)
        return
    try:
        new = beneath.open_file(directory, os.path.basename(dir_names.journal_image(directory)), os.O_RDWR)
    except FileNotFoundError:
        yield os.fstat(fd)  # an interrupted completion has renamed it already
        return
    try:
        writers.take(new)
        os.rename(dir_names.journal_image(directory), stored.source)
        files.fsync(stored.datastore)
        point("commit renamed")
        yield os.fstat(new)
    finally:
        os.close(new)


def _forget(stored: Stored, directory: str) -> None:
    """Remove the journal `directory`, but not one that another machine has decided meanwhile."""
    with image.side(stored, dir_names.COMMITS, make=True) as commits, image.side(stored) as side:
        done = files.staged_name(f"{commits}/{dir_names.COMMIT}")
        if not os.path.samestat(os.stat(directory), os.stat(dir_names.commit(side))):
            return
        os.rename(dir_names.commit(side), done)
        files.fsync(side)
        point("commit ended")
        files.remove_folder(done, ignore_errors=True)
    point("commit forgotten")
