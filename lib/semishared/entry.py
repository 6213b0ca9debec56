# SPDX-License-Identifier: Apache-2.0
"""Run one action.

Exit codes: 0 done, 1 refused or failed with one line on stderr, 2 a defect of ours (its traceback in the log lines).
"""

from __future__ import annotations

import os
import sys

from .opennebula.report import Report, caught, drop_output


def run(kind: str, action: str) -> int:
    """Run action `action` of driver `kind` ('tm' or 'datastore') with sys.argv; return the exit code."""
    os.umask(0o027)

    def act_and_answer(report: Report) -> int:
        if kind == "tm":
            from .front.transfer import act
        else:
            from .front.datastore import act
        answer = act(action, sys.argv[1:], report)
        if answer:
            sys.stdout.write(answer + "\n")
        sys.stdout.flush()
        return 0

    code = caught(action, act_and_answer)
    if code:
        drop_output()
    return code
