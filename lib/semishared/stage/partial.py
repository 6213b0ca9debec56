# SPDX-License-Identifier: Apache-2.0
"""A partial base: extents arrive in any order, from any source.

    staging/<store>-<image>/generation    the generation that it is to become
                           /manifest      the hash of each extent; an extent without its hash is refused
                           /image         sparse, of full size; a missing extent is a hole or has wrong
                                          content
                           /have          a line per verified extent: what the host serves to others
                                          (stage/peers.py)
                           /unverified    the list of a killed run, until its extents are hashed again

A partial base is changed under the lock of its image. The next action resumes one that a killed action left,
after it has read and hashed the extents again; also one that was complete and only not published. It removes
one of another generation.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import struct
import threading
from typing import Callable

from ..device import folders
from ..errors import ImageChanged, TransferCorrupt
from ..model.base import names as base_names
from ..model.steps import ImageRef
from ..tools import extents, files, progress
from ..tools.effects import point

AT_ONCE = 1 << 20
"""Bytes of one write past the page cache, for which a guest's write may wait; a quarter idles the device."""
FICLONERANGE = 0x4020940D
"""From <linux/fs.h>; Python does not define it."""


def directory_of(root: str, name: str) -> str:
    """Return where the base called <store>-<image>-<generation> is made."""
    return base_names.staging(root, base_names.prefix_of(name))


def generation_in(directory: str) -> str:
    """Return the generation that is being made in `directory`, '' if none."""
    try:
        with open(base_names.generation(directory), encoding="ascii") as file:
            return file.read(100).strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _is_finished(directory: str, generation: str) -> bool:
    """Return True if `directory` has that whole generation: only its publication was killed."""
    try:
        with open(base_names.manifest(directory), "rb") as file:
            is_it = extents.generation_of(file.read()) == generation
        return is_it and not generation_in(directory) and os.stat(base_names.image(directory)).st_nlink == 1
    except FileNotFoundError:
        return False


class _Beside:
    """Runs a function in a thread, beside the `with` block; raises its error at the end of the block.

    Python releases its global lock while it hashes or waits for a device. Linux starts a thread with its
    parent's I/O priority (ioprio_set(2)).
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except Exception as e:  # noqa: BLE001 - it is raised where it is waited for
            self._error = e


class Partial:
    """A base in progress; use it under its image's lock, and `close` it."""

    def __init__(self, root: str, image: ImageRef) -> None:
        self.directory = base_names.staging(root, image.base_prefix)
        self._image, self._manifest = base_names.image(self.directory), base_names.manifest(self.directory)
        self.generation = image.generation
        self.manifest: extents.Manifest | None = None
        self.have: set[int] = set()
        self._fd = self._direct = self._journal = -1
        self._memory: mmap.mmap | None = None
        self._is_resumed = False
        self._unflushed: list[int] = []
        self._flushed: list[int] = []
        folders.remove_failed(self.directory)
        if _is_finished(self.directory, image.generation):
            # In this order: a kill in between leaves a finished base, a kill afterwards a resumable one.
            with open(self._manifest, "rb") as file:
                self._write_unverified(set(extents.parse(file.read()).extents))
            files.write(base_names.generation(self.directory), image.generation.encode())
        elif generation_in(self.directory) != image.generation:
            folders.at(self.directory).clear()
            folders.stage(root, image.base_prefix, near=base_names.base(root, image.base_name))
            os.makedirs(base_names.leases(self.directory))
            files.write(base_names.generation(self.directory), image.generation.encode())
            point("partial made")
        files.remove_staged(self.directory)
        try:
            with open(self._manifest, "rb") as file:
                self.begin(file.read())
        except (FileNotFoundError, ImageChanged, TransferCorrupt):
            pass

    def begin(self, text: bytes) -> None:
        """Take the manifest; verify an earlier run's extents. Raise TransferCorrupt if it is foreign."""
        if self.manifest is not None:
            return
        if extents.generation_of(text) != self.generation:
            raise TransferCorrupt("a manifest of another generation")
        manifest = extents.parse(text)
        if not self._is_written(text):
            files.write(self._manifest, text, 0o440)
        if os.path.exists(self._image):
            os.chmod(self._image, 0o600)
        self._fd = os.open(self._image, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, manifest.size)
        self._direct = extents.open_direct(self._image, os.O_WRONLY)
        self.manifest = manifest
        listed = have(self.directory) | _listed(base_names.unverified(self.directory))
        self._is_resumed = bool(listed) or os.stat(self._fd).st_blocks > 0
        if listed:
            # Another kill must not lose the list; peers get only extents that were verified again.
            self._write_unverified(listed)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._journal = os.open(base_names.have(self.directory), flags, 0o600)
        for index in sorted(listed & manifest.extents.keys()):
            if self._is_there(index):
                self._note(index)
        files.unlink(base_names.unverified(self.directory))
        point("partial begun")

    def _is_written(self, text: bytes) -> bool:
        try:
            with open(self._manifest, "rb") as file:
                return file.read() == text
        except OSError:
            return False

    def _is_there(self, index: int) -> bool:
        """Return True if a listed extent is readable and has its hash."""
        assert self.manifest is not None
        progress.touch()
        try:
            content = os.pread(self._fd, extents.EXTENT, index * extents.EXTENT)
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == self.manifest.extents[index]

    def _write_unverified(self, indices: set[int]) -> None:
        lines = b"".join(b"%d\n" % index for index in sorted(indices))
        files.write(base_names.unverified(self.directory), lines)

    def adopt(self, manifest: extents.Manifest) -> None:
        """Take the file `image`, which another function has replaced by a whole, verified copy."""
        files.write(self._manifest, manifest.text(), 0o440)
        self.close()
        self._fd = os.open(self._image, os.O_RDWR)
        self.manifest, self.have = manifest, set(manifest.extents)

    def _note(self, index: int) -> None:
        os.write(self._journal, b"%d\n" % index)
        self.have.add(index)

    def put(self, index: int, content: bytes | memoryview, digest: str = "") -> bool:
        """Store an extent; return False if it does not have its hash, True also if it was there."""
        if self.manifest is None:
            raise TransferCorrupt("extents before their manifest")
        expected = self.manifest.extents.get(index)
        if expected is None or (digest and digest != expected):
            return False
        if index in self.have:
            return True
        if len(content) != min(extents.EXTENT, self.manifest.size - index * extents.EXTENT):
            return False
        with _Beside(lambda: self._write(index, memoryview(content))):
            is_it = hashlib.sha256(content).hexdigest() == expected
        if is_it:
            self._take(index)
        else:
            # Wrong data is there now: what replaces it must be written with its zeros.
            self._is_resumed = True
        return is_it

    def _take(self, index: int) -> None:
        self._note(index)
        self._unflushed.append(index)
        progress.touch()
        if len(self._unflushed) >= extents.FLUSH:
            self._flush()

    def put_from(self, source: int, at: int, index: int, content: bytes) -> bool:
        """Store extent `at` of the open, unchanging file `source`, as `put` does.

        A file system with reflinks shares the blocks (ioctl_ficlonerange(2)): nothing is written.
        """
        assert self.manifest is not None
        if index in self.have or hashlib.sha256(content).hexdigest() != self.manifest.extents.get(index):
            return self.put(index, content)
        span = struct.pack("=qQQQ", source, at * extents.EXTENT, len(content), index * extents.EXTENT)
        try:
            fcntl.ioctl(self._fd, FICLONERANGE, span)
        except OSError:
            return self.put(index, content)
        self._take(index)
        return True

    def _write(self, index: int, content: memoryview) -> None:
        """Write an extent with O_DIRECT, or through the page cache where the file system refuses that.

        Direct writes obey this process's I/O priority and do not push the guests' data out of the page cache.
        """
        # A resumed file may have old data anywhere, so zeros are written too.
        parts = [(0, content)] if self._is_resumed else extents.blocks(content)
        for at, data in parts:
            offset = index * extents.EXTENT + at
            if not (self._passes(data, offset) or self._passes(self._aligned(data), offset)):
                extents.pwrite(self._fd, data, offset)

    def _passes(self, data: memoryview, offset: int) -> bool:
        """Write with O_DIRECT; return False if memory, length or file system do not allow it (open(2))."""
        try:
            for start in range(0, len(data), AT_ONCE):
                extents.pwrite(self._direct, data[start : start + AT_ONCE], offset + start)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        return True

    def _aligned(self, data: memoryview) -> memoryview:
        """Return the data in page-aligned memory: librbd's, for one, is not aligned."""
        self._memory = self._memory or mmap.mmap(-1, extents.EXTENT)
        view = memoryview(self._memory)[: len(data)]
        view[:] = data
        return view

    def _flush(self) -> None:
        os.fdatasync(self._fd)
        # Not the last ones: the next host in a chain is about to ask for them.
        for index in self._flushed:
            os.posix_fadvise(self._fd, index * extents.EXTENT, extents.EXTENT, os.POSIX_FADV_DONTNEED)
        self._flushed, self._unflushed = self._unflushed, []

    def missing(self) -> list[int]:
        """Return the missing extents in order, none while the manifest is unknown."""
        return sorted(self.manifest.extents.keys() - self.have) if self.manifest else []

    @property
    def is_complete(self) -> bool:
        """Return True if every extent is there."""
        return self.manifest is not None and len(self.have) == len(self.manifest.extents)

    def finish(self) -> None:
        """Flush all of it to the device, ready to be published."""
        os.fsync(self._fd)
        self.close()
        os.chmod(self._image, 0o440)
        os.chmod(self._manifest, 0o440)
        files.unlink(base_names.have(self.directory))
        files.unlink(base_names.generation(self.directory))
        files.fsync(self.directory)
        point("partial finished")

    def close(self) -> None:
        """Close its files; the next run resumes from what they hold."""
        for fd in (self._fd, self._direct, self._journal):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = self._journal = -1


def have(directory: str) -> set[int]:
    """Return the verified extents of a partial base: those that the host may serve."""
    return _listed(base_names.have(directory))


def _listed(path: str) -> set[int]:
    """Return the extents that a journal lists; an incomplete last line does not count."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return set()
    return {int(line) for line in lines if line.isdigit()}
