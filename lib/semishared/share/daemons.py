# SPDX-License-Identifier: Apache-2.0
"""The programs that give a directory to a guest."""

from __future__ import annotations

import os

from ..errors import ToolMissing

QEMUS = "/usr/lib/qemu/virtiofsd"
DAEMONS = ("/usr/libexec/virtiofsd", QEMUS, "/usr/lib/virtiofsd/virtiofsd")
"""As VIRTIOFSD_BINARY_PATH of OpenNebula's kvmrc has them. All but QEMU's are the one in Rust."""


def daemon() -> str:
    """Return the daemon of this host; raise ToolMissing."""
    for path in DAEMONS:
        if os.access(path, os.X_OK):
            return path
    raise ToolMissing(f"no virtiofsd on {os.uname().nodename}: none of {', '.join(DAEMONS)}")
