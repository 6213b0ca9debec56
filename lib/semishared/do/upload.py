# SPDX-License-Identifier: Apache-2.0
"""Bring images into a store of kind `dir`: fetch, check, inspect, convert, hash, publish.

An upload works in <datastore>/.semishared/.uploads/NAME, and holds a lock in it. What a killed upload leaves there is
removed by the next one. The image appears under its final name by one rename, together with its generation.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from contextlib import contextmanager
from typing import IO, Iterator, NamedTuple

from ..errors import (
    BadArguments,
    ChecksumMismatch,
    MissingImage,
    NotSupported,
    SemisharedError,
    StoreUnavailable,
    UnsafeImage,
)
from ..units import human
from . import dir_store, disks, extents, files, inspection, locks, qemu_img
from .run import LONG_S, piped, run
from .trace import point

UPLOADS = ".uploads"
URL = re.compile(r"https?://[A-Za-z0-9._~:/?#@&+,=%\-]+\Z")
"""What is accepted as a URL: OpenNebula's downloader puts it between apostrophes before a shell reads it."""
SSH_URL = re.compile(r"ssh://((?:[A-Za-z0-9_][A-Za-z0-9._\-]*@)?[A-Za-z0-9_][A-Za-z0-9._\-]*):(/[A-Za-z0-9._/:@+,=%\-]+)\Z")
"""ssh://[user@]host:/path, as the downloader has it. It hands the host to a shell as it is: no character here means anything there."""
DOWNLOADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "datastore", "downloader.sh")
SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "--"]
HEAD = 64 << 10
"""Bytes of a file that tell its size, if any do."""


class Source(NamedTuple):
    """Where an image comes from: a local path or a URL, and how its owner says to recognise it."""

    path: str
    checksums: dict[str, str]
    decompress: bool
    limit_rate: str

    @property
    def is_url(self) -> bool:
        return "://" in self.path

    @property
    def ssh(self) -> tuple[str, str] | None:
        """Destination and path of an ssh:// URL, None for another."""
        match = SSH_URL.match(self.path)
        return (match.group(1), match.group(2)) if match and ".." not in self.path.split("/") else None

    def check_url(self) -> None:
        """Raise NotSupported for another scheme than http, https and ssh, BadArguments unless the URL is plain."""
        scheme = self.path.partition("://")[0]
        if scheme not in ("http", "https", "ssh"):
            raise NotSupported(f"uploads from {scheme}://, only local files and http, https and ssh URLs can be")
        if not (self.ssh if scheme == "ssh" else URL.match(self.path)):
            raise BadArguments(f"not a URL that can be fetched: {self.path!r}")


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


@contextmanager
def opened(path: str) -> Iterator[str]:
    """Open a local file once and yield a path to that open file (for our children too), which no later rename can change."""
    try:
        # Not to wait for the other end of a FIFO.
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as e:
        raise MissingImage(f"{path}: {e.strerror}") from None
    with file:
        if not os.path.isfile(f"/proc/{os.getpid()}/fd/{file.fileno()}"):
            raise MissingImage(f"{path} is no regular file")
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def real_path(opened_path: str) -> str:
    """Return where the file behind `opened_path` really is."""
    return os.readlink(opened_path)


def check_sums(path: str, checksums: dict[str, str], name: str) -> None:
    """Raise ChecksumMismatch unless `path` has all `checksums` ({"md5": hex, ...})."""
    for kind, wanted in checksums.items():
        found = checksum(path, kind)
        if found != wanted.strip().lower():
            raise ChecksumMismatch(f"{name}: {kind} is {found}, not {wanted}")


def checksum(path: str, kind: str) -> str:
    """Return the hex digest of a file; `kind` as hashlib names it."""
    digest = hashlib.new(kind)
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(source: Source, upload: Upload) -> str:
    """Download a URL and return the file; by OpenNebula's downloader where it is installed, else by curl or ssh."""
    source.check_url()
    target = upload.file("download")
    if os.path.exists(DOWNLOADER):
        argv = [os.path.normpath(DOWNLOADER), "--nodecomp"]
        if source.limit_rate:
            argv += ["--limit", source.limit_rate]
        run([*argv, source.path, target], timeout_s=LONG_S)
    elif source.ssh:
        with piped([*SSH, source.ssh[0], f"cat -- '{source.ssh[1]}'"], feed=False) as stream, open(target, "xb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
    else:
        limit = ["--limit-rate", source.limit_rate] if source.limit_rate else []
        run(["curl", "-sSfL", "--proto", "=http,https", *limit, "-o", target, "--", source.path], timeout_s=LONG_S)
    point("downloaded")
    return target


def decompressor(head: bytes) -> str:
    """Return 'gzip', 'bz2', 'lzma' or '' for what the first bytes announce."""
    for magic, kind in ((b"\x1f\x8b", "gzip"), (b"BZh", "bz2"), (b"\xfd7zXZ\0", "lzma")):
        if head.startswith(magic):
            return kind
    return ""


@contextmanager
def plain(path: str) -> Iterator[IO[bytes]]:
    """Open `path` and yield its content, decompressed if it is compressed."""
    import importlib

    with open(path, "rb") as file:
        kind = decompressor(file.read(6))
    opener = importlib.import_module(kind).open if kind else open
    with opener(path, "rb") as file:
        try:
            yield file
        except Exception as e:
            # Each library has its own errors, some are OSErrors without a number; a full disk is none of them.
            if not kind or getattr(e, "errno", None) is not None or isinstance(e, SemisharedError):
                raise
            raise UnsafeImage(f"the {kind} data cannot be decompressed: {e}") from None


def decompress(path: str, upload: Upload, max_size: int) -> str:
    """Return `path`, or a decompressed copy of it if it is compressed; raise UnsafeImage beyond `max_size` bytes."""
    with open(path, "rb") as file:
        kind = decompressor(file.read(6))
    if not kind:
        return path
    target = upload.file("decompressed")
    size = 0
    with plain(path) as file, open(target, "xb") as out:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            size += len(chunk)
            if size > max_size:
                raise UnsafeImage(f"the {kind} data is larger than {human(max_size)} when decompressed")
            out.write(chunk)
    point("decompressed")
    return target


def convert(path: str, found: str, wanted: str, upload: Upload) -> str:
    """Return `path`, or a copy in format `wanted` if it has another."""
    if found == wanted:
        return path
    target = upload.file("converted")
    qemu_img.convert(path, found, target, wanted)
    point("converted")
    return target


def publish(path: str, format: str, upload: Upload, *, sparse: bool = True) -> str:
    """Publish a copy of `path` as a new image with its generation; return the image's path (SOURCE)."""
    staged = upload.file("image")
    if path != staged:
        manifest = extents.copy(path, staged, format, "store_written")
    else:
        manifest = extents.copy(path, None, format, "store_read")
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
    files.unlink(path)
    point("image removed")
    files.remove_staged(*os.path.split(path))
    shutil.rmtree(f"{path}.snap", ignore_errors=True)
    shutil.rmtree(stored.side, ignore_errors=True)
    point("side directory removed")


def size_of(path: str, max_virtual_size: int, name: str, unpack: bool = True) -> int:
    """Return the size in bytes that the image in the local file `path` will have as a disk; `unpack` it if compressed."""
    with open(path, "rb") as file:
        if not unpack or not decompressor(file.read(6)):
            return inspection.inspect(path, max_virtual_size, name).virtual_size
    with plain(path) as file:
        head = file.read(HEAD)
        size = inspection.size_in_header(head)
        if size is None:
            size = len(head)
            for chunk in iter(lambda: file.read(1 << 20), b""):
                size += len(chunk)
        return size
