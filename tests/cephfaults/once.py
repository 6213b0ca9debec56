# SPDX-License-Identifier: Apache-2.0
"""Carry out pickled steps through the host side of this machine, in a process with an environment of its own.

SEMISHARED_KILL_AT=3 python3 -m cephfaults.once FILE      exit code 0: done; 1: an error, which is printed
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.wire.session import Session

if __name__ == "__main__":
    try:
        with Session("localhost", "test", Config()) as session:
            session.run(pickle.loads(Path(sys.argv[1]).read_bytes()))
    except SemisharedError as e:
        sys.exit(e.line())
