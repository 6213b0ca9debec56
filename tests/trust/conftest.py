# SPDX-License-Identifier: Apache-2.0
"""A fresh machine for each test, as tests/tools has it."""

from tools.conftest import _host_sides, _usual_io_class, forked, pool, usual_priority, world

__all__ = ["_host_sides", "_usual_io_class", "forked", "pool", "usual_priority", "world"]
