# SPDX-License-Identifier: Apache-2.0
"""A process that is connected to Ceph ends at once, with its own exit code, and what it printed is out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LIB = os.path.join(os.path.dirname(__file__), "..", "..", "lib")
PROGRAM = """
import atexit, sys
sys.path.insert(0, sys.argv[1])
from semishared.store import ceph
from semishared.tools.ending import ended
atexit.register(print, "unwound")
if sys.argv[2] == "connected":
    ceph._clusters["", ""] = None
print("said", end=" ")
sys.exit(ended(3))
"""


@pytest.mark.parametrize(("state", "printed"), [("connected", "said "), ("not", "said unwound\n")])
def test_nothing_is_unwound_beside_threads_of_librados(state: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, LIB, state], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, "")
