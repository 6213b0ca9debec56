# SPDX-License-Identifier: Apache-2.0
"""Which tests of the upgrade are for `make test-full` alone: on Ceph, what does not depend on where images
are.
"""

from __future__ import annotations

import pytest

LONG = {
    "test_front_end_of_the_older_version_is_refused_in_one_line",
    "test_what_a_host_refused_is_done_when_it_is_synced",
    "test_host_that_was_not_synced_is_in_nobody_elses_way",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_rbd.py" and item.name in LONG:
            item.add_marker("long")
