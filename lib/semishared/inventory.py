# SPDX-License-Identifier: Apache-2.0
"""What a machine has: version of python3, and of the programs that semishared runs. Prints it as JSON.

Nothing of ours is imported, so that a host can be asked over ssh before anything is installed there (python3 - < this file).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, NamedTuple, Optional, Tuple

PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
# a|b: one of them
FRONT_END_NEEDS = ("ssh", "rsync", "qemu-img", "setpriv", "tar")
FRONT_END_WANTS = ("genisoimage|mkisofs|xorriso", "curl")
HOST_NEEDS = ("qemu-img", "virsh", "setpriv", "tar", "rsync")
HOST_WANTS = ("zstd", "lzop", "udp-sender", "udp-receiver")
VERSIONS = {
    "qemu-img": ["--version"], "virsh": ["--version"], "zstd": ["--version"], "lzop": ["--version"],
    "rsync": ["--version"], "rbd": ["--version"], "udp-receiver": [], "udp-sender": [],
}  # fmt: skip
"""How to ask for a version; of the rest it says nothing that it is there."""


class Seen(NamedTuple):
    """What was found: python's version, and per program its version, '' if it does not tell, None if it is not there."""

    python: Tuple[int, ...]
    programs: Dict[str, Optional[str]]


def version(name: str) -> Optional[str]:
    """Return a program's version."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{PATH}")
    if path is None:
        return None
    if not VERSIONS.get(name):
        return ""
    try:
        done = subprocess.run(
            [path, *VERSIONS[name]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=5,
            env={**os.environ, "LC_ALL": "C"}, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(rb"\d+(?:\.\d+)+", done.stdout)
    return match.group().decode() if match else ""


def look() -> Seen:
    """Return what this machine has."""
    words = (*FRONT_END_NEEDS, *FRONT_END_WANTS, *HOST_NEEDS, *HOST_WANTS, *VERSIONS)
    names = sorted({name for word in words for name in word.split("|")})
    with ThreadPoolExecutor(8) as pool:
        return Seen(tuple(sys.version_info[:3]), dict(zip(names, pool.map(version, names))))


if __name__ == "__main__":
    print(json.dumps(look()))
