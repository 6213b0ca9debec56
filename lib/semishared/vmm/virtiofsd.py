# SPDX-License-Identifier: Apache-2.0
"""virtiofsd, which gives a share to a guest, in a user namespace.

root in it is the first user of the share's owner, and it has no other user of the host.

libvirt starts it as root, with the arguments of QEMU's virtiofsd and the socket as an open file. This process
itself goes into the namespace and becomes the daemon, so what libvirt knows of it, and ends with the VM, is
the daemon; who is real root yet has gone by then. It is the same for QEMU's daemon (in C, until 7.2) and the
newer one in Rust, whose own maps some of its versions do not have.
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
"""The same, for a disk with READONLY = YES, which libvirt 9.0 has no way to tell a daemon."""
LOCKS = ("posix_lock", "flock")
"""Options that only QEMU's knows: the one in Rust ends at them, as it has no locks."""
NOT_FOR_GUESTS = ":bad:all:ceph.:ceph.::ok:all:::"
"""Names of extended attributes, as both daemons take them: by ceph.* CephFS is told quotas and layouts, which
are not a guest's to set, and says where things are. A guest gets EPERM. All others are as they are.
"""
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE, MS_RELATIME = 1, 32, 4096, 16384, 1 << 19, 1 << 21
KEPT = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC | os.ST_NOATIME | os.ST_NODIRATIME
"""Flags of a mount that have the same number for statvfs(2) and mount(2), and that a user namespace cannot
take off.
"""
CAPABILITIES = "--print-capabilities"
"""What libvirt asks (from 11 on, before it starts any): no share is named, and what the daemon can do is what
we can.
"""
OPEN_FILES = 1000000
"""What QEMU's virtiofsd wants, and cannot take itself where it is not really root."""


def run(argv: Sequence[str], read_only: bool) -> int:
    """Become the daemon with the arguments `argv`; return an exit code if that may not be. libvirt keeps
    stderr in the VM's log.
    """
    try:
        become(argv, read_only)
    except (SemisharedError, OSError) as e:
        print(e.line() if isinstance(e, SemisharedError) else f"virtiofsd: {e}", file=sys.stderr)
    return 1


def become(argv: Sequence[str], read_only: bool) -> NoReturn:
    """Become the daemon; raise ShareRefused, BadArguments, ToolMissing, ToolFailed, OSError."""
    if list(argv) == [CAPABILITIES]:
        os.execv(program := daemon(), [program, CAPABILITIES])
    if os.geteuid() != 0:
        raise ShareRefused(
            f"libvirt starts virtiofsd as user {os.geteuid()}, who cannot let a guest's users be "
            f"those of an owner"
        )
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
    """Be whose the drivers are within the block: for a server of NFS root of a host may be nobody, who reads
    nothing that is ours.
    """
    os.seteuid(os.stat(__file__).st_uid)
    try:
        yield
    finally:
        os.seteuid(0)


def _allow_open_files() -> None:
    """Let the daemon have as many files open as it wants: from inside it cannot raise its limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, OPEN_FILES),) * 2)
    except (OSError, ValueError):
        pass  # it does with what it has


def _readable() -> Dict[int, int]:
    """Open the regular files to be read that the daemon would have open for writing, while this is root yet;
    return by which for which.

    libvirt leaves it its pidfile: who takes the daemon over would write there whom libvirtd kills as root.
    And its log, where libvirt writes that itself (stdio_handler = "file").
    """
    return {
        fd: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        for fd in map(int, os.listdir("/proc/self/fd"))
        if _is_written(fd)
    }


def _is_written(fd: int) -> bool:
    try:
        is_file, flags = stat.S_ISREG(os.fstat(fd).st_mode), fcntl.fcntl(fd, fcntl.F_GETFL)
    except OSError:
        return False  # it was that of the list
    return is_file and os.get_inheritable(fd) and flags & os.O_ACCMODE != os.O_RDONLY


def _only_read(readable: Dict[int, int]) -> None:
    """Put files that can only be read in the place of those that can be written."""
    for fd, file in readable.items():
        os.dup2(file, fd)
        os.close(file)
        # libvirt takes a daemon for gone, and kills none, whose pidfile nobody has locked; any close has let
        # that lock go.
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def source_of(argv: Sequence[str]) -> str:
    """Return the directory that the daemon is to give, out of its arguments; raise BadArguments unless it is
    one.
    """
    found: List[str] = []
    for at, word in enumerate(argv):
        if word == "-o" and at + 1 < len(argv):
            found += [
                option[len("source=") :] for option in argv[at + 1].split(",") if option.startswith("source=")
            ]
        elif word.startswith("--shared-dir"):
            found.append(word.partition("=")[2] or (argv[at + 1] if at + 1 < len(argv) else ""))
    if len(found) != 1:
        raise BadArguments(f"virtiofsd is given {len(found)} directories: {' '.join(argv)[:500]}")
    return found[0]


def understood(program: str, argv: Sequence[str]) -> List[str]:
    """Return the arguments without those that a daemon does not know, and with what guests may call extended
    attributes.
    """
    if program == QEMUS:
        return [*argv, "-o", f"xattrmap={NOT_FOR_GUESTS}"]
    words = [*argv, f"--xattrmap={NOT_FOR_GUESTS}"]
    for at, word in enumerate(words[:-1]):
        if word == "-o":
            words[at + 1] = ",".join(option for option in words[at + 1].split(",") if option not in LOCKS)
    return words


def into_namespace(first: int) -> None:
    """Go into a user namespace whose users 0 to 65535 are the host's from `first` on, and be root there;
    raise ToolFailed.
    """
    me, (ready, tell) = os.getpid(), os.pipe()
    writer = os.fork()
    if writer == 0:
        # Who is outside still: from inside nobody may map but oneself.
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
    """Mount a directory that was there before where the share is, for this process alone, without what is
    mounted below it.
    """
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    # Opened in here, as the kernel mounts nothing that is of another namespace; what was opened no rename can
    # change.
    fd = registered.opened(directory)
    _call("mount", f"/proc/self/fd/{fd}".encode(), os.fsencode(source), None, MS_BIND, None)
    os.close(fd)


def _protect(source: str) -> None:
    """Let nobody in this namespace write to what is mounted at `source`, nor below it."""
    path, flags = os.fsencode(source), os.statvfs(source).f_flag
    _call("mount", path, path, None, MS_BIND, None)
    kept = flags & KEPT | (MS_RELATIME if flags & os.ST_RELATIME else 0)
    _call("mount", None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept, None)


def _call(name: str, *words: object) -> None:
    """Call a function of the C library; raise ToolFailed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*words):
        raise ToolFailed(f"{name}: {os.strerror(ctypes.get_errno())}")
