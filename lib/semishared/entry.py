# SPDX-License-Identifier: Apache-2.0
"""Run one action: the only place that catches everything.

Exit codes: 0 done, 1 refused or failed with one line on stderr, 2 a defect of ours (its traceback in the log lines).
"""

from __future__ import annotations

import os
import sys
from typing import Callable

from .errors import SemisharedError
from .opennebula.report import Report


def run(kind: str, action: str) -> int:
    """Run action `action` of driver `kind` ('tm' or 'datastore') with sys.argv; return the exit code."""
    os.umask(0o027)

    def act_and_answer(report: Report) -> int:
        if kind == "tm":
            from .tm import act
        else:
            from .datastore import act
        answer = act(action, sys.argv[1:], report)
        if answer:
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()
        return 0

    return caught(action, act_and_answer)


def caught(action: str, work: Callable[[Report], int]) -> int:
    """Do `work` and return its exit code, or after any failure say the one line that oned must get."""
    report = Report(action)
    try:
        return work(report)
    except SemisharedError as e:
        report.fail(e)
        return 1
    except KeyboardInterrupt:
        report.fail(SemisharedError("interrupted"))
        return 1
    except OSError as e:
        report.fail(SemisharedError(f"{type(e).__name__}: {e}"))
        return 1
    except Exception as e:  # noqa: BLE001 - oned must get its one line whatever happens
        import traceback

        for line in traceback.format_exc().splitlines():
            report.error(line)
        report.fail(SemisharedError(f"{type(e).__name__}: {e}"))
        return 2
