# SPDX-License-Identifier: Apache-2.0
"""The source of an image, a local file or a URL: fetched, checked, decompressed, measured."""

from __future__ import annotations

import os
import re
from contextlib import closing, contextmanager
from typing import Iterator

from ..errors import (
    BadArguments,
    ChecksumMismatch,
    MissingImage,
    NotSupported,
    SourceTooSlow,
    SourceUnavailable,
    ToolFailed,
    ToolTimeout,
    UnsafeImage,
)
from ..named import NamedTuple
from ..tools import image_headers, inspection, progress
from ..tools.effects import point
from ..tools.run import SILENT_S, run, stream
from ..units import amount
from . import judge
from . import unpack as intake_unpack
from .unpack import Bound, Kept, Spoiled, Work, decompressor, unpacked

SSH_URL = (
    r"ssh://((?:[A-Za-z0-9_][A-Za-z0-9._\-]*@)?[A-Za-z0-9_][A-Za-z0-9._\-]*):(/[A-Za-z0-9._/:@+,=%\-]+)\Z"
)
"""ssh://[user@]host:/path. The downloader passes the host to a shell unquoted: no special characters."""
BACKUP_URL = r"(?:rsync|restic)://([0-9]+)/[0-9]*/([0-9]+:[0-9a-f]+(?:,[0-9]+:[0-9a-f]+)*)/[A-Za-z0-9._/\-]*/disk\.[0-9]+\.[0-9]+\Z"
"""A disk in a backup datastore, as `oneimage restore` names it: datastore, backup job, increments, file."""
DOWNLOADER = os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "datastore", "downloader.sh"
)
SSH = [
    "ssh",
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "LogLevel=ERROR",
    "--",
]
LONGEST_HEADS = 256 << 10
"""Bytes of the heads of answers that are looked at."""
RETRY = ["--retry", "3"]
"""For what a server says before the first byte: too many requests, a gateway that is away."""


class Source(NamedTuple):
    """The source of an image: a local path or a URL, its checksums, and how to fetch it."""

    path: str
    checksums: dict[str, str]
    decompress: bool
    limit_rate: str
    taken: str = judge.DISK
    """As what: judge.DISK, DISC or ANYTHING."""

    @property
    def name(self) -> str:
        """PATH as lines show it: a URL without its password."""
        if not self.is_url:
            return self.path
        from ..tools import curl

        return curl.masked(self.path)

    @property
    def trusting(self) -> bool:
        """Whether any certificate will do: a checksum says what the content is, and there is no password."""
        from ..tools import curl

        return bool(self.checksums) and not curl.has_password(self.path)

    @property
    def is_url(self) -> bool:
        return "://" in self.path

    @property
    def ssh(self) -> tuple[str, str] | None:
        """Destination and path of an ssh:// URL, None for another."""
        match = re.match(SSH_URL, self.path)
        return (match.group(1), match.group(2)) if match and ".." not in self.path.split("/") else None

    @property
    def backup_store(self) -> int:
        """The backup datastore of a disk in a backup, -1 for another URL."""
        match = re.match(BACKUP_URL, self.path)
        return int(match.group(1)) if match and ".." not in self.path.split("/") else -1

    @property
    def backup_parts(self) -> frozenset[str]:
        """The backup driver's names of the increments of that disk's backup."""
        match = re.match(BACKUP_URL, self.path)
        parts = match.group(2).split(",") if match else []
        return frozenset(part.partition(":")[2] for part in parts)

    def check_url(self) -> None:
        """Raise NotSupported for a scheme that cannot be fetched, BadArguments for a malformed URL."""
        scheme = self.path.partition("://")[0]
        if self.backup_store != -1 and os.path.exists(DOWNLOADER):
            return
        if scheme not in ("http", "https", "ssh"):
            which = "only local files and http, https and ssh URLs can be"
            raise NotSupported(f"uploads from {scheme}://, {which}")
        if scheme == "ssh":
            if not self.ssh:
                raise BadArguments(f"not a URL that can be fetched: {self.path!r}")
        else:
            from ..tools import curl

            curl.escaped(self.path)


@contextmanager
def opened(path: str) -> Iterator[str]:
    """Open a local file once and yield a path to the open file, which renames do not affect."""
    try:
        # Do not block on a FIFO.
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    except OSError as e:
        raise MissingImage(f"{path}: {e.strerror}") from None
    with file:
        if not os.path.isfile(f"/proc/{os.getpid()}/fd/{file.fileno()}"):
            raise MissingImage(f"{path} is no regular file")
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def real_path(opened_path: str) -> str:
    return os.readlink(opened_path)


def check_sums(path: str, checksums: dict[str, str], name: str) -> None:
    """Raise ChecksumMismatch unless `path` has all `checksums` ({"md5": hex, ...})."""
    for kind, wanted in checksums.items():
        found = checksum(path, kind)
        if found != wanted.strip().lower():
            raise ChecksumMismatch(f"{name} has another {kind} than was given: {found}, not {wanted}")


def checksum(path: str, kind: str) -> str:
    """Return the hex digest of a file; `kind` as hashlib names it."""
    import hashlib

    digest = hashlib.new(kind)
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def refuse_greeting(destination: str) -> None:
    """Raise SourceUnavailable if the login shell prints something, which would precede the image's bytes."""
    try:
        said = run([*SSH, destination, "true"])
    except ToolFailed as e:
        raise SourceUnavailable(f"{destination}: {e.detail}") from None
    if said:
        what = f"writes to stdout (.bashrc, ~/.ssh/rc): {said[:200]!r}"
        raise SourceUnavailable(f"the login shell of {destination} {what}")


def fetch(source: Source, target: str, bound: Bound, least_rate: float, window_s: float) -> Kept:
    """Download a URL to `target`: from the web by curl, a backup by OpenNebula's downloader, else by ssh.

    Raise SourceUnavailable, UploadTooLarge, or SourceTooSlow for less than `least_rate` bytes per second
    within `window_s` seconds. A backup repository may be silent for long: there only SILENT_S of silence
    counts.
    """
    from ..tools import curl

    source.check_url()
    stdin, heads = b"", -1
    if source.ssh:
        refuse_greeting(source.ssh[0])
    if source.backup_store == -1 and not source.ssh:
        # Not by the downloader, whose command line has the URL, and its password, for all to read.
        limit = ["--limit-rate", source.limit_rate] if source.limit_rate else []
        argv, stdin = [*curl.argv(source.trusting), *RETRY, *limit], curl.config(source.path)
        heads = os.memfd_create("heads")
        argv += ["--dump-header", f"/proc/{os.getpid()}/fd/{heads}"]
    elif os.path.exists(DOWNLOADER):
        limit = ["--limit", source.limit_rate] if source.limit_rate else []
        argv = [os.path.normpath(DOWNLOADER), "--nodecomp", *limit, source.path, "-"]
    else:
        assert source.ssh
        argv = [*SSH, source.ssh[0], f"cat -- '{source.ssh[1]}'"]
    if source.limit_rate:
        least_rate = min(least_rate, amount(source.limit_rate) / 2)
    judged = bool(least_rate) and source.backup_store == -1
    silence_s = window_s if judged else SILENT_S
    try:
        with closing(stream(argv, stdin=stdin, silence_s=silence_s)) as chunks:
            counted = counting(chunks, heads)
            paced = intake_unpack.paced(counted, least_rate, window_s, source.name) if judged else counted
            kept = intake_unpack.keep(paced, target, bound, source.name)
    except ToolFailed as e:
        why = curl.reason(e.detail, source.path) if stdin else e.detail
        raise SourceUnavailable(f"{source.name} could not be downloaded: {why}") from None
    except ToolTimeout:
        raise SourceTooSlow(f"{source.name} has sent nothing for {silence_s:.0f} s") from None
    finally:
        if heads >= 0:
            os.close(heads)
    point("downloaded")
    return kept


def counting(chunks: Iterator[bytes], heads: int) -> Iterator[bytes]:
    """Yield `chunks`, and note how far they are; of how many bytes only a web server says, in curl's `heads`.

    Another machine would have to be asked once more, and a backup's repository knows no length.
    """
    from ..tools import curl

    came = 0
    progress.expect()
    for chunk in chunks:
        if not came and heads >= 0:
            progress.expect(curl.length(os.pread(heads, LONGEST_HEADS, 0)))
        came += len(chunk)
        progress.reached(came, progress.goal.of)
        yield chunk


def decompress(kept: Kept, target: str, bound: Bound, name: str) -> Kept:
    """Return `kept`, or its decompressed content in `target`; raise UnsafeImage, UploadTooLarge."""
    with open(kept.path, "rb") as file:
        kind = decompressor(file.read(6))
        if not kind:
            return kept
        file.seek(0)
        with _whole(name), closing(unpacked(file, kind)) as pieces:
            plain = intake_unpack.keep(pieces, target, bound, f"{name}, decompressed,")
    os.unlink(kept.path)
    point("decompressed")
    return plain


@contextmanager
def _whole(name: str) -> Iterator[None]:
    try:
        yield
    except Spoiled as e:
        raise UnsafeImage(f"{name}: {e}") from None


def size_of(source: Source, path: str, max_virtual_size: int, most_s: float) -> int:
    """Return the virtual size in bytes of the image in the open local file `path`; unpack it if needed.

    Raise as `judge.file`, SourceTooSlow if unpacking takes too much CPU time.
    """
    with open(path, "rb") as file:
        kind = decompressor(file.read(6)) if source.decompress else ""
        if not kind:
            return judge.file(
                path, source.taken, max_virtual_size, source.name, packed=not source.decompress
            ).virtual_size
        from . import packed_size

        file.seek(0)
        with inspection.content_of(path, source.name) as content:
            told = packed_size.size(content, kind)
        with _whole(source.name), closing(unpacked(file, kind, Work(most_s))) as pieces:
            return unpacked_size(pieces, source, max_virtual_size, told)


def unpacked_size(
    pieces: Iterator[bytes], source: Source, max_virtual_size: int, plain: int | None = None
) -> int:
    """Return the virtual size of the image in `pieces`, by its header if it has one.

    `plain`: what `pieces` are altogether, None if that is unknown; then they are read to their end. Raise as
    `judge.beginning` and `judge.needed`.
    """
    head, size, needed = bytearray(), 0, image_headers.HEAD
    for piece in pieces:
        size += len(piece)
        if len(head) < needed:
            head += piece
            if len(head) >= needed and source.taken == judge.DISK:
                needed = max(needed, judge.needed(bytes(head), source.name))
            if len(head) < needed:
                continue
            told = judge.beginning(bytes(head), plain, source.taken, max_virtual_size, source.name)
            if told is not None or plain is not None:
                break
        inspection.check_claim(size, max_virtual_size, source.name)
    else:
        # All of it has come.
        plain = size
    told = judge.beginning(bytes(head), plain, source.taken, max_virtual_size, source.name)
    if told is None:
        told = size if plain is None else plain
    inspection.check_claim(told, max_virtual_size, source.name)
    return told
