# SPDX-License-Identifier: Apache-2.0
"""At which points an action is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

import points
from points import Known

NAMES = ["staged", "published 0123456789abcdef.json", "leased", "renamed"]

pytestmark = pytest.mark.skipif(points.ALL, reason="with SEMISHARED_FULL it is killed at all of them")


def test_the_first_variant_is_killed_at_all_kinds_and_others_at_some(tmp_path: Path) -> None:
    known = Known(tmp_path)
    assert known.chosen("clone", "clone overlay", NAMES) == [1, 2, 3, 4]
    other = [name.replace("0123456789abcdef", "fedcba9876543210") for name in NAMES]
    variant = "clone copy"
    some = [n for n in range(1, 5) if n % points.EVERY == len(variant) % points.EVERY]
    assert known.chosen("clone", variant, [*other, "copied"]) == [*some, 5]


def test_it_is_killed_somewhere(tmp_path: Path) -> None:
    known = Known(tmp_path)
    assert known.chosen("rm", "rm", ["removed"]) == known.chosen("rm", "rm it", ["removed"]) == [1]


def test_another_action_has_kinds_of_its_own(tmp_path: Path) -> None:
    known = Known(tmp_path)
    assert known.chosen("clone", "clone", NAMES) == known.chosen("mv", "mv", NAMES) == [1, 2, 3, 4]
