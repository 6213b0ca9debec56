# SPDX-License-Identifier: Apache-2.0
"""Recordings of what a real oned calls, and their loader.

Each file is one scenario: `steps` with the command, the driver `calls` it caused, the `files` oned wrote
and what the API served afterwards; texts are keys of `bodies`. They are kept as recorded, only compressed.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, Dict, List

HERE = Path(__file__).resolve().parent
Recording = Dict[str, Any]


def names(version: str = "7.4") -> List[str]:
    """List the recordings of a version."""
    return sorted(path.name[: -len(".json.xz")] for path in (HERE / version).glob("*.json.xz"))


def load(name: str, version: str = "7.4") -> Recording:
    """Read one recording."""
    with lzma.open(HERE / version / f"{name}.json.xz", "rt", encoding="utf-8") as stream:
        recording: Recording = json.load(stream)
    return recording


def body(recording: Recording, key: Any) -> str:
    """Return the text behind a key; what is no key is its own text."""
    text: str = recording["bodies"].get(key, key) if isinstance(key, str) else ""
    return text
