# SPDX-License-Identifier: Apache-2.0
"""qemu-img of each release, called as the package calls it, by that release's Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from lab import roots
from lab.caches import CHECKOUT
from semishared.tools import qemu_img
from tools.world import MiB, qemu_io

OVER = """
import sys
sys.path.insert(0, sys.argv[1])
from semishared.tools import qemu_img
source, target, backing, format = sys.argv[2:]
qemu_img.convert_over(source, "qcow2", target, backing, format)
"""


@pytest.mark.fault(89, "a disk goes back to a backup over its base on a host with Debian 11's QEMU, too")
@pytest.mark.parametrize("format", ["raw", "qcow2"])
@pytest.mark.parametrize("release", [11, None, 13])
def test_a_backup_is_written_over_a_base(tmp_path: Path, release: int | None, format: str) -> None:
    base, backup, target = (str(tmp_path / name) for name in ("base", "backup", "target"))
    for path, its, words in ((base, format, "write -P 1 0 4M"), (backup, "qcow2", "write -P 2 0 1M")):
        qemu_img.create(path, its, 4 * MiB)
        qemu_io(path, its, words)
    argv = ["/usr/bin/python3", "-I", "-c", OVER, str(CHECKOUT / "lib"), backup, target, base, format]
    subprocess.run([*roots.within(roots.of(release)), *argv], check=True, timeout=120)
    said = json.loads(subprocess.check_output(["qemu-img", "info", "--output=json", target]))
    assert (said["backing-filename"], said["backing-filename-format"]) == (base, format)
    subprocess.run(["qemu-img", "compare", "-q", "-f", "qcow2", "-F", "qcow2", backup, target], check=True)
