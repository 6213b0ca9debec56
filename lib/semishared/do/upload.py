# SPDX-License-Identifier: Apache-2.0
"""Bring images into a store of kind `dir`: convert, hash, publish. Where they come from: source.py.

An upload works in <datastore>/.semishared/.uploads/NAME, and holds a lock in it. What a killed upload leaves there is
removed by the next one. The image appears under its final name by one rename, together with its generation.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from typing import IO, Iterator

from ..errors import StoreUnavailable
from . import dir_store, disks, extents, files, locks, qemu_img
from .trace import point

UPLOADS = ".uploads"


class Upload:
    """The working directory of one upload into `datastore_dir`."""

    def __init__(self, datastore_dir: str, name: str) -> None:
        self.datastore_dir = datastore_dir
        self.target = f"{datastore_dir}/{name}"
        self.directory = f"{datastore_dir}/{dir_store.SIDE}/{UPLOADS}/{name}"

    def file(self, name: str) -> str:
        return f"{self.directory}/{name}"


def _hold(path: str) -> IO[str] | None:
    file = open(path, "a", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


@contextmanager
def uploading(datastore_dir: str) -> Iterator[Upload]:
    """Yield the place of a new upload; whatever happens, nothing but a published image stays."""
    try:
        os.makedirs(f"{datastore_dir}/{dir_store.SIDE}/{UPLOADS}", exist_ok=True)
    except OSError as e:
        raise StoreUnavailable(f"{datastore_dir}: {e.strerror}") from None
    upload = Upload(datastore_dir, os.urandom(16).hex())
    with files.enough_space(datastore_dir):
        # One at a time: between its directory and its lock, a new upload looks like a killed one.
        with locks.exclusive(f"{datastore_dir}/{dir_store.SIDE}/{UPLOADS}.lock", 300):
            sweep(datastore_dir)
            files.remove_stale(datastore_dir)
            files.remove_stale(f"{datastore_dir}/{dir_store.SIDE}")
            os.mkdir(upload.directory)
            lock = _hold(upload.file("lock"))
        point("upload begun")
        try:
            yield upload
        finally:
            shutil.rmtree(upload.directory, ignore_errors=True)
            if lock:
                lock.close()


def sweep(datastore_dir: str) -> None:
    """Remove what killed uploads left."""
    uploads = f"{datastore_dir}/{dir_store.SIDE}/{UPLOADS}"
    files.refresh(datastore_dir)
    for name in os.listdir(uploads):
        try:
            lock = _hold(f"{uploads}/{name}/lock")
        except FileNotFoundError:
            continue
        if lock:
            shutil.rmtree(f"{uploads}/{name}", ignore_errors=True)
            if os.path.isdir(f"{datastore_dir}/{dir_store.SIDE}/{name}") and not os.path.lexists(f"{datastore_dir}/{name}"):
                shutil.rmtree(f"{datastore_dir}/{dir_store.SIDE}/{name}", ignore_errors=True)
            lock.close()


def convert(path: str, found: str, wanted: str, upload: Upload) -> str:
    """Return `path`, or a copy in format `wanted` if it has another."""
    if found == wanted:
        return path
    target = upload.file("converted")
    qemu_img.convert(path, found, target, wanted, foreign=True)
    point("converted")
    os.unlink(path)
    return target


def publish(path: str, format: str, upload: Upload, known: extents.Manifest | None = None, *, sparse: bool = True) -> str:
    """Publish the file `path` of this upload as a new image with its generation; return the image's path (SOURCE).

    `known`: what is in it, if that was hashed when it was written.
    """
    staged = upload.file("image")
    os.rename(path, staged)
    manifest = known._replace(format=format) if known else extents.copy(staged, None, format, "store_read")
    if not sparse and manifest.size:
        with open(staged, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, manifest.size)
    os.chmod(staged, 0o660)
    files.fsync(staged)
    point("image staged")
    stored = dir_store.Stored(upload.target)
    dir_store.begin_session(stored)
    stat = os.stat(staged)
    seen = dir_store.Seen(dir_store.session(stored), stat.st_size, stat.st_mtime_ns)
    dir_store.publish_generation(stored, manifest, seen)
    os.rename(staged, upload.target)
    files.fsync(upload.datastore_dir)
    point("image published")
    return upload.target


def create(format: str, size: int, fs: str, upload: Upload) -> str:
    """Publish a new empty image, its content unknown until its first base copy; return its path."""
    staged = upload.file("image")
    disks.make_empty(staged, format, size, fs)
    os.chmod(staged, 0o660)
    files.fsync(staged)
    point("image staged")
    os.rename(staged, upload.target)
    files.fsync(upload.datastore_dir)
    point("image published")
    return upload.target


def remove(path: str) -> None:
    """Remove an image, its snapshots and all of ours beside it; nothing of it need be there."""
    stored = dir_store.Stored(path)
    dir_store.refresh(stored)
    files.unlink(path)
    point("image removed")
    files.remove_staged(*os.path.split(path))
    shutil.rmtree(f"{path}.snap", ignore_errors=True)
    shutil.rmtree(stored.side, ignore_errors=True)
    point("side directory removed")


