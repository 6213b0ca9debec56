# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool: what `semishared pool` asks (base/labels.py)."""

from __future__ import annotations

from typing import NamedTuple


class ListDevices(NamedTuple):
    """Report the devices of the host's pool: what they are, what they hold, which are there."""

    root: str


class SetDevices(NamedTuple):
    """Let these, and no others, be the devices that take disks and bases on the host: label them, or refuse all of them."""

    root: str
    devices: tuple[str, ...]
    """Words of SEMISHARED_POOL (plan/pool.py)."""
