# SPDX-License-Identifier: Apache-2.0
"""Open what lies below a root of ours, and follow no symbolic link there.

Whoever can write an export can put a link in the place of any name on it, at any time: a path that was looked
at leads elsewhere a moment later. So what is on a store is opened component by component from its root (an
image datastore), each without following a link, and what is done there is done in what was opened:
`/proc/PID/fd/N` is a path to that, for us and for the programs that we run, which no later rename can change.
The root itself may be a link, or lie behind some.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import contextmanager
from typing import Iterator

from ..errors import BadArguments, UnexpectedFile, UnexpectedLink

OPENED = r"/proc/[0-9]+/fd/[0-9]+(?![0-9])"
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES = 3
"""How often a name is opened whose file is replaced between two looks at it (NFS: ESTALE)."""


def _names(relative: str) -> list[str]:
    names = relative.split("/") if relative else []
    if any(name in ("", ".", "..") or "\0" in name for name in names):
        raise BadArguments(f"not a plain path below a directory: {relative!r}")
    return names


def path_of(fd: int) -> str:
    """Return a path to an open file or directory, for our children too."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def readable(text: str) -> str:
    """Return `text` with the paths that `path_of` makes replaced by where they lead, for whoever reads it."""

    def known(match: re.Match[str]) -> str:
        try:
            return os.readlink(match.group(0))
        except OSError:
            return match.group(0)

    return re.sub(OPENED, known, text)


def is_link(path: str) -> bool:
    """Tell whether `path` is a symbolic link, other than one of `path_of`."""
    return os.path.islink(path) and not re.fullmatch(OPENED, path)


def refuse_link(path: str) -> None:
    """Raise UnexpectedLink if `path` is a symbolic link."""
    if is_link(path):
        raise UnexpectedLink(
            f"{readable(path)} on {os.uname().nodename} is a symbolic link, to {os.readlink(path)}"
        )


def _enter(fd: int, name: str) -> int:
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):
            refuse_link(f"{path_of(fd)}/{name}")
        raise OSError(e.errno, e.strerror, readable(f"{path_of(fd)}/{name}")) from None


def _refresh(fd: int) -> None:
    """Let names in a directory be looked up anew (files.refresh): what is opened by O_PATH alone is not asked
    for again.
    """
    try:
        os.close(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))
    except PermissionError:
        pass


def _let_through(fd: int) -> None:
    """Let everybody go through a directory, to what they can name; reading and writing there stay as they
    are.

    Where an export squashes root, libvirt's root is nobody. It opens no image, but looks whether one is there
    and where our links lead: AppArmor's rules are for that file (docs/how-to/apparmor.md).
    """
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    if not mode & stat.S_IXOTH:
        try:
            os.chmod(path_of(fd), mode | stat.S_IXOTH)
        except OSError:
            pass  # it is somebody else's


def open_directory(root: str, relative: str = "", *, make: bool = False, for_all: bool = True) -> int:
    """Open the directory `relative` (without links or `..`) below `root`, with `make` made where it is
    missing.

    What is made, or was made before, is `for_all` to go through.

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
                    pass  # somebody else was faster
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
    """Yield a path to a directory below `root` as it is now; raise as `open_directory`."""
    fd = open_directory(root, relative, make=make)
    try:
        yield path_of(fd)
    finally:
        os.close(fd)


def _open_regular(parent: int, name: str, flags: int) -> int:
    """Open a regular file in a directory. It is looked at before it is opened: opening a device may do
    something.
    """
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
    """Open the regular file `relative` below `root`; raise UnexpectedLink, UnexpectedFile, or OSError as
    open(2).
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
    """Yield a path to a regular file below `root` that is open for reading, for us and our children; raise as
    `open_file`.
    """
    fd = open_file(root, relative)
    try:
        yield path_of(fd)
    finally:
        os.close(fd)


def status(root: str, relative: str) -> os.stat_result:
    """Return the status of a regular file below `root`; raise as `open_file`.

    From the open file: on NFS a name's status may be half a minute old.
    """
    try:
        fd = open_file(root, relative)
    except PermissionError:
        # A guest's own user may have it, in a directory that is ours.
        fd = open_file(root, relative, os.O_PATH)
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)


def check(root: str, relative: str) -> None:
    """Raise UnexpectedLink if a component of `relative` below `root` is a link now; for where only this
    machine writes.
    """
    path = root
    for name in _names(relative):
        path = f"{path}/{name}"
        refuse_link(path)
