# SPDX-License-Identifier: Apache-2.0
"""Becoming OpenNebula's own script of an action, with another standard input."""

from __future__ import annotations

import os
from typing import NoReturn

from ..errors import ToolMissing


def become(here: str, action: str, argv: list[str]) -> NoReturn:
    """Replace this process by the stock script of `action`."""
    stock = f"{here}/../kvm/{action}"
    try:
        os.execv(stock, [stock, *argv])
    except OSError as e:
        raise ToolMissing(f"OpenNebula's own script {os.path.normpath(stock)}: {e.strerror}") from None


def stdin_is(data: bytes) -> None:
    """Make `data` the standard input of this process and of what it becomes."""
    fd = os.memfd_create("domain")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
