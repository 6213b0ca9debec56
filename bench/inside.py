#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""Run a program inside a node and note what it cost: inside.py REPORT PROGRAM [ARGUMENT ...].

wall: from its start to its end; cpu: of it and of all descendants it waited for (what oned's machine pays).
"""

import json
import os
import sys
import time

before = time.monotonic()
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(pid, 0)
wall = time.monotonic() - before
code = os.waitstatus_to_exitcode(status)
with open(sys.argv[1], "w", encoding="ascii") as file:
    json.dump({"wall": wall, "cpu": used.ru_utime + used.ru_stime, "code": code}, file)
sys.exit(code if code >= 0 else 128 - code)
