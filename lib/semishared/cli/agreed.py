# SPDX-License-Identifier: Apache-2.0
"""Before data is removed: whoever sits at a terminal is asked, and --yes answers. A program is not asked, nor
is --dry-run.
"""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

from .output import put


def add_arguments(parser: argparse.ArgumentParser, verbs: str = "") -> None:
    """Describe the two options; `verbs`: those that they are for, '' for all."""
    which = f"{verbs}: " if verbs else ""
    parser.add_argument(
        "--yes", action="store_true", help=f"{which}do not ask (without a terminal nothing is asked anyway)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help=f"{which}say what would be removed, remove nothing"
    )


def agreed(arguments: argparse.Namespace, what: Sequence[str]) -> bool:
    """Tell whether `what` may be removed; Ctrl-D is a no."""
    if arguments.yes or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    for line in what:
        put(line)
    try:
        answer = input("Go on? [y/N] ")
    except EOFError:
        put()
        return False
    return answer.strip().lower() in ("y", "yes")
