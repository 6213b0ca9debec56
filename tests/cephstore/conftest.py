# SPDX-License-Identifier: Apache-2.0
"""A cluster for the tests of images, which need no lab; the store's brings up one of its own in a lab.

Host sides are forks, as those of tools are: they talk to Ceph for as long as python takes to start.
"""

from __future__ import annotations

from typing import Iterator

import pytest

from lab import caches, fork_server
from semishared.wire import session
from tools.conftest import ceph, forked, site, world

__all__ = ["ceph", "forked", "site", "world"]


@pytest.fixture(scope="session")
def _host_sides() -> Iterator[fork_server.Starter]:
    with fork_server.serving(caches.CHECKOUT / "lib", ceph=True) as server:
        yield fork_server.Starter(server, only=session.HERE)
