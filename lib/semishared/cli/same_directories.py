# SPDX-License-Identifier: Apache-2.0
"""Which directories another machine shares with this front-end: it sees a file of a new name in them.

For stores, which are to be the same everywhere; and for the directories of system datastores on the other
front-ends of an HA group, where VMs at rest lie (docs/how-to/high-availability.md).
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Iterator, Mapping, Sequence

from ..config import Config
from ..errors import SemisharedError
from ..front import front_ends
from ..install import examine
from ..install.preflight import Question, encoded
from ..model.disk import names as disk_names
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore
from ..plan.care.diagnosis import path_of
from ..plan.care.diagnosis_machines import Answers
from ..tools.files import unlink
from ..tools.hung_store import unless_it_hangs
from . import command as on
from .command import AT_ONCE, Row


@contextlib.contextmanager
def tokens(directories: Sequence[str]) -> Iterator[str]:
    """Put a file of one new name into each directory, by which it is known elsewhere; yield its name."""
    token = disk_names.staged("doctor", os.urandom(6).hex())
    paths = [f"{directory}/{token}" for directory in directories]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        are_made = list(pool.map(lambda path: unless_it_hangs(partial(_made, path), False), paths))
    try:
        yield token
    finally:
        for path in (path for path, is_made in zip(paths, are_made) if is_made):
            unless_it_hangs(partial(unlink, path), None)


def _made(path: str) -> bool:
    """Make a file; if that fails, the front-end's own examination reports it."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    except OSError:
        return False
    return True


def of_front_ends(oned: Oned, systems: Sequence[Datastore], config: Config, scripts: str = "") -> Answers:
    """Return what each other front-end says of itself, or why it says nothing; {} without HA.

    `systems`: our system datastores, `scripts`: the remotes directory. Raise OnedUnavailable.
    """
    others = front_ends.others(oned)
    if not others:
        return {}
    directories = list(dict.fromkeys([*map(on.location, systems), *map(path_of, systems)]))
    location = next(iter(directories), "")
    with tokens(directories) as token:
        question = encoded(Question(("front-end",), scripts, location, tuple(directories), token))

        def one(machine: str) -> Row:
            return examine.examine(machine, question, config.hosts_connect_timeout_s)

        asked = on.at_once("front-ends", others, one)
    return {name: found.detail if isinstance(found, SemisharedError) else found for name, found in asked}


def apart(answer: Mapping[str, object], systems: Sequence[Datastore]) -> list[Datastore]:
    """Return the system datastores whose directory another front-end has on a disk of its own.

    One that is not there yet would be made in the directory of all datastores.
    """
    states = answer.get("stores")
    states = states if isinstance(states, dict) else {}
    found = []
    for store in systems:
        path = path_of(store) if os.path.isdir(path_of(store)) else on.location(store)
        if states.get(path, {}).get("same") is not True:
            found.append(store)
    return found
