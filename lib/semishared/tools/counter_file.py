# SPDX-License-Identifier: Apache-2.0
"""One number in a small JSON file of ours, read with next to nothing loaded: every start of a VM does (disk/overtaken.py)."""

from __future__ import annotations

import json
import os


def read(directory: str, name: str, key: str) -> int:
    """Return the number at `key` of the object in a file, -1 if there is no such file or nobody understands it; raise OSError.

    The directory is opened first: a client of NFS goes on saying for a while that a name is absent which another one has made.
    """
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    except FileNotFoundError:
        return -1
    finally:
        os.close(parent)
    with open(fd, "rb") as file:
        text = file.read(4096)
    try:
        found = json.loads(text)
    except ValueError:
        return -1
    number = found.get(key) if isinstance(found, dict) else None
    return number if isinstance(number, int) else -1
