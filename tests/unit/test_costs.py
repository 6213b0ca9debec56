# SPDX-License-Identifier: Apache-2.0
"""What a run says of what it cost."""

from __future__ import annotations

import costs

SPENT = {"minutes": 19.0, "cpu seconds": 2300.0, "memory GiB": 3.0, "disk GiB": 41.5, "busy": 0.9}


def test_each_budget_that_is_passed_is_a_line() -> None:
    report = {"one": {"cpu seconds": 120.0}, "two": {"cpu seconds": 120.0}, "three": {}}
    suites = {"one": {"cpu": 150}, "two": {}, "three": {}}
    assert costs.passed(SPENT, costs.TEST, report, suites) == [
        "budget passed: cpu seconds: 2300.0 of 2200",
        "budget passed: disk GiB: 41.5 of 40",
        "budget passed: suite two: 120.0 cpu seconds of 100",
    ]
    assert costs.passed(SPENT, costs.TEST_FULL, report, suites) == ["budget passed: disk GiB: 41.5 of 40"]


def test_the_dearest_tests_come_first_whatever_their_suite() -> None:
    report = {"a": {"figures": {"cpu": {"x": 1.0, "y": 3.0}}}, "b": {"figures": {"cpu": {"z": 2.0}}}, "c": {}}
    assert costs.dearest(report) == [(3.0, "y"), (2.0, "z"), (1.0, "x")]
