# SPDX-License-Identifier: Apache-2.0
"""Carry out a step, in JSON, through the host side of this machine, in a process with an environment of its
own.

SEMISHARED_KILL_AT=3 python3 -m shares.once FILE      exit code 0: done, what it found out is printed; 1: an
error, which is
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model.steps import from_data
from semishared.named import to_data
from semishared.wire.session import Session

if __name__ == "__main__":
    try:
        with Session("localhost", "test", Config()) as session:
            (answer,) = session.run([from_data(json.loads(Path(sys.argv[1]).read_text()))])
            print(json.dumps(to_data(answer)))
    except SemisharedError as e:
        sys.exit(e.line())
