# SPDX-License-Identifier: Apache-2.0
"""The life of VMs, by the tests that run with the simulated oned: here a real one calls the drivers."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "system.test_vm",
    "system.test_migration",
    "system.test_snapshots",
    "system.test_commit",
    "system.test_detach",
)

from system.test_vm import *  # noqa: E402, F403
