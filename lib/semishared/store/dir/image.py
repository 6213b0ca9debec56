# SPDX-License-Identifier: Apache-2.0
"""A store of kind `dir`: a mounted directory tree, the same path on the front-end and on all hosts.

Beside the images of a datastore lies one directory of semishared per image:

    <datastore>/9b6635f6                 the image, as OpenNebula names it
    <datastore>/.semishared/store        which store this is (store/dir/marker.py)
    <datastore>/.semishared/9b6635f6/
        image            -> ../../9b6635f6   what in-place disks link to
        session          token of the last upload or persistent session, whose guest may have written
        generation.json  {generation, session, format, size, mtime_ns, ctime_ns, inode} of a known content
        manifest         the hashes of that content (tools/extents.py)
        owner.json       the disk that may commit its diff (store/commit/claims.py)
        commit/          the journal of a commit (store/dir/journal.py)
        clones/VM-DISK-CLOUD    non-persistent disks whose place is shared (tools/layers.py)

A generation is current only while its token is the session's, and while size, times and inode are the image's
own. So one rename (a new token) ends a generation before a guest can write, and a generation that is
published too late is void. No operation here needs a lock across hosts.

On NFS a lookup by name may be outdated: a new file stays absent for up to 30 s, and size and times are old.
So this module looks names up in directories that it has just opened, and opens an image to read its status.

Every host can write here, also a compromised one. So all files are opened beneath the datastore's directory,
and all work is done on the open files (tools/beneath.py).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ...errors import ImageChanged, MissingImage, StoreUnavailable, UnexpectedLink
from ...model.disk import names as disk_names
from ...model.store import dir_names
from ...named import NamedTuple
from ...tools import beneath, extents, files
from ...tools.effects import point
from . import marker

LATER = ("ctime_ns", "inode")
"""What older versions did not record."""


class Stored(NamedTuple):
    """An image in a store, by the path OpenNebula calls SOURCE."""

    source: str

    @property
    def datastore(self) -> str:
        return os.path.dirname(self.source)

    @property
    def name(self) -> str:
        return os.path.basename(self.source)

    @property
    def below(self) -> str:
        """Its directory of semishared, relative to the datastore's."""
        return dir_names.side(self.name)

    @property
    def side(self) -> str:
        return f"{self.datastore}/{self.below}"

    @property
    def link(self) -> str:
        return dir_names.link(self.side)

    def clone(self, vm: int, disk: int, cloud: str = "") -> str:
        return dir_names.clone(self.side, vm, disk, cloud)


def check(source: str, marker_id: str = "") -> os.stat_result:
    """Return the status of image `source` in the store with the id `marker_id` ('': without a marker).

    Raise StoreAbsent, OtherStore, StoreUnavailable, MissingImage, UnexpectedLink or UnexpectedFile, which
    name the machine.
    """
    directory, name = os.path.split(source)
    marker.check(directory, marker_id)
    with explained(source):
        return beneath.status(directory, name)


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Turn an OSError of opening `source` into MissingImage or StoreUnavailable."""
    node, directory = os.uname().nodename, os.path.dirname(source)
    try:
        yield
    except FileNotFoundError:
        if not os.path.isdir(directory) or not os.listdir(directory):
            raise StoreUnavailable(f"{directory} is not mounted on {node}") from None
        raise MissingImage(f"image {source} is not there on {node}") from None
    except OSError as e:
        raise StoreUnavailable(f"{source} on {node}: {e.strerror}") from None


@contextmanager
def opened(source: str) -> Iterator[str]:
    """Yield a path to the open image (or another file of a datastore) `source`; raise as `check`."""
    directory, name = os.path.split(source)
    with explained(source):
        fd = beneath.open_file(directory, name)
    try:
        yield beneath.path_of(fd)
    finally:
        os.close(fd)


@contextmanager
def side(stored: Stored, below: str = "", *, make: bool = False) -> Iterator[str]:
    """Yield a path to the image's open directory of semishared, or `below` it; renames do not affect it."""
    with beneath.directory(
        stored.datastore, f"{stored.below}/{below}" if below else stored.below, make=make
    ) as path:
        yield path


@contextmanager
def _made(stored: Stored) -> Iterator[str]:
    try:
        fd = beneath.open_directory(stored.datastore, stored.below, make=True)
    except OSError as e:
        raise StoreUnavailable(f"{stored.side} on {os.uname().nodename}: {e.strerror}") from None
    try:
        path = beneath.path_of(fd)
        files.remove_stale(path)
        try:
            with beneath.directory(stored.datastore, disk_names.layers(stored.name)) as snapshots:
                files.remove_stale(snapshots)
        except FileNotFoundError:
            pass
        yield path
    finally:
        os.close(fd)


def session(stored: Stored) -> str:
    """Return the token of the last session, '' if the image never had one."""
    try:
        with side(stored) as path:
            return files.read(dir_names.session(path), 100).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""


def new_token() -> str:
    """Return a new random session token."""
    return os.urandom(8).hex()


def begin_session(stored: Stored, token: str = "") -> str:
    """End the image's generation: its content is unknown from now on. Return the new token."""
    token = token or new_token()
    with _made(stored) as path:
        files.write(dir_names.session(path), token.encode() + b"\n")
        files.refresh(path)
        files.unlink(dir_names.generation(path))
    point("generation ended")
    return token


def make_link(stored: Stored) -> str:
    """Return the link that in-place disks point to, made if missing (stock drivers keep a link to a link)."""
    with _made(stored) as path:
        files.symlink(dir_names.link_target(stored.name), dir_names.link(path))
    return stored.link


def check_link(stored: Stored) -> None:
    """Raise unless the image's link leads to the image, a regular file."""
    check(stored.source)
    with explained(stored.link), side(stored) as path:
        if os.readlink(dir_names.link(path)) != dir_names.link_target(stored.name):
            raise UnexpectedLink(
                f"{stored.link} on {os.uname().nodename} leads to {os.readlink(dir_names.link(path))}"
            )


class Seen(NamedTuple):
    """The state of an image at one moment; if it is equal before and after, no session began in between."""

    session: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """No program can set it: it shows a write after which size and time were restored."""
    inode: int

    @classmethod
    def of(cls, session: str, stat: os.stat_result) -> Seen:
        return cls(session, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def see(stored: Stored, marker_id: str = "") -> Seen:
    """Return the image's state; raise as `check`."""
    token = session(stored)
    return Seen.of(token, check(stored.source, marker_id))


def generation(stored: Stored, seen: Seen, format: str = "", but: tuple[str, ...] = ()) -> str:
    """Return the image's current generation, '' if its content is unknown or known in another format only.

    `but`: fields that may differ, for a caller that reads the content itself.
    """
    try:
        with side(stored) as path:
            header = files.hint(dir_names.generation(path))
    except FileNotFoundError:
        return ""
    # Records of older versions have neither ctime nor inode.
    state = {key: value for key, value in seen._asdict().items() if key not in but}
    if not header or any(
        header.get(key, value if key in LATER else None) != value for key, value in state.items()
    ):
        return ""
    if format and header.get("format", format) != format:
        # The same bytes in another format are another disk for a guest, and another generation.
        return ""
    return str(header.get("generation", ""))


def manifest(stored: Stored, generation_name: str) -> extents.Manifest:
    """Return the manifest of `generation_name`; raise ImageChanged if the store does not have it."""
    try:
        with side(stored) as path:
            text = files.read(dir_names.manifest(path), extents.MANIFEST_LIMIT)
    except FileNotFoundError:
        text = b""
    if extents.generation_of(text) != generation_name:
        raise ImageChanged(f"the manifest of {stored.source} is not that of generation {generation_name}")
    return extents.parse(text)


def publish_generation(stored: Stored, found: extents.Manifest, seen: Seen) -> None:
    """Publish `found` as the image's current generation; it is void unless the image still is as `seen`."""
    text = found.text()
    with _made(stored) as path:
        if len(text) <= extents.MANIFEST_LIMIT:
            files.write(dir_names.manifest(path), text)
        files.write_json(
            dir_names.generation(path),
            {"generation": extents.generation_of(text), "format": found.format, **seen._asdict()},
        )
    point("generation published")


def capacity(root: str) -> tuple[int, int, int]:
    """Return bytes used, total and free of a directory's file system; raise StoreUnavailable."""
    try:
        found = os.statvfs(root)
    except OSError as e:
        raise StoreUnavailable(f"{root}: {e.strerror}") from None
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return total - found.f_bfree * found.f_frsize, total, free
