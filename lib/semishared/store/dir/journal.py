# SPDX-License-Identifier: Apache-2.0
"""Commits to images in mounted stores: decided by one rename, ended by the next action if need be.

    .semishared/NAME/commits/.staged-*  a journal that is being written: thrown away by the next claim or
    commit
    .semishared/NAME/commit/            one that is whole, put here by one rename: from then on the image is
    the new content,
                                        for everybody who settles it before they look
        journal.json    {version, size, digest, claim, before, session}: the record of the image after it,
        what names that before it,
                        and the token of the session that its end begins
        image           the new content, a clone of the image by reflink (or all of it anew): the image is
        replaced by it; or
        ranges  data    what is to be written to the image, where it is
        manifest        of the new content, if that is known

All under one lock, on the image itself (writers.alone): no QEMU opens it meanwhile. A process that has lost
that lock, since its machine was cut off, finds its journal thrown away, and cannot decide any more; and its
file system lets it write no more. What it has decided all the same, late, nobody carries out: the image was
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
"""Bytes of journal.json, for who writes it and for who reads it: the record of the image is in it."""
BEFORE = 1
"""Its journals do not say which claim they belong to."""


class Decided(NamedTuple):
    """What a journal says."""

    size: int
    digest: str
    """Of what is in its ranges, '' if it has an image."""
    after: Claim
    before: object
    """What names the claim that it was decided under; None of an older version."""
    session: str
    """The token that its end gives to the image; '' of an older version."""


def is_decided(stored: Stored) -> bool:
    """Tell whether a commit to the image is decided, and not ended."""
    try:
        with image.side(stored) as side:
            return not files.is_absent(dir_names.commit(side))
    except (FileNotFoundError, NotADirectoryError):
        return False


def settle(stored: Stored) -> None:
    """End a commit that is decided; wait for who is at it."""
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
    """Yield the image, locked, open for writing, with no commit under way, and no other one that could still
    be decided.
    """
    while True:
        settle(stored)
        with _alone(stored) as fd:
            if not is_decided(stored):
                throw_away(stored)
                yield fd
                return


def throw_away(stored: Stored) -> None:
    """Remove journals that were not decided; the caller has the lock."""
    try:
        with image.side(stored, dir_names.COMMITS) as commits:
            for name in os.listdir(commits):
                files.remove_folder(f"{commits}/{name}")
    except FileNotFoundError:
        pass


# -- the record of the image ------------------------------------------------------------------------


def claim(stored: Stored) -> Claim | None:
    """Return the record of the image, None if it was claimed for no disk; raise UnknownClaim."""
    try:
        with image.side(stored) as side:
            text = files.read(dir_names.owner(side), claims.LIMIT)
    except FileNotFoundError:
        return None
    return claims.parse(f"{dir_names.owner(stored.side)}", text)


def write_claim(stored: Stored, found: Claim | None) -> None:
    """Write the record of the image, or remove it; the caller has the lock."""
    with image.side(stored, make=True) as side:
        if found:
            files.write_json(dir_names.owner(side), found.to_data(), claims.LIMIT)
        elif files.unlink(dir_names.owner(side)):
            files.fsync(side)
    point("claim written")


# -- a journal --------------------------------------------------------------------------------------


@contextmanager
def draft(stored: Stored) -> Iterator[str]:
    """Yield the directory of a new journal; it is thrown away unless it was decided."""
    with image.side(stored, dir_names.COMMITS, make=True) as commits:
        directory = files.staged_name(f"{commits}/{dir_names.COMMIT}")
        os.mkdir(directory)
        try:
            with beneath.directory(commits, os.path.basename(directory)) as path:
                yield path
        finally:
            files.remove_folder(directory, ignore_errors=True)


def decide(stored: Stored, directory: str, it: Decided, manifest: extents.Manifest | None) -> None:
    """Decide a commit whose data are in the journal `directory`; the caller has the lock."""
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
            # By its name: what was thrown away is not there.
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
    """Be, within the block, the only one who counts on the store's free space: a commit that is decided takes
    it only when it is ended.
    """
    with ExitStack() as stack:
        path = stack.enter_context(beneath.directory(stored.datastore, dir_names.side(), make=True))
        stack.enter_context(locks.exclusive(f"{path}/{dir_names.ROOM_LOCK}", locks.VM_LIMIT_S))
        yield


def check_room(stored: Stored, fd: int, wanted: int, size: int) -> None:
    """Raise NoSpace unless `wanted` bytes can be written to the open image, of `size` then: once that is
    decided, it must not fail.
    """
    needed = min(wanted, max(size, os.fstat(fd).st_size) - os.fstat(fd).st_blocks * 512)
    free = image.capacity(stored.datastore)[2]
    if needed > free:
        raise NoSpace(
            f"{stored.datastore} has {human(free)} free, and what is to be committed needs "
            f"{human(needed)} beside its journal"
        )


def end(stored: Stored, fd: int, *, trusted: bool = False) -> bool:
    """Carry out what was decided, and forget it; the caller has the lock, `fd` is the image. `trusted`: we
    have just written it.

    Return False if the image is somebody else's since: then it is forgotten alone.
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
            # Who has lost the lock meanwhile finds it done, and the image claimed anew perhaps.
            if not _is_due(stored, it):
                return False
            manifest = change.manifest_at(dir_names.manifest(directory))
            if manifest:
                image.publish_generation(stored, manifest, seen)
            write_claim(stored, it.after._replace(size=seen.size, state=tuple(seen)))
            _forget(stored, directory)
    return True


def _read(directory: str) -> Decided:
    """Return what a journal says; raise JournalDamaged."""
    said = files.hint(dir_names.journal(directory), LIMIT)  # one that says nothing is damaged
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
    """Return what names a claim: no other has ever had both."""
    return [claim.owner.to_data(), list(claim.state)]


def _is_due(stored: Stored, it: Decided) -> bool:
    """Tell whether the image is still that which a commit was decided for, or what its end, begun before, has
    made of that.
    """
    found = claim(stored)
    if not it.session:
        return True  # of an older version: nobody knows
    if found is None:
        return False
    if image.session(stored) != it.session:
        return named(found) == it.before and claims.is_as(found.state, tuple(image.see(stored)))
    return named(found) == it.before or (found.owner, found.state[:1]) == (it.after.owner, (it.session,))


@contextmanager
def _content(stored: Stored, directory: str, fd: int, size: int, in_ranges: bool) -> Iterator[os.stat_result]:
    """Yield the status of the image when it has the new content; it stays locked within the block."""
    if in_ranges:
        with files.enough_space(stored.datastore):
            redo.put(fd, size, redo.replayed(directory, size, fd))
        point("commit replayed")
        yield os.fstat(fd)
        return
    try:
        new = beneath.open_file(directory, os.path.basename(dir_names.journal_image(directory)), os.O_RDWR)
    except FileNotFoundError:
        yield os.fstat(fd)  # it has the image's name already
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
    """Remove the journal `directory`, not one that somebody else has decided meanwhile."""
    with image.side(stored, dir_names.COMMITS, make=True) as commits, image.side(stored) as side:
        done = files.staged_name(f"{commits}/{dir_names.COMMIT}")
        if not os.path.samestat(os.stat(directory), os.stat(dir_names.commit(side))):
            return
        os.rename(dir_names.commit(side), done)
        files.fsync(side)
        point("commit ended")
        files.remove_folder(done, ignore_errors=True)
    point("commit forgotten")
