# SPDX-License-Identifier: Apache-2.0
"""Which distribution this machine is, and how it has libvirt: what remedies are chosen by.

Nothing of semishared is imported here, and nothing newer than Python 3.6 used: install/examine.py sends this
to machines without semishared, also to those whose python3 is too old for all else of it.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, Dict

FILES = ("/etc/os-release", "/usr/lib/os-release")
LONGEST = 1 << 16
"""Bytes that are read of them."""
INSTALLERS = ("apt-get", "dnf", "yum", "zypper")
RUN = "/run/libvirt"
SBIN = "/usr/sbin"


def release() -> Dict[str, Any]:
    """Return words of os-release(5), the program that installs packages, and libvirt's daemon."""
    words = _words()
    installers = [name for name in INSTALLERS if shutil.which(name, path="/usr/bin:/bin")]
    return {
        "id": words.get("ID", ""),
        "version": words.get("VERSION_ID", ""),
        "like": words.get("ID_LIKE", "").split(),
        "installer": installers[0] if installers else "",
        "libvirt": daemon(),
    }


def _words() -> Dict[str, str]:
    for path in FILES:
        try:
            with open(path, "rb") as file:
                text = file.read(LONGEST).decode("utf-8", "replace")
        except OSError:
            continue
        rows = (line.partition("=") for line in text.splitlines())
        return {name.strip(): value.strip().strip("\"'") for name, _, value in rows}
    return {}


def daemon() -> str:
    """Return libvirt's daemon for QEMU, '' if that cannot be told.

    A modular libvirt has a socket of its own for QEMU; the monolithic one's name may be its proxy's.
    """
    if os.path.exists(f"{RUN}/virtqemud-sock"):
        return "virtqemud"
    there = [name for name in ("libvirtd", "virtqemud") if os.path.exists(f"{SBIN}/{name}")]
    return there[0] if len(there) == 1 else ""
