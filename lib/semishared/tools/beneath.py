# SPDX-License-Identifier: Apache-2.0
"""Open files below a root of ours without following a symbolic link.

Every client that can write to an export can replace any name there by a link, at any time: a path that was
checked may lead elsewhere a moment later. So this module opens each component of a path from its root (an
image datastore) without following a link. The work is then done on the open file: `/proc/PID/fd/N` is a path
to it, for this process and its programs, which no later rename can change. The root itself may be a link, or
lie behind some.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager
from typing import Iterator

from ..errors import BadArguments, UnexpectedFile, UnexpectedLink, here

OPENED = r"/proc/[0-9]+/fd/[0-9]+(?![0-9])"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES = 3
"""Attempts to open a name whose file is replaced meanwhile (NFS: ESTALE)."""


def _names(relative: str) -> list[str]:
    names = relative.split("/") if relative else []
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise BadArguments(f"not a plain path below a directory: {relative!r}")
    return names


def path_of(fd: int) -> str:
    """Return a path to an open file or directory, for child processes too."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def readable(text: str) -> str:
    """Return `text` with the paths of `path_of` replaced by the real paths, for messages."""

    def known(match: re.Match[str]) -> str:
        try:
            return os.readlink(match.group(0))
        except OSError:
            return match.group(0)

    return re.sub(OPENED, known, text)


def is_link(path: str) -> bool:
    """Return True if `path` is a symbolic link, other than a path of `path_of`."""
    return os.path.islink(path) and not re.fullmatch(OPENED, path)


def refuse_link(path: str) -> None:
    if is_link(path):
        raise UnexpectedLink(f"{here(readable(path))} is a symbolic link, to {os.readlink(path)}")


def _enter(fd: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):
            refuse_link(f"{path_of(fd)}/{name}")
        raise OSError(e.errno, e.strerror, readable(f"{path_of(fd)}/{name}")) from None


def _refresh(fd: int) -> None:
    """Make the NFS client revalidate a directory (files.refresh): an open with O_PATH does not."""
    try:
        os.close(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))
    except PermissionError:
        pass


def _let_through(fd: int) -> None:
    """Give a directory o+x; its read and write permissions stay.

    Where an export squashes root, libvirtd accesses it as the anonymous user. It opens no image, but checks
    that one exists and where our links lead: AppArmor's rules name that file (docs/how-to/apparmor.md).
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if not mode & stat.S_IXOTH:
        try:
            os.chmod(path_of(fd), mode | stat.S_IXOTH)
        except OSError:
            pass  # another user owns it


def open_directory(root: str, relative: str = "", *, make: bool = False, for_all: bool = True) -> int:
    """Open the directory `relative` (without links or `..`) below `root`; `make` makes missing ones.

    With `make` and `for_all`, the directories below `root` get o+x, old ones too.

    Raise UnexpectedLink, or OSError as open(2).
    """
    names = _names(relative)
    fd = os.open(root, _DIRECTORY)
    try:
        _refresh(fd)
        for name in names:
            try:
                below = _enter(fd, name)
            except FileNotFoundError:
                if not make:
                    raise
                try:
                    os.mkdir(name, dir_fd=fd)
                except FileExistsError:
                    pass  # another process has just made it
                below = _enter(fd, name)
            os.close(fd)
            fd = below
            if make and for_all:
                _let_through(fd)
            _refresh(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def directory(root: str, relative: str = "", *, make: bool = False) -> Iterator[str]:
    """Yield a path to an open directory below `root`; renames do not affect it. Raise as `open_directory`."""
    fd = open_directory(root, relative, make=make)
    try:
        yield path_of(fd)
    finally:
        os.close(fd)


def _open_regular(parent: int, name: str, flags: int) -> int:
    """Open a regular file in a directory, and check its type first: opening a device may have effects."""
    seen = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = os.fstat(seen).st_mode
        if stat.S_ISLNK(mode):
            refuse_link(f"{path_of(parent)}/{name}")
            raise UnexpectedLink(
                f"{readable(path_of(parent))}/{name} on {os.uname().nodename} is a symbolic link"
            )
        if not stat.S_ISREG(mode):
            raise UnexpectedFile(
                f"{readable(path_of(parent))}/{name} on {os.uname().nodename} is no regular file"
            )
        return os.open(path_of(seen), flags | os.O_CLOEXEC)
    finally:
        os.close(seen)


def open_file(root: str, relative: str, flags: int = os.O_RDONLY) -> int:
    """Open the regular file `relative` below `root`.

    Raise UnexpectedLink, UnexpectedFile, or OSError as open(2).
    """
    where, _, name = relative.rpartition("/")
    _names(relative)
    parent = open_directory(root, where)
    try:
        for left in range(_TRIES - 1, -1, -1):
            try:
                return _open_regular(parent, name, flags)
            except OSError as e:
                if e.errno != errno.ESTALE or not left:
                    raise OSError(e.errno, e.strerror, f"{root}/{relative}") from None
        raise AssertionError
    finally:
        os.close(parent)


@contextmanager
def file(root: str, relative: str) -> Iterator[str]:
    """Yield a path to an open regular file below `root`, for child processes too; raise as `open_file`."""
    fd = open_file(root, relative)
    try:
        yield path_of(fd)
    finally:
        os.close(fd)


def status(root: str, relative: str) -> os.stat_result:
    """Return the status of a regular file below `root`; raise as `open_file`.

    It comes from the open file: on NFS the status by name may be half a minute old.
    """
    try:
        fd = open_file(root, relative)
    except PermissionError:
        # A guest's user may own the file, in a directory of ours.
        fd = open_file(root, relative, os.O_PATH)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def check(root: str, relative: str) -> None:
    """Raise UnexpectedLink if a component of `relative` is a link now; for trees of this machine alone."""
    path = root
    for name in _names(relative):
        path = f"{path}/{name}"
        refuse_link(path)
