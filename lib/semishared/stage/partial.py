# SPDX-License-Identifier: Apache-2.0
"""A base on its way, extent by extent, in whatever order and from wherever they come.

    staging/<store>-<image>/generation    which one it is to become
                           /manifest      its hashes: what an extent must be to be taken
                           /image         sparse, of its full size; what has not come is a hole, or was not
                           what it should be
                           /have          a line per extent that is in image: what others may be served
                           (stage/peers.py)
                           /unverified    the same of what a killed run has left, while it is read again

It is made under the lock of the image's bases. One that was left by a killed action is gone on with, after
what it has was read and hashed again, all of it if it was finished and not published; one of another
generation is removed.
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

from ..device import devices, offline
from ..errors import ImageChanged, TransferCorrupt
from ..model.base import names as base_names
from ..model.steps import ImageRef
from ..tools import extents, files, progress
from ..tools.effects import point

AT_ONCE = 1 << 20
"""Bytes of one write past the page cache: for so much a guest's own write may have to wait. With a quarter of
it the device rests.
"""
FICLONERANGE = 0x4020940D
"""Of <linux/fs.h>; Python has no name for it."""


def directory_of(root: str, name: str) -> str:
    """Return where the base called <store>-<image>-<generation> is made."""
    return base_names.staging(root, base_names.prefix_of(name))


def generation_in(directory: str) -> str:
    """Return what generation is being made in `directory`, '' if none."""
    try:
        with open(base_names.generation(directory), encoding="ascii") as file:
            return file.read(100).strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _is_finished(directory: str, generation: str) -> bool:
    """Tell whether all of that generation is in `directory`, made for nobody else: only its publication was
    killed.
    """
    try:
        with open(base_names.manifest(directory), "rb") as file:
            is_it = extents.generation_of(file.read()) == generation
        return is_it and not generation_in(directory) and os.stat(base_names.image(directory)).st_nlink == 1
    except FileNotFoundError:
        return False


class _Beside:
    """Has something done, within a `with` block, by a thread of its own; raises at the end of the block what
    that has raised.

    Python waits for a device, or hashes, without its lock. A thread begins in the class of I/O that who
    started it is in (ioprio_set(2)).
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
    """A base that is being made; use under its lock. `close` when done."""

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
        offline.abandon(self.directory)
        if _is_finished(self.directory, image.generation):
            # In this order: killed in between it still is what it was, and afterwards it has what it had.
            with open(self._manifest, "rb") as file:
                self._write_unverified(set(extents.parse(file.read()).extents))
            files.write(base_names.generation(self.directory), image.generation.encode())
        elif generation_in(self.directory) != image.generation:
            devices.clear(self.directory)
            devices.stage(
                root, image.base_prefix, 0, devices.device_of(base_names.base(root, image.base_name))
            )
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
        """Take the manifest, and known extents of it; raise TransferCorrupt if it is another generation's."""
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
            # Not to be lost by another kill, nor served before it was read again.
            self._write_unverified(listed)
        self._journal = os.open(
            base_names.have(self.directory), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600
        )
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
        """Tell whether a noted extent is what the manifest says, and readable."""
        assert self.manifest is not None
        progress.touch()
        try:
            content = os.pread(self._fd, extents.EXTENT, index * extents.EXTENT)
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == self.manifest.extents[index]

    def _write_unverified(self, indices: set[int]) -> None:
        files.write(
            base_names.unverified(self.directory), b"".join(b"%d\n" % index for index in sorted(indices))
        )

    def adopt(self, manifest: extents.Manifest) -> None:
        """Take the file `image`, which was made whole and verified meanwhile."""
        files.write(self._manifest, manifest.text(), 0o440)
        self.close()
        self._fd = os.open(self._image, os.O_RDWR)
        self.manifest, self.have = manifest, set(manifest.extents)

    def _note(self, index: int) -> None:
        os.write(self._journal, b"%d\n" % index)
        self.have.add(index)

    def put(self, index: int, content: bytes | memoryview, digest: str = "") -> bool:
        """Take an extent if it is what the manifest says; tell whether it is (also if already there)."""
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
            # Something else is there now: no zeros of what comes in its place may be left out.
            self._is_resumed = True
        return is_it

    def _take(self, index: int) -> None:
        self._note(index)
        self._unflushed.append(index)
        progress.touch()
        if len(self._unflushed) >= extents.FLUSH:
            self._flush()

    def put_from(self, source: int, at: int, index: int, content: bytes) -> bool:
        """Take an extent as `put` does, from the open file `source`, which stays unchanged, at extent `at`.

        Where the file system can do that both files share its blocks then (ioctl_ficlonerange(2)): nothing is
        written.
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
        """Write an extent past the page cache, or through it where that cannot be.

        What goes past it is written when this process is due by its class of I/O, and takes nothing from the
        guests' caches.
        """
        # Where there may be anything, zeros are data too.
        parts = [(0, content)] if self._is_resumed else extents.blocks(content)
        for at, data in parts:
            offset = index * extents.EXTENT + at
            if not (self._passes(data, offset) or self._passes(self._aligned(data), offset)):
                extents.pwrite(self._fd, data, offset)

    def _passes(self, data: memoryview, offset: int) -> bool:
        """Write past the page cache; tell whether memory, length and file system are such that it can be
        (open(2): O_DIRECT).
        """
        try:
            for start in range(0, len(data), AT_ONCE):
                extents.pwrite(self._direct, data[start : start + AT_ONCE], offset + start)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        return True

    def _aligned(self, data: memoryview) -> memoryview:
        """Return the same in memory that begins at a page: librbd's, for one, does not."""
        self._memory = self._memory or mmap.mmap(-1, extents.EXTENT)
        view = memoryview(self._memory)[: len(data)]
        view[:] = data
        return view

    def _flush(self) -> None:
        os.fdatasync(self._fd)
        # Those before: the last ones are what the next host in a chain is about to ask for.
        for index in self._flushed:
            os.posix_fadvise(self._fd, index * extents.EXTENT, extents.EXTENT, os.POSIX_FADV_DONTNEED)
        self._flushed, self._unflushed = self._unflushed, []

    def missing(self) -> list[int]:
        """Return the extents that have not come, in order."""
        return sorted(self.manifest.extents.keys() - self.have) if self.manifest else []

    @property
    def is_complete(self) -> bool:
        """Tell whether all is there."""
        return self.manifest is not None and len(self.have) == len(self.manifest.extents)

    def finish(self) -> None:
        """Make all of it durable, ready to be published."""
        os.fsync(self._fd)
        self.close()
        os.chmod(self._image, 0o440)
        os.chmod(self._manifest, 0o440)
        files.unlink(base_names.have(self.directory))
        files.unlink(base_names.generation(self.directory))
        files.fsync(self.directory)
        point("partial finished")

    def close(self) -> None:
        """Close its files; it stays, to be gone on with."""
        for fd in (self._fd, self._direct, self._journal):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = self._journal = -1


def have(directory: str) -> set[int]:
    """Return the extents that the journal in `directory` names: what others may be served."""
    return _listed(base_names.have(directory))


def _listed(path: str) -> set[int]:
    """Return the extents that a journal names; a line that is not whole names none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            lines = file.read().split("\n")[:-1]
    except FileNotFoundError:
        return set()
    return {int(line) for line in lines if line.isdigit()}
