# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that a VM's host carries out itself when it hands a running guest to another one
(exchange.Here).

`domain` is what libvirt calls the guest, by name or UUID. `host`: the libvirtd of that host, '' for this
one's own.
"""

from __future__ import annotations

from typing import Any

from ...named import NamedTuple
from ..refs import looks


@looks
class SeeDomain(NamedTuple):
    """Return the `xml` of a running guest, the names of its system `snapshots`, and whether it is
    `persistent`.
    """

    domain: str


class TakeProof(NamedTuple):
    """Return the proof that premigrate has left, None without one, and remove it: it holds for one
    migration.
    """

    vm_dir: str


@looks
class LookAtProof(NamedTuple):
    """Return what TakeProof does, and leave it there."""

    vm_dir: str


@looks
class ReadSite(NamedTuple):
    """Return what kvmrc, and semishared.conf (`migration`), say of a migration to `host`, whose libvirtd is
    at `target`.
    """

    host: str


@looks
class SeeState(NamedTuple):
    """Return what a libvirtd says about a domain (steps.State)."""

    domain: str
    host: str = ""


class MigrateOptions(NamedTuple):
    """What libvirt is to do in a live migration, in words of plan/vm/migration.py, and what we do to it
    meanwhile.
    """

    flags: tuple[str, ...] = ()
    values: dict[str, Any] = {}
    limit_s: int = 0
    """After so many seconds (0: never) `at_limit` happens."""
    at_limit: str = "suspend"
    """The guest stands still until it has arrived (`suspend`), goes on there with part of its memory still
    here (`postcopy`), or stays here (`abort`).
    """
    after_precopy: bool = False
    """The same as `postcopy`, as soon as all of its memory was copied once."""
    downtime_ms: int = 0
    """How long the guest may stand still at the end; 0: as libvirt has it."""
    memory_mib_s: int = 0
    """MiB per second that memory may take once the disks, which share as much, are mirrored; 0: BANDWIDTH, as
    they have it.
    """

    def to_data(self) -> dict[str, object]:
        """Return the options as JSON data."""
        return self._asdict()


class MigrateDomain(NamedTuple):
    """Move a running guest to another host; return what that took, as a sentence or ''."""

    domain: str
    host: str
    options: MigrateOptions
    chains: dict[str, Any] = {}
    """What disks lie over, (path, format) of each file, by the paths of their active layers."""


class CopyDeltas(NamedTuple):
    """Have what a running guest writes mirrored from its VM directory `origin` into the copy of that,
    `vm_dir`, until they are equal.
    """

    vm: int
    vm_dir: str
    origin: str
    domain: str


class Wait(NamedTuple):
    """Wait."""

    seconds: int


class RemoveArrival(NamedTuple):
    """Remove the domain, which never ran there, from another host: `how` is destroy or undefine."""

    domain: str
    host: str
    how: str


class SyncTime(NamedTuple):
    """Have a guest set its clock, if it has an agent that can."""

    domain: str
    host: str


class CompactMemory(NamedTuple):
    """Have the kernel compact this host's memory, if it does."""
