# SPDX-License-Identifier: Apache-2.0
"""Clocks decide nothing: each use of a wall clock in lib/ is one that only people read, that only estimates,
or that another look backs.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

from unit.sources import nodes

pytestmark = pytest.mark.reads_checkout

PACKAGE = Path(__file__).resolve().parents[2] / "lib" / "semishared"
WORDS = (
    "st_mtime",
    "st_mtime_ns",
    "st_ctime",
    "st_ctime_ns",
    "st_atime",
    "strptime",
    "timestamp",
    "create_timestamp",
    "modify_timestamp",
)
JUDGED = {
    "for people": "cli/jobs.py tools/jobs.py front/fence.py tools/trail_lines.py cli/attention.py "
    "cli/base.py "
    "cli/metrics.py cli/share.py cli/support_bundle.py share/btrfs.py share/cephfs.py stage/scrub.py",
    "an estimate, or a hint where to ask first; wrong, "
    "it costs time": "device/ledger.py device/offline.py stage/source_speed.py front/questions.py",
    "in which order what nobody uses goes": "device/hot.py base/room.py pool/moving.py",
    "equal to what was seen, or another content: never "
    "earlier or later": "disk/commits.py disk/device_move.py "
    "disk/vm_dir_inventory.py "
    "store/dir/image.py tools/files.py",
    "advice of doctor": "cli/doctor.py",
    "gc's --older-than; what lives, is open, or is known to oned stays "
    "whatever its age": "tools/inventory.py host/leftovers.py store/rbd/pool.py store/rbd/snapshots.py",
    "lock files that nobody holds, and in which nothing was counted by the time of a boot "
    "(epochs.is_recent)": "disk/vm_dir.py",
    "when a text for people is written anew; each action on the VM has that done whatever the "
    "time": "cli/publish.py front/publication.py front/vm_notes.py",
    "both times are the monitors'": "store/rbd/blocklist.py",
}
"""A module that is added has no line: a clock may be set, while we wait or by days, and no two machines have
the same.
"""


def uses(path: Path) -> Iterator[str]:
    """Yield what a module asks of wall clocks, and of times that files and images have by them."""
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Attribute):
            if node.attr in WORDS or (
                node.attr == "time" and isinstance(node.value, ast.Name) and node.value.id == "time"
            ):
                yield node.attr
            if node.attr in ("now", "utcnow", "today", "localtime", "gmtime") and ast.unparse(node.value) in (
                "datetime",
                "date",
                "time",
            ):
                yield node.attr


@pytest.mark.fault(
    36,
    "each use of a wall clock is judged: it decides neither what is fenced nor what is late, nor "
    "what is removed",
)
def test_each_use_of_a_clock_is_judged() -> None:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if any(uses(path))}
    judged = " ".join(JUDGED.values()).split()
    assert (sorted(found - set(judged)), sorted(set(judged) - found), len(judged)) == (
        [],
        [],
        len(set(judged)),
    )
