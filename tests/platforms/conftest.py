# SPDX-License-Identifier: Apache-2.0
"""One cloud whose front-end and second host have another Debian release than the first host, or all of them
another one than this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from lab import roots
from lab.cloud import Cloud


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    releases = roots.platform(os.environ.get(roots.PLATFORM, "mixed"), 2)
    with Cloud.up(hosts=2, installs=True, releases=releases) as up:
        yield up


@pytest.fixture(scope="session")
def os_image(cloud: Cloud) -> int:
    return cloud.os_image()


@pytest.fixture(autouse=True)
def only_this_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    if "cloud" in request.fixturenames:
        request.getfixturevalue("cloud").delete_all()
