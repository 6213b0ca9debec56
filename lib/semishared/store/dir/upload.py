# SPDX-License-Identifier: Apache-2.0
"""Bring images into a store of kind `dir`: convert, hash, publish. intake/source.py fetches them.

An upload works in <datastore>/.semishared/.uploads/NAME and holds a lock there. A killed upload leaves that
directory; the next upload removes it. The image gets its final name by one rename, and its generation before
oned hears of it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import contextmanager
from typing import IO, Iterator, Sequence

from ...errors import StoreUnavailable, UnexpectedLink
from ...model.disk import names as disk_names
from ...model.store import dir_names
from ...tools import beneath, extents, files, locks, progress, qemu_img
from ...tools.effects import point
from . import image


class Upload:
    """The working directory of one upload into `datastore_dir`."""

    def __init__(self, datastore_dir: str, name: str, directory: str = "") -> None:
        self.datastore_dir = datastore_dir
        self.target = f"{datastore_dir}/{name}"
        self.directory = directory or f"{datastore_dir}/{dir_names.side(dir_names.UPLOADS)}/{name}"
        """During the upload a path to the open directory, which renames do not affect."""

    def file(self, name: str) -> str:
        return f"{self.directory}/{name}"


def _hold(path: str) -> IO[str] | None:
    # Others can write there: do not block on a FIFO.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    file = os.fdopen(fd, "w", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def uploading(datastore_dir: str, name: str = "") -> Iterator[Upload]:
    """Yield the directory of a new upload of the image `name` ('': a random name); remove it afterwards."""
    try:
        side = beneath.open_directory(datastore_dir, dir_names.side(), make=True)
    except OSError as e:
        raise StoreUnavailable(f"{datastore_dir}: {e.strerror}") from None
    try:
        path = beneath.path_of(side)
        name = name or os.urandom(16).hex()
        with (
            beneath.directory(path, dir_names.UPLOADS, make=True) as uploads,
            _begun(datastore_dir, path, uploads, name) as upload,
        ):
            yield upload
    finally:
        os.close(side)


@contextmanager
def _begun(datastore_dir: str, side: str, uploads: str, name: str) -> Iterator[Upload]:
    with files.enough_space(datastore_dir):
        # One at a time: between mkdir and its lock, a new upload looks like a killed one.
        with locks.exclusive(f"{side}/{dir_names.UPLOADS_LOCK}", 300):
            sweep(datastore_dir, side, uploads)
            files.remove_stale(datastore_dir)
            files.remove_stale(side)
            os.mkdir(f"{uploads}/{name}")
            directory = beneath.open_directory(uploads, name)
            upload = Upload(datastore_dir, name, beneath.path_of(directory))
            lock = _hold(dir_names.upload_lock(upload.directory))
        try:
            point("upload begun")
            yield upload
        finally:
            os.close(directory)
            files.remove_folder(f"{uploads}/{name}", ignore_errors=True)
            if lock:
                lock.close()


def sweep(datastore_dir: str, side: str, uploads: str) -> None:
    """Remove the directories of killed uploads, those with image names and without a locked lock file."""
    for name in filter(dir_names.is_image, os.listdir(uploads)):
        try:
            with beneath.directory(uploads, name) as directory:
                lock = _hold(dir_names.upload_lock(directory))
        except (OSError, UnexpectedLink):
            continue  # gone, or not an upload's directory
        if lock:
            # rmtree follows no link, neither at the top nor below.
            files.remove_folder(f"{uploads}/{name}", ignore_errors=True)
            if os.path.isdir(f"{side}/{name}") and files.is_absent(f"{datastore_dir}/{name}"):
                files.remove_folder(f"{side}/{name}", ignore_errors=True)
            lock.close()


def convert(path: str, found: str, wanted: str, upload: Upload) -> str:
    """Return `path`, or a copy converted to format `wanted` if its own differs."""
    if found == wanted:
        return path
    target = upload.file("converted")
    qemu_img.convert(qemu_img.whole_disk(path, found), found, target, wanted, foreign=True)
    point("converted")
    os.unlink(path)
    return target


def publish(
    path: str, format: str, source: str, known: extents.Manifest | None = None, *, sparse: bool = True
) -> str:
    """Publish the file `path` in an upload's directory as the new image `source`; return its generation.

    `known`: its manifest, if the writer hashed it.
    """
    directory = os.path.dirname(path)
    staged = f"{directory}/image"
    os.rename(path, staged)
    fd = beneath.open_file(directory, "image", os.O_RDWR)
    with open(fd, "r+b") as file:
        manifest = (
            known._replace(format=format)
            if known
            else extents.copy(beneath.path_of(fd), None, format, "store_read")
        )
        if not sparse and manifest.size:
            os.posix_fallocate(fd, 0, manifest.size)
        os.fchmod(fd, 0o660)
        files.fsync_open(fd)
        point("image staged")
        stored = image.Stored(source)
        token = image.begin_session(stored)
        os.rename(staged, source)
        files.fsync(stored.datastore)
        # After the rename, which changes ctime. A crash here leaves an image that oned does not know.
        image.publish_generation(stored, manifest, image.Seen.of(token, os.fstat(file.fileno())))
    point("image published")
    progress.count("store_written", files.allocated(source))
    return manifest.generation


def create(format: str, size: int, fs: str, upload: Upload, fs_options: Sequence[str] = ()) -> str:
    """Publish a new empty image, its content unknown until its first base copy; return its path."""
    staged = upload.file("image")
    with files.made(staged) as path:
        qemu_img.make_empty(path, format, size, fs, upload.directory, fs_options)
    point("image staged")
    os.rename(staged, upload.target)
    files.fsync(upload.datastore_dir)
    point("image published")
    return upload.target


def remove(path: str) -> None:
    """Remove an image, its snapshots and its directory of semishared; missing parts are no error."""
    stored = image.Stored(path)
    files.unlink(path)
    point("image removed")
    files.remove_staged(*os.path.split(path))
    _remove_tree(stored.datastore, disk_names.layers(stored.name))
    try:
        with beneath.directory(stored.datastore, dir_names.side()) as side:
            _remove_tree(side, stored.name)
    except FileNotFoundError:
        pass
    point("side directory removed")


def _remove_tree(where: str, name: str) -> None:
    """Remove a directory tree, or a link in its place; follow no link."""
    if os.path.islink(f"{where}/{name}"):
        files.unlink(f"{where}/{name}")
    files.remove_folder(f"{where}/{name}", ignore_errors=True)
