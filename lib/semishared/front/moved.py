# SPDX-License-Identifier: Apache-2.0
"""The line in the log of the bytes that an action has moved on a machine.

    h2: 300.0 MiB read from the store in 3.8 s (78.9 MiB/s), 12.0 MiB received from h3

A module of its own: an action that has moved no bytes does not load it.
"""

from __future__ import annotations

from typing import Mapping

from ..units import human

WORDS = {
    "store_read": "read from the store",
    "base_read": "read from the base",
    "received": "received",
    "reused": "taken from other bases",
    "store_written": "written to the store",
    "sent": "sent",
    "moved": "moved",
    "layers_copied": "of layers copied",
    "backed_up": "backed up",
}
"""Kinds of bytes (tools/progress.py) in words."""


def line(machine: str, moved: Mapping[str, int], came: Mapping[str, int], seconds: float) -> str:
    """Return the line; `came` has the hosts that bytes were received from, `seconds` what all took.

    The rate is that of the kind with most bytes.
    """
    said: list[str] = []
    for kind, size in sorted(moved.items(), key=lambda item: (-item[1], item[0])):
        way = f" from {', '.join(sorted(came))}" if kind == "received" and came else ""
        took = "" if said else f" in {seconds:.1f} s ({human(int(size / max(seconds, 0.1)))}/s)"
        said.append(f"{human(size)} {WORDS.get(kind, kind)}{way}{took}")
    return f"{machine}: {', '.join(said)}"
