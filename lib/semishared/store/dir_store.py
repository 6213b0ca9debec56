# SPDX-License-Identifier: Apache-2.0
"""A store of kind `dir`: a mounted directory tree, the same path on the front-end and on all hosts.

Beside the images of a datastore lies one directory of ours per image:

    <datastore>/9b6635f6                              the image, as OpenNebula names it
    <datastore>/.semishared/store                     says whose store this is (marker.py)
    <datastore>/.semishared/9b6635f6/image            -> ../../9b6635f6   what in-place disks link to
                                    /session          who may have written last: a new token at each upload or
                                                      persistent session
                                    /generation.json  {generation, session, format, size, mtime_ns} of a known content
                                    /manifest         the hashes of that content (extents.py)
                                    /clones/VM-DISK-CLOUD    non-persistent disks whose place is shared (layers.py)

A generation is current only while its token is the session's and size and time are the image's own. So the end of a
generation is one rename (a new token), before a guest can write; and whoever publishes a generation too late
publishes one that nobody takes. Nothing here needs a lock across hosts.

On NFS, what is known of a name is old: absent for up to 30 s after it was made elsewhere, size and time of a file as they
were. So names are looked up in directories that have just been opened, and an image is opened to see what it is.

Every host can write here, also one that was broken into: everything is opened beneath the datastore's directory, and what
is done is done in what was opened (beneath.py).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Iterable, Iterator, NamedTuple

from ..disk import layers
from ..errors import ImageChanged, MissingImage, StoreUnavailable, UnexpectedLink
from ..tools import beneath, extents, files, progress
from ..tools.crash_points import point
from . import marker, stock_layout

SIDE = ".semishared"
MANIFEST_LIMIT = 256 << 20


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
        return f"{SIDE}/{self.name}"

    @property
    def side(self) -> str:
        return f"{self.datastore}/{self.below}"

    @property
    def link(self) -> str:
        return f"{self.side}/image"

    def clone(self, vm: int, disk: int, cloud: str = "") -> str:
        return f"{self.side}/clones/{vm}-{disk}" + (f"-{cloud}" if cloud else "")


def check(source: str, marker_id: str = "") -> os.stat_result:
    """Return the status of image `source` in the store with the id `marker_id` ('' : one that was never marked).

    Raise StoreAbsent, OtherStore, StoreUnavailable, MissingImage, UnexpectedLink or UnexpectedFile, saying on which machine.
    """
    directory, name = os.path.split(source)
    marker.check(directory, marker_id)
    with _explained(source):
        return beneath.status(directory, name)


@contextmanager
def _explained(source: str) -> Iterator[None]:
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
    """Yield a path to the image (or another file of a datastore) `source`, open for reading; raise as `check`."""
    directory, name = os.path.split(source)
    with _explained(source):
        fd = beneath.open_file(directory, name)
    try:
        yield beneath.path_of(fd)
    finally:
        os.close(fd)


@contextmanager
def side(stored: Stored, below: str = "", *, make: bool = False) -> Iterator[str]:
    """Yield a path to the image's directory of ours, or the directory `below` it, that stays where it is now."""
    with beneath.directory(stored.datastore, f"{stored.below}/{below}" if below else stored.below, make=make) as path:
        yield path


def check_store(record: dict[str, Any]) -> None:
    """Raise StoreAbsent or OtherStore unless the store of a disk in place, or of a clone on the store, is there."""
    image = record["image"]
    access = image.get("access")
    if isinstance(access, dict):
        marker.check(os.path.dirname(str(image["source"])), str(access.get("marker", "")))


def check_record(record: dict[str, Any]) -> os.stat_result:
    """Return the stat of the image of a disk in place, or of a clone on the store; raise as `check`."""
    check_store(record)
    return check(str(record["image"]["source"]))


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
            with beneath.directory(stored.datastore, f"{stored.name}.snap") as snapshots:
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
            return files.read(f"{path}/session", 100).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""


def begin_session(stored: Stored) -> None:
    """End the image's generation: from here on its content is unknown."""
    with _made(stored) as path:
        files.write(f"{path}/session", os.urandom(8).hex().encode() + b"\n")
        files.refresh(path)
        files.unlink(f"{path}/generation.json")
    point("generation ended")


def make_link(stored: Stored) -> str:
    """Return the link that in-place disks point to, made if need be.

    kvm/deploy resolves one link, and kvm/migrate leaves a disk alone that still is one.
    """
    with _made(stored) as path:
        files.symlink(f"../../{stored.name}", f"{path}/image")
    return stored.link


def check_link(stored: Stored) -> None:
    """Raise unless the image's link leads to the image, and that is a file."""
    check(stored.source)
    with _explained(stored.link), side(stored) as path:
        if os.readlink(f"{path}/image") != f"../../{stored.name}":
            raise UnexpectedLink(f"{stored.link} on {os.uname().nodename} leads to {os.readlink(f'{path}/image')}")


class Seen(NamedTuple):
    """The state of an image at one moment: equal before and after means that nobody began to write in between."""

    session: str
    size: int
    mtime_ns: int


def see(stored: Stored, marker_id: str = "") -> Seen:
    """Return the image's state; raise as `check`."""
    token = session(stored)
    stat = check(stored.source, marker_id)
    return Seen(token, stat.st_size, stat.st_mtime_ns)


def generation(stored: Stored, seen: Seen, format: str = "") -> str:
    """Return the name of the image's current generation, '' if its content is unknown, or known in another format only."""
    try:
        with side(stored) as path:
            header = files.read_json(f"{path}/generation.json")
    except FileNotFoundError:
        return ""
    if not header or any(header.get(key) != value for key, value in seen._asdict().items()):
        return ""
    if format and header.get("format", format) != format:
        # The same bytes read otherwise: another disk for a guest, and another name.
        return ""
    return str(header.get("generation", ""))


def manifest(stored: Stored, generation_name: str) -> extents.Manifest:
    """Return the manifest of `generation_name`; raise ImageChanged if the store does not hold it."""
    try:
        with side(stored) as path:
            text = files.read(f"{path}/manifest", MANIFEST_LIMIT)
    except FileNotFoundError:
        text = b""
    if extents.generation_of(text) != generation_name:
        raise ImageChanged(f"the manifest of {stored.source} is not that of generation {generation_name}")
    return extents.parse(text)


def publish_generation(stored: Stored, found: extents.Manifest, seen: Seen) -> None:
    """Make `found` the image's current generation, if the image still is as `seen`."""
    text = found.text()
    with _made(stored) as path:
        files.write(f"{path}/manifest", text)
        files.write_json(
            f"{path}/generation.json", {"generation": extents.generation_of(text), "format": found.format, **seen._asdict()}
        )
    point("generation published")


def clone_of(record: dict[str, Any]) -> str:
    """Return the store clone that a record names, '' if it is of another disk."""
    return os.path.dirname(str(record["path"]))[: -len(".snap")] if record.get("how") == "store-clone" else ""


def remove_one_clone(path: str) -> None:
    """Remove the store clone `path`: DATASTORE/.semishared/IMAGE/clones/NAME."""
    clones, name = os.path.split(path)
    side_dir = os.path.dirname(clones)
    _remove_clone(os.path.dirname(os.path.dirname(side_dir)), os.path.basename(side_dir), name)


def remove_clone(store_dir: str, vm: int, disk: int) -> None:
    """Remove the store clone of a disk that says nothing of its cloud, wherever in the store it is."""
    try:
        with beneath.directory(store_dir, SIDE) as path:
            images = [name for name in os.listdir(path) if not name.startswith(".") and name != marker.NAME]
    except (FileNotFoundError, NotADirectoryError):
        return
    for image in images:
        _remove_clone(store_dir, image, f"{vm}-{disk}")


def _remove_clone(store_dir: str, image: str, name: str) -> None:
    try:
        with beneath.directory(store_dir, f"{SIDE}/{image}/clones") as path:
            if layers.remove(f"{path}/{name}"):
                point("store clone removed")
            files.remove_staged(path, name)
    except (FileNotFoundError, NotADirectoryError, UnexpectedLink):
        pass  # none of ours: what a link leads to is nobody's clone


class Content:
    """The content of an image, for whoever copies it (stores.Content)."""

    def __init__(self, source: str, marker_id: str = "", format: str = "raw") -> None:
        self._stored = Stored(source)
        self._marker = marker_id
        self._format = format

    def see(self) -> Seen:
        """Return the image's state."""
        found = see(self._stored, self._marker)
        stock_layout.refuse(self._stored.source, self._format)
        return found

    def generation(self, seen: Seen) -> str:
        """Return the generation that was seen."""
        return generation(self._stored, seen, self._format)

    def allocated(self, seen: Seen) -> int:
        """Return what the image's file takes."""
        return files.allocated(self._stored.source)

    def copy(self, seen: Seen, target: str, format: str) -> extents.Manifest:
        """Copy the image."""
        with opened(self._stored.source) as path:
            return extents.copy(path, target, format, "store_read", direct=True)

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted`."""
        marker.check(self._stored.datastore, self._marker)
        with opened(self._stored.source) as path, open(path, "rb", buffering=0) as file:
            for index in wanted:
                content = extents.read_at(file.fileno(), index)
                progress.count("store_read", len(content))
                yield index, content

    def expected(self, generation_name: str) -> extents.Manifest | None:
        """Return the manifest of the current generation."""
        return manifest(self._stored, generation_name)

    def publish(self, found: extents.Manifest, seen: Seen) -> None:
        """Publish the generation that was found."""
        publish_generation(self._stored, found, seen)

    def unnamed(self) -> dict[str, object]:
        """Return nothing: hosts publish generations themselves."""
        return {}

    def tidy(self) -> None:
        """Remove stale staged files."""
        try:
            with side(self._stored) as path:
                files.remove_stale(path)
        except FileNotFoundError:
            pass
