# SPDX-License-Identifier: Apache-2.0
"""The key of front-ends: `setup` makes it, once for all front-ends of an HA group, and `doctor` compares what
each of them has.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Sequence

from .. import NAME
from ..errors import NoKey, SemisharedError
from ..front import front_ends
from ..install import examine
from ..install.preflight import Question, encoded
from ..opennebula.oned import Oned
from ..opennebula.report import printable
from ..plan.diagnosis import Finding
from ..plan.diagnosis_fence import of_keys
from ..tools import key
from .hosts import AT_ONCE
from .output import put

CONNECT_S = 10


def made(oned: Oned) -> list[str]:
    """Make the key if there is none, and return what is left to do for the other front-ends; raise NoKey.

    Another front-end that has one already, or that cannot say, keeps this one from making a second.
    """
    why = key.look(oned.key)[1]
    if why != key.MISSING:
        if why:
            raise NoKey(f"{oned.key} {why}")
        return []
    others = front_ends.others(oned)
    for machine, said in _asked(oned.key, others, CONNECT_S).items():
        if isinstance(said, str):
            raise NoKey(
                f"{oned.key} {why}, and {machine}, a front-end of this zone too, does not say "
                f"whether it has one: {said}"
            )
        if said["why_not"] != key.MISSING:
            raise NoKey(f"{oned.key} {why}, and {machine} has one: scp -p {machine}:{oned.key} {oned.key}")
    key.make(oned.key)
    return [
        f"made {oned.key}",
        *(f"each front-end needs the same: scp -p {oned.key} {machine}:{oned.key}" for machine in others),
    ]


def is_made(oned: Oned) -> bool:
    """Make the key if there is none, tell whether there is one then, and say on stderr what is left to do."""
    try:
        said = made(oned)
    except NoKey as e:
        put(f"{NAME} setup: {printable(e.line())}", to=sys.stderr)
        return False
    for line in said:
        put(f"{NAME} setup: {line}", to=sys.stderr)
    return True


def findings(front_end: str, connect_s: int) -> list[Finding]:
    """Return what is wrong with the key here and on the other front-ends, as far as they can be asked."""
    try:
        oned = Oned()
        others = front_ends.others(oned)
    except SemisharedError:
        return []  # oned is a finding of its own
    return of_keys(_asked(oned.key, [front_end, *others], connect_s), front_end, oned.key)


def _asked(path: str, machines: Sequence[str], connect_s: int) -> dict[str, "dict[str, Any] | str"]:
    """Return what each machine says of its key, or why it says nothing."""
    question = encoded(Question(roles=(), key=(path, os.urandom(16).hex())))

    def one(machine: str) -> "dict[str, Any] | str":
        try:
            said = examine.examine(machine, question, connect_s).get("key")
        except SemisharedError as e:
            return e.detail
        return said if isinstance(said, dict) else "its answer makes no sense"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(machines, pool.map(one, machines)))
