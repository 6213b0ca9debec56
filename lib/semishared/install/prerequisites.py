# SPDX-License-Identifier: Apache-2.0
"""What must be there before anything is touched: programs on the front-end, and on hosts where they are named."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Optional, Sequence

from .. import inventory
from ..do.run import stream
from ..do.ssh import PYTHON, is_here
from ..errors import SemisharedError, ToolTimeout

OLDEST_PYTHON = (3, 9)
SILENT_S = 30


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
    return lacking(os.uname().nodename, inventory.look(), inventory.FRONT_END_NEEDS, inventory.FRONT_END_WANTS)


def on_hosts(hosts: Sequence[str], user: Sequence[str] = ()) -> list[Missing]:
    """Return what each host lacks, all asked at once; `user` is the command that changes to the user who has the keys."""

    def ask(host: str) -> Missing:
        seen = inventory_of(host, user)
        if isinstance(seen, str):
            return Missing(host, (seen,), ())
        return lacking(host, seen, inventory.HOST_NEEDS, inventory.HOST_WANTS)

    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(ask, hosts))


def inventory_of(host: str, user: Sequence[str] = ()) -> "inventory.Seen | str":
    """Return what a host has; why it cannot be asked, as text. The host need not have anything of ours."""
    argv = [PYTHON, "-I", "-"]
    if not is_here(host):
        options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5"]
        argv = [*user, "ssh", *options, "--", host, f"exec {PYTHON} -I -"]
    with open(inventory.__file__, "rb") as file:
        program = file.read()
    try:
        said = b"".join(stream(argv, stdin=program, silence_s=SILENT_S))
    except ToolTimeout:
        return f"an answer within {SILENT_S} s"
    except SemisharedError as e:
        return PYTHON if "exit code 127" in e.detail else f"an answer ({e.detail})"
    try:
        seen = json.loads(said.splitlines()[-1])
        return inventory.Seen(tuple(seen[0]), dict(seen[1]))
    except (ValueError, LookupError, TypeError):
        return "an answer that makes sense (does its shell print something at login?)"


def lacking(machine: str, seen: inventory.Seen, needs: Sequence[str], wants: Sequence[str]) -> Missing:
    """Return what of `needs` and `wants` a machine has not."""
    needed = [PYTHON + " 3.9 or newer"] if seen.python < OLDEST_PYTHON else []
    return Missing(machine, (*needed, *_absent(needs, seen)), tuple(_absent(wants, seen)))


def _absent(names: Sequence[str], seen: inventory.Seen) -> list[str]:
    return [name for name in names if not any(seen.programs.get(one) is not None for one in name.split("|"))]


def first_error(found: Sequence[Missing]) -> Optional[str]:
    """Return a line for all machines that lack what they need; None if none does."""
    lines = [item.line() for item in found if item.needed]
    return "; ".join(lines) or None
