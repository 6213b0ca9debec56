# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that looks after fencing: only where it was set up, by a key or a command,
can it be wrong.
"""

from __future__ import annotations

import os
from typing import Sequence

from ..config import Config
from ..errors import SemisharedError
from ..front import fence_facts
from ..front.fence_marks import Marks
from ..model import stores
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore
from ..plan.diagnosis import Cloud, Finding
from ..plan.diagnosis_fence import of_fenced, of_means
from ..plan.diagnosis_machines import Answers
from ..plan.fence import Mark
from . import front_end_key


def findings(cloud: Cloud, answers: Answers, config: Config, front_end: str) -> list[Finding]:
    """Return what is wrong."""
    boots = {
        machine: str(answer.get("boot", ""))
        for machine, answer in answers.items()
        if isinstance(answer, dict)
    }
    pools = [store for store in cloud.datastores if store.type != 1 and _names_key(store)]
    keys = {str(group[0].id): _why_not(group) for group in fence_facts.clusters(pools)}
    own = front_end_key.findings(front_end, config.hosts_connect_timeout_s)
    return [*own, *of_fenced(_marks(cloud), boots), *of_means(_not_run(config), keys, front_end)]


def _marks(cloud: Cloud) -> dict[str, Mark]:
    """Return the marks of hosts, by their names; none where oned, or the key, is a finding of its own."""
    try:
        return Marks(Oned()).of_all(cloud.hosts)
    except SemisharedError:
        return {}


def _names_key(store: Datastore) -> bool:
    try:
        return stores.kind(store).has_bridge and bool(stores.fence_user(store))
    except SemisharedError:
        return False  # its attributes are a finding of their own


def _why_not(datastores: Sequence[Datastore]) -> str:
    try:
        fence_facts.try_key(datastores)
    except SemisharedError as e:
        return e.detail
    return ""


def _not_run(config: Config) -> str:
    """Return why the fencing command cannot be run, '' if it can, or there is none."""
    words = config.fencing
    return (
        "" if not words or os.access(words[0], os.X_OK) else f"{words[0]} is not there, or not to be executed"
    )
