# SPDX-License-Identifier: Apache-2.0
"""virtiofsd, which serves a share to a guest, in a user namespace.

Its root is the first user of the share's owner; it maps no user outside the owner's range.

libvirt starts this program as root, with the arguments of QEMU's virtiofsd and the socket as an open file.
The process itself enters the namespace and becomes the daemon. So the process that libvirt knows, and ends
with the VM, is the daemon, and no process of real root remains. This works for QEMU's daemon (in C, until
7.2) and for the newer one in Rust, some versions of which have no maps of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import stat
import sys
from contextlib import contextmanager
from typing import Dict, Iterator, List, NoReturn, Sequence

from ..errors import BadArguments, SemisharedError, ShareRefused, ToolFailed
from ..model.share.share import UIDS
from ..share import attached, registered
from ..share.inspection import QEMUS, daemon

NAME = "virtiofsd"
READ_ONLY = "virtiofsd_read_only"
"""The same for a disk with READONLY = YES, which libvirt 9.0 cannot pass to a daemon."""
LOCKS = ("posix_lock", "flock")
"""Options of QEMU's daemon only; the one in Rust, which has no locks, ends with an error at them."""
NOT_FOR_GUESTS = ":bad:all:ceph.:ceph.::ok:all:::"
"""Map of extended attributes, in both daemons' syntax: a guest gets EPERM for ceph.*, all others pass.

By ceph.* CephFS sets quotas and layouts, which a guest must not change, and shows where files are.
"""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE, MS_RELATIME = 1, 32, 4096, 16384, 1 << 19, 1 << 21
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
"""Mount flags with the same number in statvfs(2) and mount(2), which a user namespace cannot clear."""
CAPABILITIES = "--print-capabilities"
"""libvirt's question (from 11 on, before the first start) for the daemon's features; it names no share."""
AS_QEMUS = '{"type": "fs"}'
"""The answer of QEMU's daemon. By that of the daemon in Rust ("separate-options") libvirt starts no guest
whose XML asks for locks; by this one it gives options as to QEMU's, which `understood` translates.
"""
OPEN_FILES = 1000000
"""The limit that QEMU's virtiofsd wants, and cannot set itself in a user namespace."""


def run(argv: Sequence[str], read_only: bool) -> int:
    """Become the daemon with the arguments `argv`, or answer libvirt; on an error print it and return 1.

    libvirt writes stderr to the VM's log.
    """
    if list(argv) == [CAPABILITIES]:
        print(AS_QEMUS)
        return 0
    try:
        become(argv, read_only)
    except (SemisharedError, OSError) as e:
        print(e.line() if isinstance(e, SemisharedError) else f"virtiofsd: {e}", file=sys.stderr)
    return 1


def become(argv: Sequence[str], read_only: bool) -> NoReturn:
    """Become the daemon; raise ShareRefused, BadArguments, ToolMissing, ToolFailed, OSError."""
    if os.geteuid() != 0:
        who = f"user {os.geteuid()}, who cannot let a guest's users be those of an owner"
        raise ShareRefused(f"libvirt starts virtiofsd as {who}")
    source = source_of(argv)
    with as_drivers_user():
        given = attached.check(-1, source)
    program = daemon()
    _allow_open_files()
    readable = _readable()
    if given.directory:
        _put(given.directory, source)
    into_namespace(given.first)
    if read_only:
        _protect(source)
    _only_read(readable)
    os.execv(program, [program, *understood(program, argv)])


@contextmanager
def as_drivers_user() -> Iterator[None]:
    """Act as the drivers' user within the block: an NFS server may treat root as `nobody`, without access."""
    os.seteuid(os.stat(__file__).st_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def _allow_open_files() -> None:
    """Raise the limit of open files for the daemon, which could not in the namespace."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, OPEN_FILES),) * 2)
    except (OSError, ValueError):
        pass  # the daemon works with the present limit


def _readable() -> Dict[int, int]:
    """Open for reading, still as root, each regular file that the daemon would inherit for writing.

    Return the new file by the inherited one. libvirt leaves the pidfile open: an attacker in the daemon could
    write a process into it that libvirtd then kills as root. With stdio_handler = "file" also the log.
    """
    written = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_written(fd)]
    return {fd: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) for fd in written}


def _is_written(fd: int) -> bool:
    try:
        is_file, flags = stat.S_ISREG(os.fstat(fd).st_mode), fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        return False  # it was the list of files itself
    return is_file and os.get_inheritable(fd) and flags & os.O_ACCMODE != os.O_RDONLY


def _only_read(readable: Dict[int, int]) -> None:
    for fd, file in readable.items():
        os.dup2(file, fd)
        os.close(file)
        # libvirt takes a daemon with an unlocked pidfile for gone, and does not kill it; any close has
        # dropped that lock.
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def source_of(argv: Sequence[str]) -> str:
    """Return the directory to serve, from the daemon's arguments; raise BadArguments unless there is one."""
    found: List[str] = []
    for word, after in zip(argv, [*argv[1:], ""]):
        if word == "-o":
            options = (option.partition("=") for option in after.split(","))
            found += [value for name, equals, value in options if name == "source" and equals]
        elif word.startswith("--shared-dir"):
            found.append(word.partition("=")[2] or after)
    if len(found) != 1:
        raise BadArguments(f"virtiofsd is given {len(found)} directories: {' '.join(argv)[:500]}")
    return found[0]


def understood(program: str, argv: Sequence[str]) -> List[str]:
    """Return the arguments without those unknown to the daemon, and with the map of extended attributes."""
    if program == QEMUS:
        return [*argv, "-o", f"xattrmap={NOT_FOR_GUESTS}"]
    words = [*argv, f"--xattrmap={NOT_FOR_GUESTS}"]
    for at, word in enumerate(words[:-1]):
        if word == "-o":
            words[at + 1] = ",".join(option for option in words[at + 1].split(",") if option not in LOCKS)
    return words


def into_namespace(first: int) -> None:
    """Enter a user namespace, as its root, whose users 0 to 65535 are the host's from `first` on.

    Raise ToolFailed.
    """
    me, (ready, tell) = os.getpid(), os.pipe()
    writer = os.fork()
    if writer == 0:
        # A process outside: within the namespace a process may map only its own user.
        try:
            os.close(tell)
            if os.read(ready, 1):
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/{me}/{name}", "w", encoding="ascii") as file:
                        file.write(f"0 {first} {UIDS}\n")
                os._exit(0)
        finally:
            os._exit(1)
    os.close(ready)
    with os.fdopen(tell, "wb", buffering=0) as told:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        told.write(b"x")
    _, status = os.waitpid(writer, 0)
    if status:
        raise ToolFailed(
            f"no user namespace for the users {first} to {first + UIDS - 1}: the map could not be written"
        )
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)


def _put(directory: str, source: str) -> None:
    """Mount a registered directory at the share's path, for this process alone, without mounts below it."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    # Opened after unshare: the kernel bind-mounts nothing of another namespace. A rename cannot change an
    # open directory.
    fd = registered.opened(directory)
    _call("mount", f"/proc/self/fd/{fd}".encode(), os.fsencode(source), None, MS_BIND, None)
    os.close(fd)


def _protect(source: str) -> None:
    """Make the mount at `source` read-only in this namespace."""
    path, flags = os.fsencode(source), os.statvfs(source).f_flag
    _call("mount", path, path, None, MS_BIND, None)
    kept = flags & KEPT | (MS_RELATIME if flags & os.ST_RELATIME else 0)
    _call("mount", None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)


def _call(name: str, *words: object) -> None:
    """Call a function of the C library; raise ToolFailed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*words):
        raise ToolFailed(f"{name}: {os.strerror(ctypes.get_errno())}")
