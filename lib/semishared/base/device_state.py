# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a device of this host's pool: gone, another one, read-only, broken so that it answers
with errors, or hung.

A device that dies costs the VMs whose layers it has. So nobody else may fail on it: what lies on a device
that is not well is, for all but those VMs, not there.
"""

from __future__ import annotations

import errno
import os

from ..model import layout_devices
from . import device_label, devices

NOT_THERE, OTHER, READ_ONLY, BROKEN = (
    "not there",
    "not there: another one is mounted in its place",
    "read-only",
    "broken",
)
HUNG, FOREIGN = "hung", "not there: it is in the pool of"


def state(root: str, uuid: str) -> str:
    """Return what is wrong with a device, '' if nothing is; of a broken one also how it answers."""
    directory = layout_devices.device(root, uuid)
    try:
        if layout_devices.is_aside(os.readlink(directory)):
            return HUNG
        # A file system that has been shut down answers this with an error, and statvfs and links not yet.
        os.listdir(directory)
        is_read_only = os.statvfs(directory).f_flag & os.ST_RDONLY or not _answers(
            layout_devices.label(directory)
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
