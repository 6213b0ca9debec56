# SPDX-License-Identifier: Apache-2.0
"""Judge the other front-ends of an HA group by what they say of themselves (checks.py has the rows).

Each may lead next, so each needs what this one has: the same package and semishared.conf, or hosts refuse it
or are asked for something else. What is judged of their keys: diagnosis.of_keys.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, Union

from ...named import NamedTuple
from .checks import Finding, Judge, judged

CONF = "etc/semishared.conf"


class FrontEnd(NamedTuple):
    """Another front-end's answer (install/preflight.py), or why there is none, and what is as here."""

    said: Union[Mapping[str, Any], str]
    own: Mapping[str, str] = {}
    """Hashes of the parts of the package here."""
    apart: Sequence[str] = ()
    """Directories of system datastores that it has on a disk of its own."""

    def other_parts(self) -> list[str]:
        """Return which parts are not as here; [] for one that has said nothing."""
        if isinstance(self.said, str):
            return []
        there = self.said.get("tree", {}).get("parts", {})
        return sorted(part for part, digest in self.own.items() if there.get(part) != digest)


FRONT_END: dict[str, Judge] = {
    "front-end-says": lambda it: isinstance(it.said, str) and it.said,
    "front-end-package": lambda it: ", ".join(part for part in it.other_parts() if part != CONF),
    "front-end-conf": lambda it: CONF in it.other_parts() and CONF,
    "front-end-apart": lambda it: ", ".join(it.apart),
}


def of_front_ends(
    answers: Mapping[str, Union[Mapping[str, Any], str]],
    own: Mapping[str, str],
    apart: Mapping[str, Sequence[str]],
    front_end: str,
) -> list[Finding]:
    """Judge each other front-end; `own`: hashes of the parts of the package on `front_end`, this one.

    `apart`: by front-end, the directories of system datastores that it does not share with this one.
    """
    found = []
    for machine, said in answers.items():
        facts = FrontEnd(said, own, apart.get(machine, ()))
        found += judged("front-end", FRONT_END, facts, machine, front_end=front_end)
    return found
