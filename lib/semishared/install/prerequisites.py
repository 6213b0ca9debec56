# SPDX-License-Identifier: Apache-2.0
"""Programs that must be there before anything is touched: on the front-end, and on named hosts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Mapping, Optional, Sequence

from ..errors import SemisharedError
from ..named import NamedTuple
from ..wire.session import PYTHON
from . import examine, preflight

OLDEST_PYTHON = [3, 9]


class Missing(NamedTuple):
    """What is missing on a machine: without `needed` nothing works, without `wanted` some features do not."""

    machine: str
    needed: tuple[str, ...]
    wanted: tuple[str, ...]

    def line(self) -> str:
        """Return it as one line, '' if nothing is missing."""
        parts = [f"{', '.join(self.needed)} missing"] if self.needed else []
        parts += [f"without {', '.join(self.wanted)} some things do not work"] if self.wanted else []
        return f"{self.machine}: {'; '.join(parts)}" if parts else ""


def on_front_end() -> Missing:
    """Return what this machine lacks."""
    return lacking(os.uname().nodename, preflight.examine(preflight.Question(("front-end",))))


def on_hosts(hosts: Sequence[str], user: Sequence[str] = ()) -> list[Missing]:
    """Return what each host lacks, all asked at once; `user` is the command that changes to the user who has
    the keys.
    """

    def one(host: str) -> Missing:
        try:
            seen = examine.examine(host, preflight.encoded(preflight.Question()), user=user)
        except SemisharedError as e:
            return Missing(host, (f"an answer ({e.detail})",), ())
        return lacking(host, seen)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(one, hosts))


def lacking(machine: str, seen: Mapping[str, Any]) -> Missing:
    """Return what a machine that was examined has not."""
    needed = [PYTHON + " 3.9 or newer"] if seen["python"] < OLDEST_PYTHON else []
    return Missing(machine, (*needed, *seen["lacks"]["needed"]), tuple(seen["lacks"]["wanted"]))


def first_error(found: Sequence[Missing]) -> Optional[str]:
    """Return a line for all machines that lack what they need; None if none does."""
    lines = [item.line() for item in found if item.needed]
    return "; ".join(lines) or None
