# SPDX-License-Identifier: Apache-2.0
"""Devices of this host's pool that are gone, exchanged, read-only, broken (I/O errors), or hung.

A device that dies costs the VMs whose layers it has. No other VM may fail on it: for all but those VMs, what
lies on such a device is not there.
"""

from __future__ import annotations

import errno
import os

from ..model.device import names as device_names
from . import devices
from . import label as device_label

NOT_THERE, OTHER, READ_ONLY, BROKEN = (
    "not there",
    "not there: another one is mounted in its place",
    "read-only",
    "broken",
)
HUNG, FOREIGN = "hung", "not there: it is in the pool of"


def state(root: str, uuid: str) -> str:
    """Return what is wrong with a device, '' if nothing is; of a broken one also how it answers."""
    directory = device_names.device(root, uuid)
    try:
        if device_names.is_aside(os.readlink(directory)):
            return HUNG
        # A file system that has been shut down answers this with an error, and statvfs and links not yet.
        os.listdir(directory)
        is_read_only = os.statvfs(directory).f_flag & os.ST_RDONLY or not _answers(
            device_names.label(directory)
        )
    except (FileNotFoundError, NotADirectoryError):
        return NOT_THERE
    except OSError as e:
        return f"{BROKEN}: {e.strerror}"
    said = device_label.read(directory)
    if said.get("uuid") != uuid:
        return OTHER if said else NOT_THERE
    if device_label.whose(directory, said):
        return f"{FOREIGN} {device_label.whose(directory, said)}"
    return READ_ONLY if is_read_only else ""


def _answers(label: str) -> bool:
    """Tell whether the device itself, which a file system knows by heart until somebody writes, takes writes;
    raise OSError as it reads.

    ext4 that has found an error says by nothing else that it has become read-only (Linux 6.15 and newer).
    Nothing is written.
    """
    import mmap

    from ..tools import extents

    try:
        fd = extents.open_direct(label, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as e:
        if e.errno in (errno.EACCES, errno.EPERM):
            return True  # somebody else's label: it is read all the same
        if e.errno != errno.EROFS:
            raise
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        if e.errno != errno.EINVAL:  # there is none, behind tmpfs of Linux before 6.6
            raise
    finally:
        os.close(fd)
    return True


def where(root: str, path: str) -> str:
    """Return where the device is mounted to which the link `path` leads, its UUID if it is none of the pool;
    '' if that is no link.
    """
    uuid = devices.device_of(path)
    return devices.mount(root, uuid) if uuid in devices.registered(root) else uuid


def abandon(path: str) -> None:
    """Take away a link to a device that cannot be written to, with what of the rest can be removed."""
    if takes_nothing(path):
        devices.remove(path)


def takes_nothing(path: str) -> bool:
    """Tell whether `path`, a base or layers, lies on a device that cannot be written to."""
    link = devices.link_of(path)
    return link is not None and bool(state(path.rsplit("/", 2)[0], link.uuid))
