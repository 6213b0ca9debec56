# SPDX-License-Identifier: Apache-2.0
"""Damage at rest, of which a file system knows nothing, and copies that are taken for what they are of: no time changes."""

from __future__ import annotations

import json
import os
from pathlib import Path


def dated(path: Path, was: os.stat_result) -> None:
    """Let a file that was written to, or copied, have its times of before: those that nobody can set, in what its store notes of it."""
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    note = path.parent / ".semishared" / path.name / "generation.json"
    if note.exists():
        said = json.loads(note.read_text())
        now = {"ctime_ns": path.stat().st_ctime_ns, "inode": path.stat().st_ino}
        note.write_text(json.dumps({**said, **{key: value for key, value in now.items() if key in said}}))
