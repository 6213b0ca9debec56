# SPDX-License-Identifier: Apache-2.0
"""Machines sign directories that each machine has for itself, and so find those that several machines share.

Nothing of semishared is imported here: install/examine.py sends this to machines without semishared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any, Dict

STAGED = ".staged-"
"""As in files.py."""
SIGNATURE = ".machine-"
"""Prefix of the files by which machines sign directories that are to be each machine's own."""
SIGNED = re.compile(r"\.machine-([0-9a-f]{16})\Z")
FORGOTTEN = 1000
"""After so many rounds without a change the signature of another machine goes: one of before its last start,
mostly.
"""


def boot() -> str:
    """Return the boot id, which the kernel draws at each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def machine() -> str:
    """Return an id that no other running machine has (namespaces of one kernel have their own names)."""
    return hashlib.sha256(f"{boot()} {os.uname().nodename}".encode()).hexdigest()[:16]


def sign(directory: str, remember: bool = False) -> Dict[str, Any]:
    """Sign a directory as this machine once more, and return the other machines' counts.

    `alive` are the machines that have signed since this machine last did with `remember`: they share the
    directory now. This needs no clock and no host name. It signs first and looks then: of two machines at the
    same time, at least one sees the other.
    """
    own = machine()
    mine = signature(directory, own)
    known: Dict[str, Any] = mine["seen"]
    mine["count"] += 1
    _write_signature(directory, own, mine)
    seen, alive = {}, []
    for name in sorted(os.listdir(directory)):
        match = SIGNED.match(name)
        if not match or match.group(1) == own:
            continue
        other = match.group(1)
        count = signature(directory, other)["count"]
        was, rounds = known.get(other, (-1, 0))
        if was == count and rounds >= FORGOTTEN and remember:
            os.unlink(f"{directory}/{name}")
            continue
        seen[other] = (count, rounds + 1 if was == count else 0)
        if was != count and mine["since"]:
            alive.append(other)
    if remember:
        _write_signature(directory, own, {**mine, "seen": seen, "since": 1})
    counts = {name: row[0] for name, row in seen.items()}
    return {"place": directory, "machine": own, "count": mine["count"], "seen": counts, "alive": alive}


def signature(directory: str, name: str) -> Dict[str, Any]:
    """Return the signature of a machine; an empty one if it is absent or damaged."""
    try:
        fd = os.open(f"{directory}/{SIGNATURE}{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found = json.loads(file.read(1 << 20))
        seen = {str(key): (int(row[0]), int(row[1])) for key, row in found["seen"].items()}
        return {"count": int(found["count"]), "seen": seen, "since": int(found["since"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return {"count": 0, "seen": {}, "since": 0}


def _write_signature(directory: str, name: str, data: Dict[str, Any]) -> None:
    staged = f"{directory}/{STAGED}{name}.{os.urandom(6).hex()}"
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with open(fd, "w", encoding="ascii") as file:
            json.dump(data, file)
        os.rename(staged, f"{directory}/{SIGNATURE}{name}")
    except OSError:
        os.unlink(staged)
        raise
