# SPDX-License-Identifier: Apache-2.0
"""What drivers say in a VM's log of the bytes that they moved (front/moved.py), read back."""

from __future__ import annotations

import re
from typing import Dict

from semishared.front.moved import WORDS
from semishared.units import amount

LINE = re.compile(r"(?m)(?:^|[ :])([\w.-]+): (\d[^\n]*/s\)[^\n]*)")


def by_host(stderr: str) -> Dict[str, Dict[str, int]]:
    """Return bytes by kind, by host, of all lines of that: to a tenth of the unit in which they are said."""
    found: Dict[str, Dict[str, int]] = {}
    for host, text in LINE.findall(stderr):
        for kind, words in WORDS.items():
            for size in re.findall(rf"([\d.]+ (?:B|[KMGT]iB)) {words}", text):
                kinds = found.setdefault(host, {})
                kinds[kind] = kinds.get(kind, 0) + amount(size.replace(" ", ""))
    return found


def total(stderr: str, kind: str) -> int:
    """Return the bytes of a kind, of all hosts."""
    return sum(kinds.get(kind, 0) for kinds in by_host(stderr).values())
