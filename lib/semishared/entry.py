# SPDX-License-Identifier: Apache-2.0
"""Run one action by its name, for the executables in tm/ and datastore/.

Exit codes: 0 done, 1 refused or failed with one line on stderr, 2 a defect of ours (its traceback in the log
lines).
"""

from __future__ import annotations

import os
import sys

from .opennebula.report import Report, caught, drop_output
from .tools.ending import ended


def monitor_ds(argv: list[str]) -> str:
    """DIRECTORY - the disk sizes of all VMs of a system datastore: what the monitoring on the host asks, not
    oned.
    """
    from .errors import BadArguments
    from .host import vm_sizes
    from .opennebula.args import absolute

    if len(argv) != 1:
        raise BadArguments("one directory is wanted")
    return vm_sizes.report(absolute(argv[0], "datastore directory")).rstrip("\n")


def run(kind: str, action: str) -> int:
    """Run action `action` of driver `kind` ('tm' or 'datastore') with sys.argv; return the exit code."""
    os.umask(0o027)

    def act_and_answer(report: Report) -> int:
        argv = sys.argv[1:]
        if action == "monitor_ds":
            answer = monitor_ds(argv)
        elif kind == "tm":
            from .front import transfer

            answer = transfer.act(action, argv, report)
        else:
            from .front import datastore

            answer = datastore.act(action, argv, report)
        if answer:
            sys.stdout.write(answer + "\n")
        sys.stdout.flush()
        return 0

    code = caught(action, act_and_answer)
    if code:
        drop_output()
    return ended(code)
