# SPDX-License-Identifier: Apache-2.0
"""Which runs of the command change something, and their lines in the trail (front/trail.py): one when a run
ends, whatever it ends with.
"""

from __future__ import annotations

import argparse
import time
from typing import Callable, Sequence

from ..errors import SemisharedError

Run = Callable[[argparse.Namespace], int]
CHANGING: dict[str, Callable[[argparse.Namespace], bool]] = {
    "base": lambda it: it.verb != "list",
    "cluster": lambda it: it.verb != "status",
    "commit": lambda it: True,
    "detach": lambda it: not it.print_timer,
    "doctor": lambda it: bool(it.fix),
    "failover": lambda it: not it.print_hook,
    "fence": lambda it: not it.check,
    "gc": lambda it: True,
    "pool": lambda it: it.verb not in ("list", "check"),
    "setup": lambda it: bool(it.apply or it.key),
    "share": lambda it: not (it.verb in ("list", "usage") or it.words[:1] == ["list"]),
    "stage": lambda it: True,
}
"""Subcommand -> whether a run with these arguments changes something. All others only look, but `publish`:
what that writes is what Sunstone shows, every two minutes.
"""


def changes(command: str, arguments: argparse.Namespace) -> bool:
    """Tell whether a run may change something."""
    return command in CHANGING and not getattr(arguments, "dry_run", False) and CHANGING[command](arguments)


def carried_out(run: Run, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Carry out a subcommand, with its line in the trail; return its exit code, raise as it does.

    What a timer starts has a line only if something was done, or went wrong.
    """
    command = arguments.command
    if not changes(command, arguments):
        return int(run(arguments))
    from ..front import trail

    words = list(argv)
    words.remove(command)
    what, began = trail.of_words(words), time.monotonic()
    with trail.by_operator():
        try:
            code = int(run(arguments))
        except BaseException as e:
            kind = type(e).__name__
            result = e.id if isinstance(e, SemisharedError) else {"Refused": "refused"}.get(kind, kind)
            trail.note(command, what, result, time.monotonic() - began)
            raise
        if code or trail.count() or not getattr(arguments, "due", False):
            result = f"exit {code}" if code else trail.OK
            trail.note(command, what, result, time.monotonic() - began)
        return code
