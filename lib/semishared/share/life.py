# SPDX-License-Identifier: Apache-2.0
"""The life of a share, on any file system: its record is written first and removed last.

So a killed action leaves a record that is not `ready`: a repeated creation resumes, `rm` removes what there
is.

Also snapshots, where the file system has them.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import Iterator, Optional

from ..errors import (
    BadArguments,
    BadRecord,
    DataInTheWay,
    MissingImage,
    NoQuota,
    NotSupported,
    OtherStore,
    StoreAbsent,
    StoreUnavailable,
    ToolFailed,
    here,
)
from ..model.refs import Refusal
from ..model.share import names as share_names
from ..model.share.share import Share, Tree
from ..model.share.steps import (
    ListedShare,
    MadeShare,
    MarkedRoot,
    RemovedShare,
    ResizedShare,
    Shares,
    ShareSnapshot,
    ShareSnapshots,
)
from ..named import NamedTuple
from ..store.dir import marker
from ..tools import files, locks
from ..tools.effects import point
from ..tools.hung_store import LIMIT_S, unless_it_hangs
from ..units import MiB, human
from . import FileSystem, of, owners, registered, rights

VERSION = 1


class Record(NamedTuple):
    """The content of a share's record."""

    share: Share
    source: str
    """Path of the share, '' until it is ready."""


def _path(tree: Tree, image: int) -> str:
    return f"{tree.root}/{share_names.record(image)}"


def read(tree: Tree, image: int) -> Optional[Record]:
    """Return the record of a share, None without one; raise BadRecord."""
    path = _path(tree, image)
    files.refresh(os.path.dirname(path))
    data = files.read_json(path)
    if data is None:
        return None
    if data.get("version") != VERSION or not isinstance(data.get("source"), str):
        raise BadRecord(f"{here(path)} is no record of a share that this version understands")
    if share_names.root_and_image(str(data["source"]))[0] not in ("", tree.root):
        # Guests get the directory in the image's SOURCE: that one is theirs, this is a copy.
        of_it = (
            f"is of {data['source']}: a root of shares keeps its path, mount what has been moved "
            f"there (SEMISHARED_FS_ROOT)"
        )
        raise BadRecord(f"{here(path)} {of_it}")
    try:
        return Record(Share.from_data(data.get("share")), str(data["source"]))
    except BadArguments as e:
        raise BadRecord(f"{here(path)}: {e.detail}") from None


def ready(tree: Tree, image: int) -> Record:
    """Return the record of a ready share; raise MissingImage, BadRecord."""
    known = read(tree, image)
    if not known or not known.source:
        raise MissingImage(f"image {image} has no share in {tree.root} that is ready")
    return known


def made(tree: Tree, image: int) -> Record:
    """Return the record of a ready share; raise NotSupported for a registered directory."""
    known = ready(tree, image)
    if known.share.directory:
        raise NotSupported(
            f"image {image} is {known.share.directory}, which was there before: guests are given "
            f"it as it is, no more"
        )
    return known


def _write(tree: Tree, share: Share, source: str) -> None:
    data = {"version": VERSION, "share": share.to_data(), "source": source}
    files.write_json(_path(tree, share.image), data)


def checked(tree: Tree) -> FileSystem:
    """Return the file system of a root, if that is the datastore's.

    Raise StoreAbsent, OtherStore, StoreUnavailable, NoQuota.
    """
    if not tree.marker:
        raise StoreAbsent(f"{tree.root} is no root of shares yet: `semishared share init` makes it one")
    fs = unless_it_hangs(lambda: _reached(tree), None)
    if fs is None:
        raise StoreUnavailable(f"{here(tree.root)} hangs: no answer within {LIMIT_S:.0f} s")
    return fs


def _reached(tree: Tree) -> FileSystem:
    marker.check(tree.root, tree.marker)
    _check_cloud(tree, marker.said(tree.root).cloud)
    fs = of(tree)
    fs.check()
    return fs


def _check_cloud(tree: Tree, found: str) -> None:
    """Raise OtherStore for a root of another OpenNebula. Roots of older versions name none, and pass."""
    if found not in ("", tree.cloud):
        whose = (
            f"cloud {found}, and this datastore is of {tree.cloud or 'one that has no id'} (SEMISHARED_CLOUD)"
        )
        raise OtherStore(
            f"{here(tree.root)} is the root of shares of {whose}: what is in it is another OpenNebula's"
        )


@contextmanager
def alone(tree: Tree, image: int, limit_s: float = locks.LIMIT_S) -> Iterator[str]:
    """Hold a share's lock within the block; yield its path, which the holder may remove.

    Raise ToolTimeout after `limit_s` seconds of waiting.
    """
    path = f"{tree.root}/{share_names.lock(image)}"
    with locks.exclusive(path, limit_s) as file, rights.holding(file):
        files.remove_stale(os.path.dirname(path))
        yield path


def mark(tree: Tree, new: str) -> MarkedRoot:
    """Make a directory the root of shares; return its marker's id."""
    if not os.path.isdir(tree.root):
        raise StoreAbsent(f"{here(tree.root)} is no directory: mount it, or make it")
    found, cloud = marker.said(tree.root)
    if found and tree.marker and found != tree.marker:
        raise OtherStore(f"{here(tree.root)} is marked {found}, the datastore has {tree.marker}")
    _check_cloud(tree, cloud)
    if found and not tree.marker and not cloud:
        how = (
            f"and of no datastore of this OpenNebula as far as it says; if it is, give the datastore "
            f"SEMISHARED_STORE = {found} first"
        )
        raise OtherStore(f"{here(tree.root)} is a root of shares already, {how}")
    of(tree).check()
    if not found or cloud != tree.cloud:
        found = found or tree.marker or new
        marker.write(tree.root, found, tree.cloud)
        point("root marked")
    return MarkedRoot(found)


def make(tree: Tree, share: Share) -> MadeShare:
    """Create a share; return its path, also if it exists. Raise DataInTheWay for anything else there."""
    fs = checked(tree)
    with alone(tree, share.image):
        known = read(tree, share.image)
        if known and known.share != share:
            raise DataInTheWay(f"{_path(tree, share.image)} is the record of another image {share.image}")
        if known and known.source:
            return MadeShare(known.source)
        if not known:
            there = fs.there(share.image)
            if there:
                raise DataInTheWay(f"{here(there)} is there, and has no record that says whose it is")
        uid = owners.first_uid_of(tree.root, share.owner)
        if not known:
            _write(tree, share, "")
        source = registered.make(tree, share) if share.directory else fs.make(share, uid)
        _write(tree, share, source)
        return MadeShare(source)


def remove(tree: Tree, number: int, source: str, born: int = -1) -> RemovedShare:
    """Remove a share with its content; of a registered directory, remove nothing but its place.

    With `born` remove only that share, and only if it is not ready; return whether it is gone. A
    share with an unreadable record is removed only without `source` and `born`, as neither could be compared.
    """
    fs = checked(tree)
    with alone(tree, number) as lock:
        try:
            known = read(tree, number)
        except BadRecord:
            if source or born >= 0:
                raise
            known = None
            _remove_unknown(tree, fs, number)
        if known and born >= 0 and (known.source or known.share.born != born):
            return RemovedShare(False)
        if known and source and known.source not in ("", source):
            raise DataInTheWay(f"image {number} is {source}, but {_path(tree, number)} says {known.source}")
        if known:
            # From here on the share is not ready, however far this action gets.
            _write(tree, known.share, "")
            if known.share.directory:
                registered.remove(tree, number)
            else:
                _remove_all(tree, fs, number)
            _forget(tree, number)
        locks.remove(lock)
    return RemovedShare()


def _forget(tree: Tree, number: int) -> None:
    """Remove a share's record durably: a power cut must not bring it back after the image is gone."""
    os.unlink(_path(tree, number))
    files.fsync(os.path.dirname(_path(tree, number)))
    point("record of the share removed")


def _remove_unknown(tree: Tree, fs: FileSystem, number: int) -> None:
    """Remove whatever exists of a share with an unreadable record, and the record."""
    with suppress(DataInTheWay):
        # It may be the empty place of a registered directory: then there is no subvolume.
        registered.remove(tree, number)
    _remove_all(tree, fs, number)
    _forget(tree, number)


def _remove_all(tree: Tree, fs: FileSystem, number: int) -> None:
    if tree.backend.has_manager:
        from . import ceph_clients

        ceph_clients.of(tree).take_all(number)
    fs.remove(number)


def resize(tree: Tree, number: int, size: int) -> ResizedShare:
    """Hold a share to another size; return the one before, in bytes."""
    fs = checked(tree)
    with alone(tree, number):
        known = made(tree, number)
        used = fs.use(number).used
        if size < used:
            raise BadArguments(
                f"{human(used)} are in the share of image {number}: it cannot be held to {human(size)}"
            )
        fs.resize(number, size)
        point("share resized")
        _write(tree, known.share._replace(size=size), known.source)
        return ResizedShare(known.share.size)


def listed(tree: Tree) -> Shares:
    """Return the shares of a root; one with an error has it in `wrong`, and hides no other."""
    fs = checked(tree)
    rows = [_row(fs, tree, image) for image in _images(tree)]
    return Shares([row for row in rows if row], marker.said(tree.root).cloud)


def _images(tree: Tree) -> list[int]:
    directory = f"{tree.root}/{share_names.SHARES}"
    names = [] if files.is_absent(directory) else os.listdir(directory)
    return sorted(number for number in map(share_names.image_of, names) if number >= 0)


def _row(fs: FileSystem, tree: Tree, image: int) -> Optional[ListedShare]:
    try:
        known = read(tree, image)
        if not known or not known.source or known.share.directory:
            return known and _listed(known)
        kept, use = fs.snapshot_names(image), fs.use(image)
        # A resize may have happened meanwhile.
        known = read(tree, image) or known
        wrong = _not_held(tree, known.share, use.limit)
        return _listed(known)._replace(used=use.used, snapshots=kept, wrong=wrong)
    except (ToolFailed, MissingImage, BadRecord, NoQuota) as e:
        wrong = Refusal(e.id, e.detail)
    try:
        # A removal may have happened meanwhile.
        known = read(tree, image)
    except BadRecord:
        return ListedShare(image, owner=-1, born=-1, size=-1, source="", used=-1, wrong=wrong)
    return known and _listed(known)._replace(wrong=wrong)


def _listed(known: Record) -> ListedShare:
    return ListedShare(**known.share._asdict(), source=known.source, used=-1)


def _not_held(tree: Tree, share: Share, limit: int) -> Optional[Refusal]:
    """Return what is wrong if a share has another limit: quotas were off, or a resize was killed."""
    if not tree.backend.holds_to_size or limit == share.size:
        return None
    to = f"held to {human(limit)}" if limit >= 0 else "held to nothing"
    mend = f"`semishared share resize {share.image} {share.size // MiB}M` holds it to that"
    detail = f"the share of image {share.image} is {to}, not to {human(share.size)}: {mend}"
    return Refusal(NoQuota.id, detail)


def promised(tree: Tree) -> int:
    """Return the sum of all shares' sizes in bytes; 0 where nothing holds them to it."""
    found = 0
    for image in _images(tree) if tree.backend.holds_to_size else ():
        with suppress(BadRecord):
            known = read(tree, image)
            found += known.share.size if known else 0
    return found


def capacity(tree: Tree) -> tuple[int, int, int]:
    """Return used, total and free bytes of the file system; what is promised to shares is not free."""
    checked(tree)
    found = os.statvfs(tree.root)
    counts = (found.f_blocks - found.f_bfree, found.f_blocks, found.f_bavail)
    used, total, free = (blocks * found.f_frsize for blocks in counts)
    return used, total, max(0, min(free, total - promised(tree)))


# Snapshots of shares, where the file system has them, by the operator's names.
#
# A snapshot exists as a whole or not at all, and is removed with its share.


def _check(name: str) -> None:
    if not share_names.may_be_snapshot(name):
        raise BadArguments(
            f"a snapshot is called 1 to 64 letters, digits, dots, dashes and underscores, not {name[:100]!r}"
        )


def make_snapshot(tree: Tree, number: int, name: str) -> ShareSnapshot:
    """Take a snapshot of a share; return what is known of it.

    Raise DataInTheWay if there is one of that name: it shows another moment.
    """
    _check(name)
    fs = checked(tree)
    with alone(tree, number):
        made(tree, number)
        if name in fs.snapshot_names(number):
            raise DataInTheWay(
                f"image {number} has a snapshot {name} already: remove it, or call this one otherwise"
            )
        fs.snapshot(number, name)
        point("snapshot made")
        return fs.known(number, name)


def list_snapshots(tree: Tree, number: int) -> ShareSnapshots:
    """Return the snapshots of a share; one with an error has it in `wrong`, and hides no other."""
    fs = checked(tree)
    made(tree, number)
    rows = [_snapshot_row(fs, number, name) for name in fs.snapshot_names(number)]
    return ShareSnapshots([row for row in rows if row])


def _snapshot_row(fs: FileSystem, number: int, name: str) -> ShareSnapshot | None:
    """Return what is known of a snapshot, None if it is gone."""
    try:
        return fs.known(number, name)
    except (ToolFailed, MissingImage) as e:
        wrong = Refusal(e.id, e.detail)
    row = ShareSnapshot(name, -1, -1, "", "", wrong)
    return row if name in fs.snapshot_names(number) else None


def remove_snapshot(tree: Tree, number: int, name: str) -> None:
    """Remove a snapshot; raise MissingImage if there is none of that name."""
    _check(name)
    fs = checked(tree)
    with alone(tree, number):
        made(tree, number)
        if name not in fs.snapshot_names(number):
            raise MissingImage(f"image {number} has no snapshot {name} on {os.uname().nodename}")
        fs.forget(number, name)
