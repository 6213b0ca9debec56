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
                                    /clones/VM-DISK   non-persistent disks whose place is shared (layers.py)

A generation is current only while its token is the session's and size and time are the image's own. So the end of a
generation is one rename (a new token), before a guest can write; and whoever publishes a generation too late
publishes one that nobody takes. Nothing here needs a lock across hosts.

On NFS, what is known of a name is old: absent for up to 30 s after it was made elsewhere, size and time of a file as they
were. So names are looked up in directories that have just been opened, and an image is opened to see what it is.
"""

from __future__ import annotations

import os
from typing import Any, Iterable, Iterator, NamedTuple

from ..errors import ImageChanged, MissingImage, StoreUnavailable
from . import extents, files, layers, marker, progress, stock_layout
from .trace import point

SIDE = ".semishared"
MANIFEST_LIMIT = 256 << 20


class Stored(NamedTuple):
    """An image in a store, by the path OpenNebula calls SOURCE."""

    source: str

    @property
    def side(self) -> str:
        directory, name = os.path.split(self.source)
        return f"{directory}/{SIDE}/{name}"

    @property
    def link(self) -> str:
        return f"{self.side}/image"

    def clone(self, vm: int, disk: int) -> str:
        return f"{self.side}/clones/{vm}-{disk}"


def check(source: str, marker_id: str = "") -> os.stat_result:
    """Return the stat of image `source` in the store with the id `marker_id` ('' : one that was never marked).

    Raise StoreAbsent, OtherStore, StoreUnavailable or MissingImage, saying on which machine.
    """
    node = os.uname().nodename
    directory = os.path.dirname(source)
    files.refresh(directory)
    marker.check(directory, marker_id)
    try:
        # Not stat(): its answer may be 30 s old. A pipe in an image's place must not hold us up.
        fd = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if not os.path.isdir(directory) or not os.listdir(directory):
            raise StoreUnavailable(f"{directory} is not mounted on {node}") from None
        raise MissingImage(f"image {source} is not there on {node}") from None
    except PermissionError:
        # While a guest has it, libvirt may have given it to that guest's user.
        return os.stat(source)
    except OSError as e:
        raise StoreUnavailable(f"{source} on {node}: {e.strerror}") from None
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def refresh(stored: Stored) -> None:
    """Let what is beside an image be looked up anew."""
    directory = os.path.dirname(stored.source)
    files.refresh(directory, f"{directory}/{SIDE}", stored.side)


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


def _make_side(stored: Stored) -> None:
    try:
        os.makedirs(stored.side, exist_ok=True)
        files.remove_stale(stored.side)
        files.remove_stale(f"{stored.source}.snap")
    except OSError as e:
        raise StoreUnavailable(f"{stored.side} on {os.uname().nodename}: {e.strerror}") from None


def session(stored: Stored) -> str:
    """Return the token of the last session, '' if the image never had one."""
    refresh(stored)
    try:
        with open(f"{stored.side}/session", encoding="ascii") as file:
            return file.read(100).strip()
    except FileNotFoundError:
        return ""


def begin_session(stored: Stored) -> None:
    """End the image's generation: from here on its content is unknown."""
    _make_side(stored)
    files.write(f"{stored.side}/session", os.urandom(8).hex().encode() + b"\n")
    refresh(stored)
    files.unlink(f"{stored.side}/generation.json")
    point("generation ended")


def make_link(stored: Stored) -> str:
    """Return the link that in-place disks point to, made if need be (ONED §2c: a link to a link is left alone)."""
    _make_side(stored)
    files.symlink(f"../../{os.path.basename(stored.source)}", stored.link)
    return stored.link


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


def generation(stored: Stored, seen: Seen) -> str:
    """Return the name of the image's current generation, '' if its content is unknown."""
    refresh(stored)
    header = files.read_json(f"{stored.side}/generation.json")
    if not header or any(header.get(key) != value for key, value in seen._asdict().items()):
        return ""
    return str(header.get("generation", ""))


def manifest(stored: Stored, generation_name: str) -> extents.Manifest:
    """Return the manifest of `generation_name`; raise ImageChanged if the store does not hold it."""
    refresh(stored)
    try:
        with open(f"{stored.side}/manifest", "rb") as file:
            text = file.read(MANIFEST_LIMIT)
    except FileNotFoundError:
        text = b""
    if extents.generation_of(text) != generation_name:
        raise ImageChanged(f"the manifest of {stored.source} is not that of generation {generation_name}")
    return extents.parse(text)


def publish_generation(stored: Stored, found: extents.Manifest, seen: Seen) -> None:
    """Make `found` the image's current generation, if the image still is as `seen`."""
    _make_side(stored)
    text = found.text()
    files.write(f"{stored.side}/manifest", text)
    files.write_json(
        f"{stored.side}/generation.json", {"generation": extents.generation_of(text), "format": found.format, **seen._asdict()}
    )
    point("generation published")


def remove_clone(store_dir: str, vm: int, disk: int) -> None:
    """Remove the store clone of a disk, wherever in the store it is."""
    side = f"{store_dir}/{SIDE}"
    files.refresh(store_dir)
    try:
        images = os.listdir(side)
    except (FileNotFoundError, NotADirectoryError):
        return
    for image in images:
        if image.startswith(".") or image == marker.NAME:
            continue
        directory = f"{side}/{image}/clones"
        files.refresh(f"{side}/{image}")
        if layers.remove(f"{directory}/{vm}-{disk}"):
            point("store clone removed")
        files.remove_staged(directory, f"{vm}-{disk}")


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
        return generation(self._stored, seen)

    def allocated(self, seen: Seen) -> int:
        """Return what the image's file takes."""
        return files.allocated(self._stored.source)

    def copy(self, seen: Seen, target: str, format: str) -> extents.Manifest:
        """Copy the image."""
        return extents.copy(self._stored.source, target, format, "store_read", direct=True)

    def read(self, wanted: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted`."""
        check(self._stored.source, self._marker)
        with open(self._stored.source, "rb", buffering=0) as file:
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
        files.remove_stale(self._stored.side)
