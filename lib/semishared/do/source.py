# SPDX-License-Identifier: Apache-2.0
"""Where an image comes from: a local file or a URL, fetched, checked and decompressed."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import contextmanager
from typing import IO, Iterator, NamedTuple

from ..errors import (
    BadArguments,
    ChecksumMismatch,
    MissingImage,
    NotSupported,
    SemisharedError,
    SourceUnavailable,
    ToolFailed,
    UnsafeImage,
)
from ..units import human
from . import inspection
from .run import stream
from .trace import point

URL = re.compile(r"https?://[A-Za-z0-9._~:/?#@&+,=%\-]+\Z")
"""What is accepted as a URL: OpenNebula's downloader puts it between apostrophes before a shell reads it."""
SSH_URL = re.compile(r"ssh://((?:[A-Za-z0-9_][A-Za-z0-9._\-]*@)?[A-Za-z0-9_][A-Za-z0-9._\-]*):(/[A-Za-z0-9._/:@+,=%\-]+)\Z")
"""ssh://[user@]host:/path, as the downloader has it. It hands the host to a shell as it is: no character here means anything there."""
BACKUP_URL = re.compile(
    r"(?:rsync|restic)://([0-9]+)/[0-9]*/[0-9]+:[0-9a-f]+(?:,[0-9]+:[0-9a-f]+)*/[A-Za-z0-9._/\-]*/disk\.[0-9]+\.[0-9]+\Z"
)
"""A disk in a backup datastore, as `oneimage restore` names it: datastore, backup job, increments, file."""
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

    @property
    def backup_store(self) -> int:
        """The backup datastore of a disk in a backup, -1 for another URL."""
        match = BACKUP_URL.match(self.path)
        return int(match.group(1)) if match and ".." not in self.path.split("/") else -1

    def check_url(self) -> None:
        """Raise NotSupported for another scheme than http, https, ssh or a backup's, BadArguments unless the URL is plain."""
        scheme = self.path.partition("://")[0]
        if self.backup_store != -1 and os.path.exists(DOWNLOADER):
            return
        if scheme not in ("http", "https", "ssh"):
            raise NotSupported(f"uploads from {scheme}://, only local files and http, https and ssh URLs can be")
        if not (self.ssh if scheme == "ssh" else URL.match(self.path)):
            raise BadArguments(f"not a URL that can be fetched: {self.path!r}")


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


def fetch(source: Source, target: str) -> str:
    """Download a URL to the file `target` and return that; by OpenNebula's downloader where it is installed, else by curl or ssh.

    Raise SourceUnavailable.
    """
    source.check_url()
    if os.path.exists(DOWNLOADER):
        limit = ["--limit", source.limit_rate] if source.limit_rate else []
        argv = [os.path.normpath(DOWNLOADER), "--nodecomp", *limit, source.path, "-"]
    elif source.ssh:
        argv = [*SSH, source.ssh[0], f"cat -- '{source.ssh[1]}'"]
    else:
        limit = ["--limit-rate", source.limit_rate] if source.limit_rate else []
        argv = ["curl", "-sSfL", "--proto", "=http,https", *limit, "--", source.path]
    try:
        with open(target, "xb") as file:
            for chunk in stream(argv):
                file.write(chunk)
    except ToolFailed as e:
        raise SourceUnavailable(f"{source.path} could not be downloaded: {e.detail}") from None
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


def decompress(path: str, target: str, max_size: int) -> str:
    """Return `path`, or `target` with its decompressed content if it is compressed; raise UnsafeImage beyond `max_size` bytes."""
    with open(path, "rb") as file:
        kind = decompressor(file.read(6))
    if not kind:
        return path
    size = 0
    with plain(path) as file, open(target, "xb") as out:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            size += len(chunk)
            if size > max_size:
                raise UnsafeImage(f"the {kind} data is larger than {human(max_size)} when decompressed")
            out.write(chunk)
    point("decompressed")
    return target


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
