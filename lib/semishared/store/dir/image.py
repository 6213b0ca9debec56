# SPDX-License-Identifier: Apache-2.0
"""A store of kind `dir`: a mounted directory tree, the same path on the front-end and on all hosts.

Beside the images of a datastore lies one directory of ours per image:

    <datastore>/9b6635f6                              the image, as OpenNebula names it
    <datastore>/.semishared/store                     says whose store this is (store/dir/marker.py)
    <datastore>/.semishared/9b6635f6/image            -> ../../9b6635f6   what in-place disks link to
                                    /session          who may have written last: a new token at each upload or
                                                      persistent session
                                    /generation.json  {generation, session, format, size, mtime_ns, ctime_ns,
                                    inode} of a known content
                                    /manifest         the hashes of that content (tools/extents.py)
                                    /owner.json      whose diff may be committed to it
                                    (store/commit/claims.py)
                                    /commit/         the journal of a commit (store/dir/journal.py)
                                    /clones/VM-DISK-CLOUD    non-persistent disks whose place is shared
                                    (tools/layers.py)

A generation is current only while its token is the session's and size, times and inode are the image's own.
So the end of a generation is one rename (a new token), before a guest can write; and whoever publishes a
generation too late publishes one that nobody takes. Nothing here needs a lock across hosts.

On NFS, what is known of a name is old: absent for up to 30 s after it was made elsewhere, size and time of a
file as they were. So names are looked up in directories that have just been opened, and an image is opened to
see what it is.

Every host can write here, also one that was broken into: everything is opened beneath the datastore's
directory, and what is done is done in what was opened (tools/beneath.py).
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
"""What older versions did not look at."""


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
        """Its directory of ours, seen from the datastore's."""
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
    """Return the status of image `source` in the store with the id `marker_id` ('' : one that was never
    marked).

    Raise StoreAbsent, OtherStore, StoreUnavailable, MissingImage, UnexpectedLink or UnexpectedFile, saying on
    which machine.
    """
    directory, name = os.path.split(source)
    marker.check(directory, marker_id)
    with explained(source):
        return beneath.status(directory, name)


@contextmanager
def explained(source: str) -> Iterator[None]:
    """Turn what the system says when `source` cannot be opened into what there is to do."""
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
    """Yield a path to the image (or another file of a datastore) `source`, open for reading; raise as
    `check`.
    """
    directory, name = os.path.split(source)
    with explained(source):
        fd = beneath.open_file(directory, name)
    try:
        yield beneath.path_of(fd)
    finally:
        os.close(fd)


@contextmanager
def side(stored: Stored, below: str = "", *, make: bool = False) -> Iterator[str]:
    """Yield a path to the image's directory of ours, or the directory `below` it, that stays where it is
    now.
    """
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
    """Return a token that no session has had."""
    return os.urandom(8).hex()


def begin_session(stored: Stored, token: str = "") -> str:
    """End the image's generation: from here on its content is unknown. Return the new token."""
    token = token or new_token()
    with _made(stored) as path:
        files.write(dir_names.session(path), token.encode() + b"\n")
        files.refresh(path)
        files.unlink(dir_names.generation(path))
    point("generation ended")
    return token


def make_link(stored: Stored) -> str:
    """Return the link that in-place disks point to, made if need be (stock drivers leave a link to a link
    alone).
    """
    with _made(stored) as path:
        files.symlink(dir_names.link_target(stored.name), dir_names.link(path))
    return stored.link


def check_link(stored: Stored) -> None:
    """Raise unless the image's link leads to the image, and that is a file."""
    check(stored.source)
    with explained(stored.link), side(stored) as path:
        if os.readlink(dir_names.link(path)) != dir_names.link_target(stored.name):
            raise UnexpectedLink(
                f"{stored.link} on {os.uname().nodename} leads to {os.readlink(dir_names.link(path))}"
            )


class Seen(NamedTuple):
    """The state of an image at one moment: equal before and after means that nobody began to write in
    between.
    """

    session: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """No program sets it: it tells of who wrote, and then gave the file its size and time of before."""
    inode: int

    @classmethod
    def of(cls, session: str, stat: os.stat_result) -> Seen:
        """Return the state of an image with this status, in this session."""
        return cls(session, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def see(stored: Stored, marker_id: str = "") -> Seen:
    """Return the image's state; raise as `check`."""
    token = session(stored)
    return Seen.of(token, check(stored.source, marker_id))


def generation(stored: Stored, seen: Seen, format: str = "", but: tuple[str, ...] = ()) -> str:
    """Return the name of the image's current generation, '' if its content is unknown, or known in another
    format only.

    `but`: what of its state may be another one, for who reads the content itself.
    """
    try:
        with side(stored) as path:
            header = files.hint(dir_names.generation(path))
    except FileNotFoundError:
        return ""
    # Those of older versions have neither ctime nor inode.
    state = {key: value for key, value in seen._asdict().items() if key not in but}
    if not header or any(
        header.get(key, value if key in LATER else None) != value for key, value in state.items()
    ):
        return ""
    if format and header.get("format", format) != format:
        # The same bytes read otherwise: another disk for a guest, and another name.
        return ""
    return str(header.get("generation", ""))


def manifest(stored: Stored, generation_name: str) -> extents.Manifest:
    """Return the manifest of `generation_name`; raise ImageChanged if the store does not hold it."""
    try:
        with side(stored) as path:
            text = files.read(dir_names.manifest(path), extents.MANIFEST_LIMIT)
    except FileNotFoundError:
        text = b""
    if extents.generation_of(text) != generation_name:
        raise ImageChanged(f"the manifest of {stored.source} is not that of generation {generation_name}")
    return extents.parse(text)


def publish_generation(stored: Stored, found: extents.Manifest, seen: Seen) -> None:
    """Make `found` the image's current generation, if the image still is as `seen`."""
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
    """Return bytes used, total and free of the file system of a directory; raise StoreUnavailable."""
    try:
        found = os.statvfs(root)
    except OSError as e:
        raise StoreUnavailable(f"{root}: {e.strerror}") from None
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return total - found.f_bfree * found.f_frsize, total, free
