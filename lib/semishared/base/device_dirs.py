# SPDX-License-Identifier: Apache-2.0
"""Directories on the devices of a host's pool: here alone they are made, and only on what has the label.

A device can be unmounted, or let go of by `semishared pool add`, between a look at it and what is made there.
By its path a directory would then be made below the empty mount point, or in the place of the link. So the
device is opened once, its label is read in what was opened, and from there it is made. Files need no such
care: without a directory of ours there is none to write them in.
"""

from __future__ import annotations

import errno
import os

from ..model import layout_devices
from ..tools import beneath
from . import device_label


def make(path: str, *, exist_ok: bool = False) -> None:
    """Make a directory, and those above it, by a path through the link to a device.

    Raise FileNotFoundError if the device is not there, or not in the pool of this host; else as mkdir(2).
    """
    device, relative = layout_devices.split(path)
    with beneath.directory(device) as opened:
        if not device_label.is_own(device, device_label.read(opened)):
            raise FileNotFoundError(errno.ENOENT, "no device of this host's pool", device)
        above, name = os.path.split(relative)
        fd = beneath.open_directory(opened, above, make=True, for_all=False)
        try:
            os.mkdir(name, dir_fd=fd)
        except FileExistsError:
            if not exist_ok:
                raise
        finally:
            os.close(fd)
