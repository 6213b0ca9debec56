# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image in a mounted store, or of a disk that is one: independent copies beside it.

    SOURCE           the present content, in the image's own format
    SOURCE.snap/0    the content when snapshot 0 was taken, in the same format

A crash leaves a staged file in SOURCE.snap, which the next operation on the image removes.

Images with snapshots of OpenNebula's own file drivers (`qcow2`, `shared`) are refused. Their layout:

    SOURCE                    their oldest layer; in our layout the present content
    SOURCE.snap/NAME.snap  -> .          for relative backing names; our layout has no link there
               /0          -> SOURCE
               /1          qcow2 over 0: the writes after snapshot 0; the highest number is the present
               /3.current  names the layer that snapshot 3 has become part of

Raw images with snapshots, and images without any, are the same in both layouts: SOURCE is the content.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager
from typing import Iterator

from ...errors import MissingImage, Overtaken, StockImage
from ...model.disk import names as disk_names
from ...tools import beneath, files, inspection, layers, qemu_img
from ...tools.effects import point
from ...tools.run import work
from .. import writers
from . import image
from .image import Stored


def folder(source: str) -> str:
    """Return the directory of an image's snapshots."""
    return disk_names.layers(source)


@contextmanager
def _opened(source: str, *, make: bool = False) -> Iterator[str]:
    """Yield a path to the open directory of an image's snapshots; renames do not affect it."""
    with beneath.directory(os.path.dirname(source), os.path.basename(folder(source)), make=make) as path:
        yield path


def numbers(source: str) -> list[int]:
    """Return the numbers of an image's snapshots."""
    try:
        with _opened(source) as path:
            return layers.numbered(path)
    except FileNotFoundError:
        return []


@contextmanager
def opened(source: str, snapshot: int) -> Iterator[str]:
    """Yield a path to an open snapshot of an image; raise MissingImage."""
    datastore, name = os.path.split(folder(source))
    with ExitStack() as stack:
        try:
            found = stack.enter_context(beneath.file(datastore, f"{name}/{snapshot}"))
        except FileNotFoundError:
            raise MissingImage(f"{folder(source)}/{snapshot} is not there on {os.uname().nodename}") from None
        yield found


@contextmanager
def kept(source: str, snapshot: int) -> Iterator[str]:
    """Yield a staged name for the snapshot; publish it when the block ends well."""
    with files.enough_space(os.path.dirname(source)), _opened(source, make=True) as snapshots:
        files.remove_staged(snapshots)
        forget_links(snapshots)
        with files.published(f"{snapshots}/{snapshot}") as staged:
            yield staged
    point("snapshot published")


def copy(source: str, target: str) -> None:
    """Copy an image file to the new sparse file `target`."""
    with files.made(target) as made:
        work(["cp", "--sparse=always", "--reflink=auto", "--", source, made])


def refuse_newer(stored: Stored, session: str) -> None:
    """Raise Overtaken if an image left `session`: a guest got it, a disk committed, or it was replaced."""
    if image.session(stored) != session:
        why = f"was given to a guest, or replaced, since this was planned for it on {os.uname().nodename}"
        raise Overtaken(f"{stored.source} {why}: it is left as it is")


def put(staged: str, stored: Stored, session: str) -> None:
    """Replace an image by a staged file, which ends its generation; raise AnotherWriter, Overtaken."""
    # A guest would go on writing to the old file, which has no name any more.
    writers.check_file(stored.source)
    refuse_newer(stored, session)
    os.rename(staged, stored.source)
    # After the rename: an earlier new token would hide a session of another host. Until then the new inode
    # ends the generation.
    image.begin_session(stored)


def copy_back(source: str, snapshot: int, format: str, min_size: int, session: str = "") -> None:
    """Replace an image's content by a snapshot's, of at least `min_size` bytes; this ends its generation.

    Raise AnotherWriter if a process writes to the image, Overtaken if it leaves `session` ('': the present
    one).
    """
    session = session or image.session(Stored(source))
    refuse_newer(Stored(source), session)
    with opened(source, snapshot) as found, _opened(source) as snapshots:
        writers.check_file(source)
        _put_back(session, source, found, snapshots, format, min_size)
    files.fsync(os.path.dirname(source))
    point("image reverted")


def _put_back(session: str, source: str, path: str, snapshots: str, format: str, min_size: int) -> None:
    files.remove_staged(snapshots)
    # Not beside the image, where every name is an image's.
    staged = files.staged_name(f"{snapshots}/image")
    try:
        with files.enough_space(os.path.dirname(source)):
            with files.made(staged) as made:
                work(["cp", "--sparse=always", "--reflink=auto", "--", path, made])
                inspection.check(made, format, beneath.readable(path))
                qemu_img.grow(made, format, min_size)
            point("revert staged")
            put(staged, Stored(source), session)
    except BaseException:
        files.unlink(staged)
        raise


def drop_copy(source: str, snapshot: int) -> None:
    """Remove a snapshot beside an image, if it exists."""
    try:
        with _opened(source) as snapshots:
            files.remove_staged(snapshots)
            files.unlink(f"{snapshots}/{snapshot}")
    except FileNotFoundError:
        pass
    point("snapshot removed")
    _remove_if_empty(folder(source))


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass


def flatten(source: str, snapshot: int, format: str, min_size: int) -> None:
    """Make a snapshot the image's content and remove all snapshots, that one last: a rerun must find it."""
    if numbers(source):
        copy_back(source, snapshot, format, min_size)
    for number in sorted(numbers(source), key=lambda number: number == snapshot):
        drop_copy(source, number)
    _remove_if_empty(folder(source))


def is_layered(source: str, format: str) -> bool:
    """Return True if the image's content is in layers of a stock driver, and not in `source` itself.

    A directory with both their links and numbered files counts as such layers.
    """
    try:
        with beneath.directory(
            os.path.dirname(source), disk_names.layers(os.path.basename(source))
        ) as folder:
            return _is_layered(folder, format)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_layered(folder: str, format: str) -> bool:
    numbered, signs = [], False
    for name in os.listdir(folder):
        try:
            mode = os.lstat(f"{folder}/{name}").st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode) or name.endswith(".current"):
            signs = True
        elif disk_names.is_number(name) and stat.S_ISREG(mode):
            numbered.append(name)
    if not numbered:
        return False
    # The first bytes of a raw copy belong to a guest, and prove nothing.
    return signs or (format == "qcow2" and any(_has_backing(f"{folder}/{name}") for name in numbered))


def _has_backing(path: str) -> bool:
    try:
        return layers.backing_of(path)[0] != ""
    except OSError:
        return False


def refuse(source: str, format: str) -> None:
    """Raise StockImage if the image's content is in layers of a stock driver."""
    if is_layered(source, format):
        raise StockImage(
            f"image {source} has snapshots of OpenNebula's own drivers: what it holds is in "
            f"{disk_names.layers(source)}"
        )


def forget_links(folder: str) -> None:
    """Remove a stock driver's links beside an image without layers; with a snapshot they mean layers."""
    for name in os.listdir(folder):
        if os.path.islink(f"{folder}/{name}"):
            files.unlink(f"{folder}/{name}")
