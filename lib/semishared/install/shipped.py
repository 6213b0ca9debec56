# SPDX-License-Identifier: Apache-2.0
"""Whether the installed semishared.conf is one that we have shipped, or an administrator's.

An upgrade replaces the one and never touches the other. A note beside it has the hash of what was shipped
last; of versions that left no note, the hashes are below.
"""

from __future__ import annotations

import hashlib
import os
import re

from .. import NAME

CONF = f"etc/{NAME}.conf"
NOTE = f"etc/.{NAME}.conf.shipped"
"""Beside CONF below remotes/: the digest of the CONF that install.sh put there, or would have put there."""
SCRIPTS = re.compile(r"^scripts_dir = .*$", re.MULTILINE)
"""The line that install.sh itself writes, by SCRIPTS_REMOTE_DIR of oned.conf."""
WITHOUT_NOTE = frozenset(
    (
        "106cda959ecbf1be",
        "187ef4bcfb4f61ea",
        "3682007065bf22a8",
        "3823225c0ce68542",
        "4ec8f5cfe8fd42e5",
        "598774b33ce746de",
        "5a71748ddf6fb762",
        "679c508ef30b0c46",
        "87b2cb020d6a9e3d",
        "a4e5720cc02d296b",
        "a57fb694c10d736c",
        "caf6f9f0a042181f",
        "cc640e762e58a4cc",
        "de07eb652de3552e",
        "dff2cd5323e11a48",
        "f2bf1f72f318c898",
        "f89393a672a29ac1",
    )
)
"""The beginning of digest() of every CONF before there were notes."""
LONGEST = 1 << 20
"""Bytes: more is no semishared.conf of ours."""


def digest(text: str) -> str:
    """Return the hash of a configuration but for the line that install.sh writes."""
    return hashlib.sha256(SCRIPTS.sub("", text).encode("utf-8", "surrogateescape")).hexdigest()


def read(path: str) -> str:
    """Return a configuration's text, '' if it is none: a link, a directory, not there; raise OSError."""
    if os.path.islink(path) or not os.path.isfile(path):
        return ""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        return file.read(LONGEST)


def noted(remotes: str) -> str:
    """Return the digest of what was shipped here last, '' without a note; raise OSError."""
    return read(f"{remotes}/{NOTE}").strip()


def is_untouched(installed: str, noted: str) -> bool:
    """Tell whether an installed text is what was shipped: by the note, without one by what there ever was."""
    found = digest(installed)
    return bool(installed) and (found == noted if noted else found[:16] in WITHOUT_NOTE)


def successor(shipped: str, installed: str) -> str:
    """Return the newly shipped text with the scripts_dir that is installed: hosts have the scripts there."""
    line = SCRIPTS.search(installed)
    return SCRIPTS.sub(lambda _: line.group(), shipped) if line else shipped
