# SPDX-License-Identifier: Apache-2.0
"""What a test itself asks of this machine is forked, too; what is killed is forked with all that it starts
(lab/forks.py).
"""

from __future__ import annotations

from cephstore.conftest import _host_sides, forked

__all__ = ["_host_sides", "forked"]
