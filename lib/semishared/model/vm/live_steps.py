# SPDX-License-Identifier: Apache-2.0
"""Steps that a VM's host carries out itself when it hands a running guest to another host (exchange.Here).

`domain` is libvirt's name or UUID of the guest. `host`: the libvirtd of that host, '' for this one's own.
"""

from __future__ import annotations

from typing import Any

from ...named import Named, NamedTuple
from ..refs import Step, looks


class SeenDomain(Named):
    """What a migration has to know of a running guest."""

    xml: str
    snapshots: list[str]
    """Names of its system snapshots."""
    persistent: bool


class Site(Named):
    """A host's settings for migrations: of kvmrc, and [migration] of semishared.conf."""

    target: str
    """The URI of the other host's libvirtd."""
    migration: dict[str, Any]
    migrate_options: tuple[str, ...] = ()
    tries: int = 3
    sync_time: bool = False
    compact_memory: bool = False


@looks
class SeeDomain(Step[SeenDomain]):
    """Return a running guest's `xml`, the names of its system `snapshots`, and whether it is `persistent`."""

    domain: str


class TakeProof(Step["Any"]):
    """Return premigrate's proof, None without one, and remove it: it holds for one migration."""

    vm_dir: str


@looks
class LookAtProof(Step["Any"]):
    """Return what TakeProof does, and leave it there."""

    vm_dir: str


@looks
class ReadSite(Step[Site]):
    """Return the settings in kvmrc and semishared.conf (`migration`) for a migration to `host`.

    Its libvirtd is at `target`.
    """

    host: str


@looks
class SeeState(Step[str]):
    """Return a libvirtd's word about a domain (steps.State)."""

    domain: str
    host: str = ""


class MigrateOptions(NamedTuple):
    """libvirt's options of a live migration, in words of plan/vm/migration.py, and our actions meanwhile."""

    flags: tuple[str, ...] = ()
    values: dict[str, Any] = {}
    limit_s: int = 0
    """Seconds after which `at_limit` happens; 0: never."""
    at_limit: str = "suspend"
    """The guest is paused until it has arrived (`suspend`), goes on there while part of its memory is still
    here (`postcopy`), or stays here (`abort`).
    """
    after_precopy: bool = False
    """Whether `postcopy` begins as soon as all of its memory was copied once."""
    downtime_ms: int = 0
    """Milliseconds that the guest may be paused at the end; 0: libvirt's default."""
    memory_mib_s: int = 0
    """MiB per second of memory once the disks, which share the rate, are mirrored; 0: BANDWIDTH, as for
    disks.
    """

    def to_data(self) -> dict[str, object]:
        """Return the options as JSON data."""
        return self._asdict()


class MigrateDomain(Step[str]):
    """Move a running guest to another host; return what that took, as a sentence or ''."""

    domain: str
    host: str
    options: MigrateOptions
    chains: dict[str, Any] = {}
    """What disks lie over, (path, format) of each file, by the paths of their active layers."""


class CopyDeltas(Step[None]):
    """Mirror a running guest's writes from its VM directory `origin` into its copy `vm_dir`.

    It ends when both are equal.
    """

    vm: int
    vm_dir: str
    origin: str
    domain: str


class Wait(Step[None]):
    """Wait."""

    seconds: int


class RemoveArrival(Step[None]):
    """Remove the domain, which never ran there, from another host: `how` is destroy or undefine."""

    domain: str
    host: str
    how: str


class SyncTime(Step[None]):
    """Have a guest set its clock, if it has an agent that can."""

    domain: str
    host: str


class CompactMemory(Step[None]):
    """Have the kernel compact this host's memory, if it does."""
