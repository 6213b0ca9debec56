# SPDX-License-Identifier: Apache-2.0
"""Steps on VMs that move from host to host. model/steps.py passes them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...named import Named
from ..refs import DiskRef, ImageRef, Step, looks

if TYPE_CHECKING:
    from ..shapes import Base, Count, Digest, Disk, Probe, Token


class SeenVm(Named):
    """What there is of a VM directory; it is `whole` if it has our records."""

    present: bool
    whole: bool
    disks: Count
    seq: int
    """SEQ of the VM's history when it was made, -1 if unknown."""


class MarkedVm(SeenVm):
    """What MarkVm reports of a VM directory."""

    token: Token
    """The name of the mark, '' without one."""
    seen: str
    """The directory's fingerprint."""
    bytes: Count
    bases: tuple[Base, ...]
    diffs: bool = False
    """Whether a disk is a diff."""
    classes: dict[Disk, list[str]] = {}
    """Of devices, which disks want."""
    sizes: dict[Disk, Count] = {}
    """Bytes of the layers of each disk."""


class FoundVm(SeenVm):
    """What LookForVm reports of a VM directory."""

    same: bool
    """Whether it is the marked one."""


class SentVm(Named):
    """What was sent of a VM directory."""

    sha256: Digest
    """Of the stream."""
    seen: str
    bytes: Count = 0
    """The front-end adds what it has relayed, and how long that took."""
    seconds: float = 0


class RenamedVm(Named):
    """The fingerprint of the directory that was copied."""

    seen: str


class KeptVm(Named):
    """Whether a VM directory was removed."""

    kept: str
    """Why the directory stays, '' if it is gone."""


class DescribedVm(Named):
    """What a machine has of a VM."""

    present: bool
    records: list[Any]
    """Of its disks (disk/record.py), as JSON data."""


class OpenedDisk(Named):
    """A disk as a guest has it open; a file also has its path."""

    type: str
    path: str = ""
    directories: tuple[str, ...] = ("",)
    """Those through which links lead to it and its backing files; '' stands for the VM's own."""


class GuestMachine(Named):
    """The machine that QEMU gives a guest (guest/machine.py), all '' where none is known."""

    type: str = ""
    """libvirt's: kvm, qemu."""
    arch: str = ""
    machine: str = ""
    """The type with its version: pc-q35-7.2."""
    emulator: str = ""
    cpu: str = ""
    """libvirt's XML of the CPU, '' where its answer about one would prove nothing."""


class WrittenProbe(Named):
    """A probe that another host is to find."""

    name: Probe


def has_arrived(source: SeenVm, target: SeenVm, seq: int) -> bool:
    """Tell whether the source of a move need not send, as the target has all of it already.

    Both are the machines' answers about their directories; `seq` is the move's, -1 if unknown. An older
    directory has not arrived: an earlier stay of the VM left it there.
    """
    older = 0 <= target.seq < seq
    return not source.whole and target.whole and not older and bool(target.disks or not source.present)


def no_records(vm_dir: str, host: str) -> str:
    """Return why a directory is not moved as one of a VM with disks of ours."""
    return (
        f"{vm_dir} on {host} has no records of ours: another driver has made it, or it is a "
        f"remainder; nothing was moved"
    )


def why_kept(vm_dir: str, host: str, cleared: KeptVm) -> list[tuple[str, str]]:
    """Return the log lines about a directory that ClearVm has not removed."""
    text = f"{vm_dir} on {host} is kept: {cleared.kept}. semishared gc removes it when it is not the VM's"
    return [("warn", text)] if cleared.kept else []


class MarkVm(Step[MarkedVm]):
    """Report a VM directory, and mark it with a token that identifies it under any name."""

    vm: int
    vm_dir: str


@looks
class LookAtVm(Step[MarkedVm]):
    """Report what MarkVm does, and leave no mark: the token is ''."""

    vm: int
    vm_dir: str


@looks
class LookForVm(Step[FoundVm]):
    """Report a VM directory, and whether it is the one that another machine has marked with `token`.

    `seen` is that machine's fingerprint of it, for where no token could be written.
    """

    vm: int
    vm_dir: str
    token: str
    seen: str


class UnmarkVm(Step[None]):
    """Remove the token."""

    vm: int
    vm_dir: str
    token: str


class SendVm(Step[SentVm]):
    """Send a VM directory, without the `token` in it."""

    vm: int
    vm_dir: str
    token: str = ""
    deltas: tuple[int, ...] = ()
    """Disks whose deltas stay: their guest writes to them."""
    domain: str = ""
    """The guest that may run there."""


class MakeRoom(Step[None]):
    """Let idle bases go, never those of the VM, for a VM directory of so many bytes that is to arrive; fail
    if it does not fit.
    """

    vm: int
    vm_dir: str
    needed: int
    bases: tuple[str, ...]
    """Names of those that its disks will lie over there."""
    sizes: dict[str, int] = {}
    """Of these, the bytes of the layers of each disk that may come to any device of a pool, by its number."""
    apart: int = 0
    """Of these, the bytes of the layers of all others: they want a class of devices, and ask for themselves
    when they are placed.
    """


class ReceiveVm(Step[None]):
    """Receive a VM directory, give its overlays their bases and leases, and publish it."""

    vm: int
    vm_dir: str
    keep_bases: bool
    """False on the front-end: no bases there, an overlay lies without a lease."""
    domain: str
    """What libvirt calls the VM; '' on a machine that runs no domains."""
    disks: tuple[int, ...] = ()
    """Disks that oned says the VM has: a directory with one of them is not replaced by one without."""
    foreign: tuple[int, ...] = ()
    """Those of them that are another driver's."""
    deltas: tuple[int, ...] = ()
    """Disks that get new, empty deltas: for libvirt to write what their guest has in its own."""
    wants: dict[str, Any] = {}
    """What disks want of the devices there: by number {"classes", "size": bytes, "layers"}, of those that
    want something.
    """
    sizes: dict[str, int] = {}
    """The bytes that come with each, by its number."""


class RenameVm(Step[RenamedVm]):
    """Copy a VM directory to another system datastore of the same host (the rest as in ReceiveVm)."""

    vm: int
    source: str
    vm_dir: str
    keep_bases: bool
    domain: str
    disks: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()
    live: bool = False
    """Its guest runs on in the source, with deltas, and gets new, empty ones in the copy
    (guest/go_over.py).
    """


class ReleaseVm(Step[KeptVm]):
    """Remove a VM directory that is elsewhere now and all leases of the VM, unless it is in use or is not as
    it was `seen`.
    """

    vm: int
    vm_dir: str
    domain: str
    seen: str = ""
    """'' if there was none."""


class ClearVm(Step[KeptVm]):
    """Remove a VM directory that a live migration has left behind, and all leases of the VM; report why
    another one is `kept`.

    `seq`: the SEQ of that migration in the VM's history. What it has `brought` here is of that SEQ; where it
    came from, of a lower.
    """

    vm: int
    vm_dir: str
    seq: int
    brought: bool


@looks
class DescribeVm(Step[DescribedVm]):
    """Report the records of a VM's disks."""

    vm: int
    vm_dir: str


@looks
class LookAtGuest(Step["dict[str, OpenedDisk]"]):
    """Report how the guest that runs in a VM directory has its disks open, by their targets
    (guest/domain.py).
    """

    vm: int
    vm_dir: str
    domain: str


@looks
class SeeMachine(Step[GuestMachine]):
    """Report the machine of the guest that runs in a VM directory, or is to go on from its checkpoint."""

    vm: int
    vm_dir: str
    domain: str


@looks
class CheckMachine(Step[None]):
    """Refuse a VM whose machine, as SeeMachine has seen it or a template names it, this host's QEMU lacks."""

    vm: int
    type: str
    arch: str
    machine: str
    emulator: str
    cpu: str
    named: str = ""
    """What names the CPU of a VM that is to be started, with its model; '' for one that goes on."""


class WriteProbe(Step[WrittenProbe]):
    """Write a small file into a store, to see whether another host reads it; report its name.

    `side`: among what is ours there, else into the directory itself, which is another driver's.
    """

    store_dir: str
    text: str
    side: bool = True


class AnswerProbe(Step[None]):
    """Read the probe another host wrote, check its text, and append to it."""

    store_dir: str
    name: str
    text: str
    answer: str


class CheckProbe(Step[None]):
    """Check that the other host's answer arrived, and remove the probe."""

    store_dir: str
    name: str
    text: str


@looks
class ReachDisk(Step[None]):
    """Fail unless this host could open a VM's disk on the network, as its `record` on another host has it."""

    disk: DiskRef
    record: dict[str, Any]


class AdoptClone(Step[None]):
    """Make the clone on a mounted store whose active layer is `layer` the VM's disk on this host: link and
    record, as it had elsewhere.
    """

    disk: DiskRef
    image: ImageRef
    layer: str


class AddDeltas(Step[None]):
    """Let a running guest write to an empty layer on top of each of these disks, from one moment on."""

    vm: int
    vm_dir: str
    domain: str
    disks: tuple[int, ...]


class MergeDeltas(Step[None]):
    """Merge the layers that AddDeltas has put on top, if there are any, into what they lie over.

    What AllowMigration has left goes: the migration has ended.
    """

    vm: int
    vm_dir: str
    domain: str


class AllowMigration(Step[None]):
    """Leave the proof, for vmm/migrate, that both hosts see the same stores; `brought`: what was made ready,
    for the log.
    """

    vm: int
    vm_dir: str
    to: str
    stores: tuple[str, ...]
    brought: str = ""
    foreign: tuple[str, ...] = ()
    """Files of other drivers that both see as well, as the guest has them open."""
    address: str = ""
    """Where the target takes bulk data (model/bulk_network.py), '' for by its name."""


@looks
class CheckNotOpen(Step[None]):
    """Fail if the domain, if it runs on this host, has anything of a VM directory open; `disks`: its disks
    count too.
    """

    vm: int
    vm_dir: str
    domain: str
    disks: bool


@looks
class CheckNotRunning(Step[None]):
    """Fail if the domain is running on this host; '' on a machine that runs no domains."""

    domain: str
