# SPDX-License-Identifier: Apache-2.0
"""What all suites share: the markers, and how long hypothesis looks for counter-examples."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

MARKERS = {
    "reads_checkout": "looks at the files of this checkout, as a linter does",
    "runs_python": "starts python, the one thing a unit test may start, and says why",
}
# HYPOTHESIS_EXAMPLES=2000 for a long look; no deadline, since the machine is shared with labs.
TOLERATED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture]
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "25"))
settings.register_profile("semishared", max_examples=EXAMPLES, deadline=None, suppress_health_check=TOLERATED)
settings.load_profile("semishared")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
