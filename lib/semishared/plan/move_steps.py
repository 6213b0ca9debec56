# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that concerns VMs on their way from host to host. steps.py passes it on."""

from __future__ import annotations

from typing import Any, NamedTuple

from .refs import DiskRef


class SendVm(NamedTuple):
    """Send a VM directory, then remove it once told that it arrived."""

    vm: int
    vm_dir: str


class ReceiveVm(NamedTuple):
    """Receive a VM directory, give its overlays their bases and leases, and publish it."""

    vm: int
    vm_dir: str
    keep_bases: bool
    """False on the front-end: no bases there, an overlay lies without a lease (DESIGN §5)."""


class RenameVm(NamedTuple):
    """Move a VM directory to another system datastore of the same host (`keep_bases` as in ReceiveVm)."""

    vm: int
    source: str
    vm_dir: str
    keep_bases: bool


class DescribeVm(NamedTuple):
    """Report the records of a VM's disks."""

    vm: int
    vm_dir: str


class WriteProbe(NamedTuple):
    """Write a small file into a store, to see whether another host reads it."""

    store_dir: str
    name: str
    text: str


class AnswerProbe(NamedTuple):
    """Read the probe another host wrote, check its text, and append to it."""

    store_dir: str
    name: str
    text: str
    answer: str


class CheckProbe(NamedTuple):
    """Check that the other host's answer arrived, and remove the probe."""

    store_dir: str
    name: str
    text: str


class TakeNetworkDisk(NamedTuple):
    """Give a VM's disk on the network the `record` it has on another host, once this one is seen to reach the disk."""

    disk: DiskRef
    record: dict[str, Any]


class AllowMigration(NamedTuple):
    """Leave the proof, for vmm/migrate, that both hosts see the same stores."""

    vm: int
    vm_dir: str
    to: str
    stores: tuple[str, ...]


class CheckNotRunning(NamedTuple):
    """Fail if the domain is running on this host."""

    domain: str
