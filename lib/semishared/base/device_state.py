# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a device of this host's pool: gone, another one, read-only, or broken so that it answers with errors.

A device that dies costs the VMs whose layers it has. So nobody else may fail on it: what lies on a device that is not well is, for
all but those VMs, not there.
"""

from __future__ import annotations

import errno
import os

from ..model import layout_devices
from . import devices

NOT_THERE, OTHER, READ_ONLY, BROKEN = "not there", "not there: another one is mounted in its place", "read-only", "broken"


def state(root: str, uuid: str) -> str:
    """Return what is wrong with a device, '' if nothing is; of a broken one also how it answers."""
    directory = layout_devices.device(root, uuid)
    try:
        # A file system that has been shut down answers this with an error, and statvfs and links not yet.
        os.listdir(directory)
        flags = os.statvfs(directory).f_flag
        _read_past_cache(layout_devices.label(directory))
    except (FileNotFoundError, NotADirectoryError):
        return NOT_THERE
    except OSError as e:
        return f"{BROKEN}: {e.strerror}"
    said = devices.label(directory)
    if said.get("uuid") != uuid:
        return OTHER if said else NOT_THERE
    return READ_ONLY if flags & os.ST_RDONLY else ""


def _read_past_cache(label: str) -> None:
    """Ask the device itself: until somebody writes, a file system knows all this by heart; raise OSError as it answers."""
    import mmap

    from ..tools import extents

    fd = extents.open_direct(label, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        with mmap.mmap(-1, 4096) as page:
            os.preadv(fd, [page], 0)
    except OSError as e:
        if e.errno != errno.EINVAL:  # there is none, behind tmpfs of Linux before 6.6
            raise
    finally:
        os.close(fd)


def abandon(path: str) -> None:
    """Take away a link to a device that cannot be written to, with what of the rest can be removed."""
    if takes_nothing(path):
        devices.remove(path)


def takes_nothing(path: str) -> bool:
    """Tell whether `path`, a base or layers, lies on a device that cannot be written to."""
    link = devices.link_of(path)
    return link is not None and bool(state(path.rsplit("/", 2)[0], link.uuid))
