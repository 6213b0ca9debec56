# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that concerns the base store of a host, and what the operator's command asks of it.

Not passed on by steps.py, which every action loads: `steps.from_data` finds them here when they are named.

`root` is the base store, <DATASTORE_LOCATION>/.semishared; `name` is <store>-<image>-<generation>.
"""

from __future__ import annotations

from typing import NamedTuple

from .refs import ImageRef


class ListBases(NamedTuple):
    """Report all bases of the host, and the capacity of the file system that they are on."""

    root: str


class VerifyBase(NamedTuple):
    """Read a base from the disk and compare every extent with its manifest; take it out of use if one is wrong."""

    root: str
    name: str
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MendBase(NamedTuple):
    """Have the base `image` anew in place of the one that was taken out of use, and give its leases the new content."""

    root: str
    image: ImageRef


class EvictBase(NamedTuple):
    """Remove a base if nobody has a lease on it."""

    root: str
    name: str



class ReportDisks(NamedTuple):
    """Report the disks of all VMs here that have records of ours, for `semishared status`. Nothing on a store is touched."""

    location: str
    systems: tuple[int, ...]
