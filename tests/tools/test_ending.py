# SPDX-License-Identifier: Apache-2.0
"""A process ends at once, with its own exit code, and what it printed is out; also beside threads of
librados.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIB = os.path.join(os.path.dirname(__file__), "..", "..", "lib")
PROGRAM = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from semishared.errors import SemisharedError
from semishared.model.refs import Access
from semishared.store.rbd import ceph
from semishared.tools.ending import ended
ceph.CONNECT_S = ceph.LIMITS["client_mount_timeout"] = 1
atexit.register(print, "unwound")
print("said", end=" ")
if sys.argv[2]:
    try:
        ceph.cluster(Access(conf=sys.argv[2]), "nobody")
    except SemisharedError:
        pass
sys.exit(ended(3))
"""


@pytest.mark.parametrize("conf", ["[global]\nmon host = 127.0.0.1:1\n", ""])
def test_nothing_is_unwound(tmp_path: Path, conf: str) -> None:
    """Also of a cluster that was not reached: librados begins its threads first."""
    (tmp_path / "ceph.conf").write_text(conf)
    words = [sys.executable, "-c", PROGRAM, LIB, str(tmp_path / "ceph.conf") if conf else ""]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said ", "")


@pytest.mark.parametrize(("code", "ends"), [(0, 120), (3, 3)])
def test_what_could_not_be_written_is_not_taken_for_said(code: int, ends: int) -> None:
    words = [sys.executable, "-c", f"{PROGRAM.replace('ended(3)', f'ended({code})')}", LIB, ""]
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run(
                words, stdout=full, stderr=subprocess.DEVNULL, env={"PYTHONUNBUFFERED": ""}
            ).returncode
            == ends
        )
