# SPDX-License-Identifier: Apache-2.0
"""Damage at rest, of which a file system knows nothing, and copies that are taken for what they are of: no
time changes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path


def copied(top: Path) -> None:
    """Let the images of stores that were copied, below a directory, be taken for those that they are copies
    of.
    """
    for side in top.glob("**/.semishared/*/"):
        image = side.parent.parent / side.name
        if image.is_file():
            _note(side / "generation.json", image.stat())
            record = side / "owner.json"
            if record.exists():
                said = json.loads(record.read_text())
                found = [*said["state"][:3], image.stat().st_ctime_ns, image.stat().st_ino]
                record.write_text(json.dumps({**said, "state": found[: len(said["state"])]}))


def dated(path: Path, was: os.stat_result) -> None:
    """Let a file that was written to, or copied, have its times of before: those that nobody can set, in what
    its store notes of it.
    """
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    _note(path.parent / ".semishared" / path.name / "generation.json", path.stat())


def _note(note: Path, found: os.stat_result) -> None:
    if note.exists():
        said = json.loads(note.read_text())
        now = {"ctime_ns": found.st_ctime_ns, "inode": found.st_ino}
        note.write_text(json.dumps({**said, **{key: value for key, value in now.items() if key in said}}))
