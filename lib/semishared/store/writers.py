# SPDX-License-Identifier: Apache-2.0
"""Detect processes that write to an image, before semishared gives it to one more guest.

A file: QEMU holds a shared lock on one byte for each permission that it uses (its block/file-posix.c).
F_OFD_GETLK asks for those locks and takes none. It sees the other clients of NFSv4 and CephFS; on NFSv3 it
sees this client only.

An RBD image: a client that has written holds the exclusive lock until it closes the image. A watcher alone is
no writer. A client that died keeps its watch for 30 s and its lock for ever; the next writer breaks a lock
without a watch, and blocklists its holder. So a lock counts while its holder watches. A lock that `rbd lock
add` made counts always.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import contextmanager
from typing import Any, Iterator

from ..errors import AnotherWriter, StoreUnavailable, UnexpectedFile, UnexpectedLink
from ..model.disk import names as disk_names
from ..model.store import dir_names
from ..named import NamedTuple
from ..tools import beneath, progress

LOCK_PERM_BASE = 100
WRITE, RESIZE = 1, 3
"""BLK_PERM_WRITE and BLK_PERM_RESIZE: a QEMU that may write, or resize, holds the byte 100 + bit."""
OURS = 299
"""Last byte of the range that `take` locks; QEMU uses 100 to 107 and 200 to 207 of it."""
ALONE_S = 1800.0
FLOCK = "hhqqi4x"
LETS_GO = {
    "nfs4": "90 s (the lease time of its server)",
    "ceph": "300 s (mds_session_autoclose)",
    "fuse.ceph-fuse": "300 s (mds_session_autoclose)",
}
"""How long a dead client keeps its locks, by file system type."""
WATCH_S = 40
"""Seconds; Ceph drops the watch of a dead client after 30 s."""
ANSWER_S = 5
AUTO = "auto "
"""Prefix of the cookie of a lock that librbd took by itself."""


# -- files ------------------------------------------------------------------------------------------


def check_file(path: str) -> None:
    """Raise AnotherWriter if a QEMU, here or on another client of the file system, may write to `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        _check_open(fd, path)
    finally:
        os.close(fd)


def of_disk(path: str) -> list[str]:
    """Return the writers of an image or clone in a mounted store, or why they cannot be determined."""
    store = dir_names.store_of(path)
    root = store or os.path.dirname(path)
    below, said = path[len(root) + 1 :], []
    layers = disk_names.layers(below)
    try:
        with beneath.directory(root, layers) as folder:
            names = [
                f"{layers}/{entry.name}"
                for entry in os.scandir(folder)
                if entry.is_file(follow_symlinks=False)
            ]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except UnexpectedLink as e:
        return [e.detail]
    # A clone is a link to one of its layers: look at all layers.
    for name in names if store else [below, *names]:
        try:
            fd = beneath.open_file(root, name, os.O_RDONLY | os.O_NONBLOCK)
            try:
                _check_open(fd, f"{root}/{name}")
            finally:
                os.close(fd)
        except (AnotherWriter, UnexpectedLink, UnexpectedFile) as e:
            said.append(e.detail)
        except FileNotFoundError:
            continue
        except OSError as e:
            said.append(f"{root}/{name}: {e.strerror}")
    return said


def is_written(fd: int) -> bool:
    """Return True if a QEMU, here or on another client of the file system, may write to an open file."""
    return _is_taken(fd) and not _is_locked(fd, OURS)


def _is_taken(fd: int) -> bool:
    return any(_is_locked(fd, LOCK_PERM_BASE + bit) for bit in (WRITE, RESIZE))


def _check_open(fd: int, shown: str) -> None:
    if _is_taken(fd):
        raise AnotherWriter(f"{shown} is written to by {_holder(fd)}")


@contextmanager
def alone(datastore: str, name: str, wait_s: float = ALONE_S) -> Iterator[int]:
    """Yield the image `name` open for writing, locked against every QEMU and every other caller of this.

    Raise AnotherWriter if a guest writes to it, or another process keeps it open for `wait_s` seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        fd = beneath.open_file(datastore, name, os.O_RDWR)
        try:
            # Another file may have replaced it between open and lock.
            if take(fd) and os.path.samestat(os.fstat(fd), beneath.status(datastore, name)):
                yield fd
                return
            if not _is_locked(fd, OURS):
                _check_open(fd, f"{datastore}/{name}")
            if time.monotonic() > deadline:
                raise AnotherWriter(
                    f"{datastore}/{name} is held open, since {wait_s:.0f} s, by {_holder(fd)}"
                )
        finally:
            os.close(fd)
        time.sleep(0.1)
        progress.touch()


def take(fd: int) -> bool:
    """Lock an open image against every QEMU and every other `take`; return False if it is in use."""
    wanted = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, LOCK_PERM_BASE, OURS - LOCK_PERM_BASE + 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise StoreUnavailable(
            f"{os.readlink(beneath.path_of(fd))} on {os.uname().nodename} cannot be locked: {e.strerror}"
        ) from None
    return True


def _is_locked(fd: int, byte: int) -> bool:
    """Return True if a process holds a lock on a byte; False where the file system has no such query."""
    wanted = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            return False
        raise
    return bool(struct.unpack(FLOCK, found)[0] != fcntl.F_UNLCK)


def _holder(fd: int) -> str:
    """Return the holder of QEMU's write lock on an open file, and how to end it."""
    from ..tools.run import line_of  # only messages about a holder need it

    node, stat = os.uname().nodename, os.fstat(fd)
    for pid in _pids_with(stat):
        name = _argument(pid)
        guest = f" (domain {name}: `{line_of(['virsh', 'destroy', name])}` ends it)" if name else ""
        return f"process {pid} on {node}{guest}"
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    if any(device in line.split() for line in _lines("/proc/locks")):
        return f"a process of another user on {node} (as root: `lsof` with this path)"
    type = _file_system(stat.st_dev)
    waits = (
        f"; if that host has died, `onevm recover --retry` works {LETS_GO[type]} after it did"
        if type in LETS_GO
        else ""
    )
    return (
        f"another client of the {type or 'same'} file system, seen from {node}: look for the guest "
        f"there (`virsh list`){waits}"
    )


def _pids_with(stat: os.stat_result) -> Iterator[int]:
    """Yield the processes that hold the write lock on a file, of those that this user may inspect."""
    from ..tools import lock_holders

    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if any(
                _is_writers(lock.first, lock.last) and lock.is_on(pid, stat)
                for lock in lock_holders.locks_of_process(pid)
            ):
                yield pid
        except OSError:
            continue


def _is_writers(first: int, last: str) -> bool:
    """Return True if a locked range includes a byte that only a writer locks."""
    return any(
        first <= LOCK_PERM_BASE + bit and (last == "EOF" or LOCK_PERM_BASE + bit <= int(last))
        for bit in (WRITE, RESIZE)
    )


def _argument(pid: int) -> str:
    """Return the libvirt domain of a QEMU process, '' for another process."""
    for word in "".join(_lines(f"/proc/{pid}/cmdline")).split("\0"):
        for part in word.split(","):
            if part.startswith("guest="):
                return part[len("guest=") :]
    return ""


def _file_system(device: int) -> str:
    """Return the type of the file system mounted as `device`, '' if it is unknown."""
    for words in (line.split() for line in _lines("/proc/self/mountinfo")):
        if words[2] == f"{os.major(device)}:{os.minor(device)}":
            return words[words.index("-") + 1]
    return ""


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []


# -- images on RBD ----------------------------------------------------------------------------------


class Locker(NamedTuple):
    """The holder of a lock of an image."""

    client: str
    cookie: str
    address: str


def check_image(ioctx: Any, opened: Any, shown: str) -> list[str]:
    """Return the clients that have an image open without its lock; raise AnotherWriter if one has it.

    A holder that does not answer may have died: wait until Ceph drops the watch of a dead client.
    """
    deadline = time.monotonic() + WATCH_S
    while True:
        watchers = _watchers(opened)
        holders = [Locker(*map(str, found)) for found in (opened.list_lockers() or {}).get("lockers", [])]
        if not holders:
            return sorted(f"{client} at {address}" for client, address in watchers)
        by_hand = [holder for holder in holders if not holder.cookie.startswith(AUTO)]
        if by_hand:
            raise AnotherWriter(_locked_by_hand(by_hand[0], shown))
        seen = [holder for holder in holders if (holder.client, holder.address) in watchers]
        if not seen:
            return []  # the next writer breaks that lock, and blocklists its dead holder
        # A client that does not answer may lose its watch during the wait; those that are left have answered.
        if (_all_answer(ioctx, opened) or time.monotonic() > deadline) and (
            seen[0].client,
            seen[0].address,
        ) in _watchers(opened):
            raise AnotherWriter(_locked(seen[0], shown))
        time.sleep(1)
        progress.touch()


def _watchers(opened: Any) -> set[tuple[str, str]]:
    """Return client and address of every watcher; this read-only client is not among them."""
    return {(f"client.{found['id']}", str(found["addr"])) for found in opened.watchers_list()}


def _all_answer(ioctx: Any, opened: Any) -> bool:
    """Return True if all watchers answer a notify to re-read the header, which every librbd answers."""
    import rados

    try:
        ioctx.notify(f"rbd_header.{opened.id()}", "", timeout_ms=ANSWER_S * 1000)
    except rados.Error:
        return False
    return True


def _locked(holder: Locker, shown: str) -> str:
    host = holder.address.rpartition(":")[0]
    return (
        f"{shown} is written to by {holder.client} at {holder.address}, which has its exclusive "
        f"lock: end the guest on {host} "
        f"(`virsh list` there); if nobody reaches that machine, `semishared fence HOST` shuts it "
        f"out; a client that dies is out of "
        f"sight 30 s later, and `onevm recover --retry` works from then on"
    )


def _locked_by_hand(holder: Locker, shown: str) -> str:
    from ..tools.run import line_of  # only messages about a holder need it

    return (
        f"{shown} was locked by hand, by {holder.client} at {holder.address}: "
        f"`{line_of(['rbd', 'lock', 'ls', shown])}` shows it, "
        f"`{line_of(['rbd', 'lock', 'rm', shown, holder.cookie, holder.client])}` ends it; `onevm "
        f"recover --retry` works from then on"
    )
