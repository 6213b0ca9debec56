# SPDX-License-Identifier: Apache-2.0
"""Steps that a VM's host carries out itself, in the process of a hypervisor action (exchange.Here).

`domain` is what libvirt calls the guest, by name or UUID. What only a live migration does:
model/vm/live_steps.py.
"""

from __future__ import annotations

from typing import Optional

from ...named import NamedTuple
from ..disk.record import Record
from ..refs import Step, is_look, looks


@looks
class ReadVm(NamedTuple):
    """Return the text of the vm.xml that oned writes just before deploy, None if there is none."""

    vm_dir: str


@looks
class ReadRecords(NamedTuple):
    """Return the `records` there are of the disks `disks`; None: of all that have one."""

    vm_dir: str
    disks: Optional[tuple[int, ...]] = None


@looks
class SeeNotes(NamedTuple):
    """Return the names of the notes that actions on the guest have left, and of the lock of one that is at
    work on its disks.
    """

    vm_dir: str


class Recover(NamedTuple):
    """End in the VM's disks what those actions have begun, and those that are at work yet."""

    vm_dir: str
    domain: str = ""
    """'' if no guest runs."""


@looks
class CheckDisk(NamedTuple):
    """Fail unless a disk is what its record says, and there."""

    vm_dir: str
    record: Record


@looks
class CheckEpoch(NamedTuple):
    """Fail if the VM was taken over by another host since its directory here was made; return why that cannot
    be told, or ''.
    """

    vm_dir: str


@looks
class ReadChain(NamedTuple):
    """Return (path, format) of each file below the qcow2 file `path`, by its headers now, topmost first."""

    path: str
    record: Record


class SeeHot(NamedTuple):
    """Return what HoldHot would, and hold nothing."""

    vm_dir: str
    record: Record
    lease: str


class HoldHot(NamedTuple):
    """Return the copy in memory of the base `lease` that a disk lies over, which stays there until the action
    is over; '' for none.
    """

    vm_dir: str
    record: Record
    lease: str


@looks
class ReadIoLimits(NamedTuple):
    """Return what semishared.conf on this host says that a disk of each I/O class may do: (bytes per second,
    operations per second).
    """


@looks
class ReadCheckpoint(NamedTuple):
    """Return the domain XML in a checkpoint, None if that is no file."""

    path: str


class WriteCheckpoint(NamedTuple):
    """Put another domain XML into a checkpoint."""

    path: str
    xml: str


@looks
class CheckShare(NamedTuple):
    """Fail unless a directory is the share of an image and may be given to a guest here; return the program
    that gives it, and whether it stands for a directory that was there before.

    It has to be that of which the VM's directory has a note (NoteClients), if there is one; that may say that
    it is read alone, too.
    """

    image: int
    source: str
    readonly: bool
    """As the VM's disk says."""
    vm_dir: str


@looks
class ReadClients(NamedTuple):
    """Return which of the VM's disks are shares whose client the guest itself is."""

    vm_dir: str


@looks
class ListTargets(NamedTuple):
    """Return the targets (vda) of a running guest's disks."""

    domain: str


class BecomeStock(NamedTuple):
    """Become OpenNebula's own script of the action: its output and exit code are the action's."""

    action: str
    argv: tuple[str, ...]
    stdin: str = ""
    """'' for what came."""
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
