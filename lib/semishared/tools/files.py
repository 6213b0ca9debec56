# SPDX-License-Identifier: Apache-2.0
"""Atomic publication of files (stage, fsync, rename), and file operations that follow no link."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from contextlib import contextmanager
from typing import Callable, Iterator

from ..errors import BadRecord, NoSpace, ReadOnly, TooLarge, ToolFailed, UnexpectedLink, here
from ..model.disk import names as disk_names
from . import effects
from .effects import point

WINDOW = 16 << 20
"""Bytes that are written out between two signs of progress."""
refusals: list[Callable[[], None]] = []
"""Checks that raise if this process lost a lock and may publish nothing any more; locks.py adds one."""


def refuse() -> None:
    """Raise if this process may not publish or remove anything: another one has taken its lock over."""
    for check in refusals:
        check()


def staged_name(path: str) -> str:
    """Return a name beside `path` that no other process on any host uses."""
    from . import owner

    directory, name = os.path.split(path)
    return f"{directory}/{disk_names.staged(name, owner.suffix())}"


def fsync(path: str) -> None:
    """Make a file's content, or a directory's entries, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        fsync_open(fd)
    finally:
        os.close(fd)


def fsync_open(fd: int) -> None:
    """Make an open file durable; a large one piece by piece: one fsync could show no life for hours."""
    found = os.fstat(fd)
    if found.st_blocks * 512 > WINDOW and stat.S_ISREG(found.st_mode):
        from .write_out import write_out  # here: most files are small

        write_out(fd, found.st_size, WINDOW)
    os.fsync(fd)


def fsync_tree(directory: str) -> None:
    """Make a directory and all files and directories below it durable; follow no link."""
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            fsync_tree(entry.path)
        elif entry.is_file(follow_symlinks=False):
            fsync(entry.path)
    fsync(directory)


@contextmanager
def enough_space(where: str) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into a NoSpace that names the machine and the place, EROFS into ReadOnly."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        if where.startswith("/proc/"):
            from .beneath import readable

            where = readable(where)
        if e.errno == errno.EROFS:
            raise ReadOnly(f"{here(where)} is mounted read-only") from None
        raise NoSpace(f"no space left on {os.uname().nodename} in {where}") from None


def unlink(path: str) -> bool:
    """Remove a file; return False if there was none."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def published(path: str, check: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Yield a staged name; when the block ends well, fsync the file, call `check` and rename it to `path`.

    If the block or `check` raises, the staged file is removed.
    """
    staged = staged_name(path)
    try:
        with enough_space(os.path.dirname(path)):
            yield staged
            point(f"staged {os.path.basename(path)}")
            if not os.path.islink(staged):
                fsync(staged)
            refuse()
            check()
            os.rename(staged, path)
        point(f"published {os.path.basename(path)}")
        fsync(os.path.dirname(path))
    except BaseException:
        unlink(staged)
        raise


def write(path: str, data: bytes, mode: int = 0o644) -> None:
    """Write a small file atomically."""
    with published(path) as staged, open(staged, "xb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)


def read(path: str, limit: int) -> bytes:
    """Return up to `limit` bytes of a small file of ours; raise UnexpectedLink, or OSError as open(2)."""
    with open(_itself(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        return file.read(limit)


def _itself(path: str, flags: int) -> int:
    """Open `path`, which must not be a symbolic link."""
    # A path to an open file (beneath.py) is a link by design.
    itself = 0 if os.path.dirname(path) == f"/proc/{os.getpid()}/fd" else os.O_NOFOLLOW
    try:
        return os.open(path, flags | itself | os.O_CLOEXEC)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UnexpectedLink(f"{here(path)} is a symbolic link") from None
        raise


@contextmanager
def made(path: str, mode: int = 0o660) -> Iterator[str]:
    """Make the new file `path` and yield a path to the open file, for child processes too.

    Renames do not affect that path. When the block ends well, the file gets its mode and is durable.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield f"/proc/{os.getpid()}/fd/{fd}"
        os.fchmod(fd, mode)
        fsync_open(fd)
    finally:
        os.close(fd)


def set_mode(path: str, mode: int) -> None:
    """Give a file of ours its mode; raise UnexpectedLink where it is a symbolic link."""
    fd = _itself(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def write_json(path: str, data: object, limit: int = disk_names.JSON_BYTES) -> None:
    """Write `data` as JSON atomically; raise TooLarge beyond the readers' limit."""
    text = json.dumps(data, sort_keys=True).encode() + b"\n"
    if len(text) > limit:
        raise TooLarge(f"{here(path)} would have {len(text)} bytes, and what reads it takes {limit}")
    write(path, text)


def read_json(path: str, limit: int = disk_names.JSON_BYTES) -> dict[str, object] | None:
    """Return the JSON object in a small file, None if it is absent; raise BadRecord if unreadable.

    Only ENOENT is absence: the content of a truncated or unreadable file is unknown, and no caller may remove
    anything because of it.
    """
    try:
        data = json.loads(read(path, limit))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise BadRecord(f"{here(path)} cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError):
        data = None
    except UnexpectedLink as e:
        raise BadRecord(e.detail) from None
    if not isinstance(data, dict):
        raise BadRecord(f"{here(path)} is damaged: it is no JSON object")
    return data


def hint(path: str, limit: int = disk_names.JSON_BYTES) -> dict[str, object]:
    """Return the JSON object in a small cache file; {} if it is absent or damaged."""
    try:
        return read_json(path, limit) or {}
    except BadRecord:
        return {}


def refresh(*directories: str) -> None:
    """Make the NFS client revalidate `directories`, each inside the one before it, as far as they exist.

    An NFS client that saw a name absent reports it absent for 30 s, also to open(), unless the mount has
    lookupcache=positive. Opening the directory asks the server for changes. On other file systems this costs
    nothing.
    """
    for directory in directories:
        try:
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except OSError:
            return  # the caller's own access reports why


def is_absent(path: str, *, follow: bool = False) -> bool:
    """Return True if nothing is at `path` (with `follow`: where it leads).

    What cannot be examined may be there, and the caller's own access then reports why; os.path.exists and
    lexists call that absent.
    """
    try:
        os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def is_at(path: str, known: os.stat_result) -> bool:
    """Return True if `path` still is the known file or directory; a link there is itself."""
    try:
        return os.path.samestat(os.lstat(path), known)
    except FileNotFoundError:
        return False


def exists(path: str) -> bool:
    """Return True if a file, or a link's target, exists now or cannot be examined; works on NFS too."""
    refresh(os.path.dirname(path))
    try:
        link = os.readlink(path)
    except OSError:
        return not is_absent(path, follow=True)
    refresh(os.path.dirname(os.path.join(os.path.dirname(path), link)))
    return not is_absent(path, follow=True)


def symlink(target: str, path: str, check: Callable[[], None] = lambda: None) -> None:
    """Make `path` a link to `target`, in place of a file or link there; `check` as in `published`."""
    try:
        if os.readlink(path) == target:
            return
    except OSError:
        pass
    with published(path, check) as staged:
        os.symlink(target, staged)


def remove_staged(directory: str, name: str = "") -> None:
    """Remove staged files of killed writers in `directory` (those for `name` only, if given)."""
    for entry in _staged(directory, name):
        unlink(f"{directory}/{entry}")


def _staged(directory: str, name: str = "") -> list[str]:
    try:
        return [entry for entry in os.listdir(directory) if disk_names.is_staged(entry, name)]
    except FileNotFoundError:
        return []


def changed_ns(found: os.stat_result) -> int:
    """Return a file's mtime in ns, its ctime if mtime is 0 (ceph-fuse sets that for files of `cp`)."""
    return found.st_mtime_ns or found.st_ctime_ns


def remove_stale(directory: str) -> None:
    """Remove staged files of this machine's ended processes in a directory that has no lock."""
    from . import owner

    for name in _staged(directory):
        if owner.is_gone(name):
            unlink(f"{directory}/{name}")


def remove_tree(directory: str) -> None:
    """Remove a directory tree, or a file in its place, not across mounts; it may be absent.

    Processes of an action that is being ended may still add files: repeat until the tree is gone.
    """
    # Not above: the host's monitoring probe needs this module, and runs no programs.
    from .run import work

    if effects.is_on():
        _remove_some(directory)
    for left in range(9, -1, -1):
        try:
            work(["rm", "-rf", "--one-file-system", "--", directory])
            return
        except ToolFailed as e:
            if not left or "Directory not empty" not in e.detail:
                raise
            time.sleep(0.05)


def remove_folder(directory: str, *, ignore_errors: bool = False) -> None:
    """Remove a directory that others can write to; follow no link. Raise OSError, ToolFailed."""
    if _remove_flat(directory):
        return
    import shutil

    try:
        shutil.rmtree(directory, ignore_errors=ignore_errors)
    except RecursionError:
        # Deeper than any disk's tree; as long as it exists, no later removal could succeed either.
        try:
            remove_tree(directory)
        except ToolFailed:
            if not ignore_errors:
                raise


def _remove_flat(directory: str) -> bool:
    """Remove a directory without subdirectories; return False on failure. shutil would load libraries."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(directory)
    except OSError:
        return False
    return True


def _remove_some(directory: str) -> None:
    """Remove the first three files one by one, so that tests can kill within the removal."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(directory) for name in sorted(names))
    for path in [path for path, _ in zip(found, range(3))]:
        os.unlink(path)
        point(f"{os.path.basename(path)} removed")


def made_part(path: str) -> str:
    """Return the nearest existing directory above `path`, or `path`."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def space(path: str) -> tuple[int, int]:
    """Return total and free bytes of the file system on which `path` lies, or would."""
    stat = os.statvfs(made_part(path))
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def allocated(path: str) -> int:
    """Return the bytes a file occupies on disk, without following links; 0 if it is absent."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0
