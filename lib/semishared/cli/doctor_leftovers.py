# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that looks for what killed actions left over, as `semishared gc` does."""

from __future__ import annotations

from ..config import Config
from ..errors import SemisharedError
from ..opennebula.oned import Oned
from ..plan.gc import find
from ..units import human
from . import gc

OLD_S = 3600
"""What is younger may belong to an action that is under way."""


def found(config: Config, no_oned: bool) -> tuple[int, str, list[dict[str, str]], list[tuple[str, str]]]:
    """Return how many things gc would remove, their size, what it could not look at: machine and error, and
    the same of what is damaged.
    """
    if no_oned:
        return 0, "", [], []
    try:
        survey = gc.survey_cloud(Oned(), config)
    except SemisharedError:
        return 0, "", [], []
    left = find(survey.machines, survey.known, OLD_S, not survey.errors)
    left += gc.elsewhere(survey, OLD_S, config)
    left = [item for item in left if not item.keep]
    damaged = [
        (machine.name, text) for machine in survey.machines for text in machine.facts.get("unreadable", ())
    ]
    return len(left), human(sum(item.bytes for item in left)), survey.errors, damaged
