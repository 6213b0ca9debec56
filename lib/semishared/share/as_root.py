#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""What shares on btrfs need root for, as a program of its own: root has a copy at
/usr/local/sbin/semishared-btrfs, and sudo runs that.

semishared-btrfs limit BYTES ROOT share-N           hold a share to a size semishared-btrfs snapshot ROOT
share-N NAME         take a read-only snapshot of a share, named snapshot-N-NAME semishared-btrfs delete ROOT
gone-N|snapshot-N-NAME remove one

The owner of ROOT can replace anything in it by a link. So this program uses no path: it opens ROOT, then an
entry of it by name, without following a link; the kernel gets the open directory, or a name in one.
"""

import fcntl
import os
import re
import struct
import sys

SUBVOLUME = 256
"""BTRFS_FIRST_FREE_OBJECTID: the inode of a subvolume's top directory, and of no other directory."""
SHARE = re.compile(r"share-[0-9]+\Z")
GOES = re.compile(r"(gone-[0-9]+|snapshot-[0-9]+-[A-Za-z0-9][A-Za-z0-9_.-]*)\Z")
SNAPSHOT = re.compile(r"snapshot-[0-9]+-[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
READ_ONLY, MAX_REFERRED = 1 << 1, 1
"""BTRFS_SUBVOL_RDONLY, BTRFS_QGROUP_LIMIT_MAX_RFER."""


def _ioctl(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | 0x94 << 8 | number


SYNC, SNAP_DESTROY = _ioctl(0, 8, 0), _ioctl(1, 15, 4096)
SNAP_CREATE_V2, QGROUP_LIMIT = _ioctl(1, 23, 4096), _ioctl(2, 43, 48)


def opened(path: str, above: "int | None" = None) -> int:
    """Open a directory; raise OSError for a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)


def subvolume(name: str, root: int) -> int:
    """Open a subvolume in the root; raise ValueError for any other directory."""
    found = opened(name, root)
    if os.fstat(found).st_ino != SUBVOLUME:
        raise ValueError(f"{name} is no subvolume")
    return found


def limit(size: int, root: str, name: str) -> None:
    """Hold a share to a size in bytes; qgroup 0 stands for that of the open subvolume."""
    fd = subvolume(name, opened(root))
    fcntl.ioctl(fd, QGROUP_LIMIT, struct.pack("=6Q", 0, MAX_REFERRED, size, 0, 0, 0))
    fcntl.ioctl(fd, SYNC)


def snapshot(root: str, name: str, kept: str) -> None:
    """Take a read-only snapshot of a share; raise OSError if the name is taken."""
    above = opened(root)
    fcntl.ioctl(
        above,
        SNAP_CREATE_V2,
        bytearray(struct.pack("=qQQ32x4040s", subvolume(name, above), 0, READ_ONLY, kept.encode())),
    )
    fcntl.ioctl(above, SYNC)


def delete(root: str, name: str) -> None:
    """Remove a subvolume by its name in the root; the kernel refuses a link."""
    above = opened(root)
    os.close(subvolume(name, above))
    fcntl.ioctl(
        above, SNAP_DESTROY, bytearray(struct.pack("=q4088s", 0, name.encode()))
    )  # of bytes Python takes 1024
    fcntl.ioctl(above, SYNC)


def main(words: "list[str]") -> int:
    """Carry out a command line; on an error print a line to stderr and return 1."""
    verb, rest = words[0] if words else "", words[1:]
    try:
        if (
            verb == "limit"
            and len(rest) == 3
            and re.match(r"[0-9]{1,19}\Z", rest[0])
            and SHARE.match(rest[2])
        ):
            limit(int(rest[0]), rest[1], rest[2])
        elif verb == "snapshot" and len(rest) == 3 and SHARE.match(rest[1]) and SNAPSHOT.match(rest[2]):
            snapshot(*rest)
        elif verb == "delete" and len(rest) == 2 and GOES.match(rest[1]):
            delete(*rest)
        else:
            raise ValueError(f"not understood: {' '.join(words)!r}")
    except OSError as e:
        print(f"semishared-btrfs {verb}: {rest[-1]}: {e.strerror}", file=sys.stderr)
        return 1
    except ValueError as e:
        print(f"semishared-btrfs {verb}: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
