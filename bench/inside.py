#!/usr/bin/python3 -I
# SPDX-License-Identifier: Apache-2.0
"""Run a program inside a node and note what it cost: inside.py REPORT PROGRAM [ARGUMENT ...].

wall: from its start to its end; cpu: of it and of all descendants it waited for (what oned's machine pays);
own: of it alone.
"""

import json
import os
import sys
import time

before = time.monotonic()
pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
wall = time.monotonic() - before
own = time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), of who has ended and is not waited for yet
_, status, used = os.wait4(pid, 0)
code = os.waitstatus_to_exitcode(status)
with open(sys.argv[1], "w", encoding="ascii") as file:
    json.dump({"wall": wall, "cpu": used.ru_utime + used.ru_stime, "own": own, "code": code}, file)
sys.exit(code if code >= 0 else 128 - code)
