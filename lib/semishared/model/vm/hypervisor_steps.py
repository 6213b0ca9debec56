# SPDX-License-Identifier: Apache-2.0
"""Steps that a VM's host carries out itself, in the process of a hypervisor action (exchange.Here).

`domain` is libvirt's name or UUID of the guest. Steps of a live migration alone: model/vm/live_steps.py.
"""

from __future__ import annotations

from typing import Any, Optional

from ...named import Named
from ..disk.record import Record
from ..refs import Step, is_look, looks


@looks
class ReadVm(Step["Optional[str]"]):
    """Return the text of the vm.xml that oned writes just before deploy, None if there is none."""

    vm_dir: str


class Recorded(Named):
    """The records of some disks."""

    records: list[Any]
    """Of disks, as JSON data."""
    marked: bool = False
    """Marks for backups are noted of the VM."""


@looks
class ReadRecords(Step[Recorded]):
    """Return the `records` there are of the disks `disks`; None: of all that have one."""

    vm_dir: str
    disks: Optional[tuple[int, ...]] = None


@looks
class SeeNotes(Step["list[str]"]):
    """Return the names of unfinished actions' notes on the guest, and of the lock of one still at work."""

    vm_dir: str


@looks
class SeeVersions(Step["dict[str, str]"]):
    """Return the versions of this host's QEMU and libvirt, by those names; none if libvirt does not say."""


class Recover(Step[None]):
    """End the unfinished work of those actions in the VM's disks, and the actions that are still at work."""

    vm_dir: str
    domain: str = ""
    """'' if no guest runs."""


class TidyMarks(Step[None]):
    """Remove what a killed QEMU has left of marks for backups in the VM's disks."""

    vm_dir: str


class LoseMarks(Step[None]):
    """Note that no disk of the VM has a mark for backups any more, and remove all from its running guest."""

    vm_dir: str
    domain: str


@looks
class CheckDisk(Step[None]):
    """Fail unless a disk is what its record says, and there."""

    vm_dir: str
    record: Record


@looks
class CheckEpoch(Step[str]):
    """Fail if another host has taken the VM over since its directory was made.

    Return why that is unknown, or ''.
    """

    vm_dir: str


@looks
class ReadChain(Step["list[tuple[str, str]]"]):
    """Return (path, format) of each file below the qcow2 file `path`, by its headers now, topmost first."""

    path: str
    record: Record


class SeeHot(Step[str]):
    """Return what HoldHot would, and hold nothing."""

    vm_dir: str
    record: Record
    lease: str


class HoldHot(Step[str]):
    """Return the copy in memory of a disk's base `lease`, kept until the action is over; '' for none."""

    vm_dir: str
    record: Record
    lease: str


@looks
class ReadIoLimits(Step["dict[str, tuple[int, int]]"]):
    """Return the limits of each I/O class in this host's semishared.conf: (bytes, operations) per second."""


@looks
class ReadCheckpoint(Step["Optional[str]"]):
    """Return the domain XML in a checkpoint, None if that is no file."""

    path: str


class WriteCheckpoint(Step[None]):
    """Replace the domain XML in a checkpoint."""

    path: str
    xml: str


@looks
class CheckShare(Step["tuple[str, bool]"]):
    """Fail unless a directory is an image's share that a guest here may get.

    Return the program that gives it, and whether it stands for a directory that was there before. If the VM's
    directory has a note of the share (NoteClients), it must be that one; the note may also make it read-only.
    """

    image: int
    source: str
    readonly: bool
    """By the VM's disk."""
    vm_dir: str


@looks
class ReadClients(Step["list[int]"]):
    """Return the VM's disks that are shares which the guest mounts itself."""

    vm_dir: str


@looks
class ListTargets(Step["list[str]"]):
    """Return the targets (vda) of a running guest's disks."""

    domain: str


class BecomeStock(Step[None]):
    """Become OpenNebula's own script of the action: its output and exit code are the action's."""

    action: str
    argv: tuple[str, ...]
    stdin: str = ""
    """'' for the action's own input."""
    message: str = ""
    """The driver message, which goes into the fifth argument in base64, if that is empty."""


def look_instead(step: Step) -> Step | None:
    """Return the look that answers `step`: itself, or another one; None if there is none."""
    name = type(step).__name__
    if name == "TakeProof":
        from .live_steps import LookAtProof

        return LookAtProof(*step)
    if name == "HoldHot":
        return SeeHot(*step)
    return step if is_look(step) else None
