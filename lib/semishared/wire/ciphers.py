# SPDX-License-Identifier: Apache-2.0
"""How ssh carries bulk data: with the cipher that costs least of those that it may use, and not compressed.

Which it may use is the affair of ssh's own configuration on both sides; only the order is ours. Processors
have had instructions for AES and for GCM's multiplication for long, and OpenSSH prefers ChaCha20 all the
same.
"""

from __future__ import annotations

from typing import Sequence

from ..errors import SemisharedError
from ..tools.run import run

QUICKEST = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
OPTION = "ciphers "


def in_order(allowed: Sequence[str]) -> list[str]:
    """Return the ciphers that are allowed, the quickest first."""
    return [
        *(name for name in QUICKEST if name in allowed),
        *(name for name in allowed if name not in QUICKEST),
    ]


def options(host: str) -> list[str]:
    """Return what ssh to `host` is told. Images are compressed before, if that pays (tools/compress.py)."""
    found = ["-o", "Compression=no"]
    try:
        said = run(["ssh", "-G", "--", host])
    except SemisharedError:
        return found  # ssh will say itself what is wrong
    for line in said.splitlines():
        if line.startswith(OPTION):
            found += ["-o", f"Ciphers={','.join(in_order(line[len(OPTION) :].strip().split(',')))}"]
    return found
