# SPDX-License-Identifier: Apache-2.0
"""The disks of a running guest: what it writes to, and blockjobs and snapshots through libvirt.

libvirt goes on when its caller dies: a job stays in QEMU, a guest stays paused. So an action notes beside the
VM's records what it begins in a guest, and disk/recovery.py ends what is noted. Every action on a running
guest's disks takes the turn (job_lock.py) and recovers first, so a note that it finds belongs to a dead
action.

    .semishared/frozen.json     an action has frozen or suspended the guest (guest/freeze.py)
    .semishared/job.N.json      a job for disk N: a snapshot, a copy or a pull

A pull ends with a new backing name in the layer's header, while QEMU still has in memory where in the layer
the pulled data is. If QEMU dies now, the layer lies over the wrong file. So a pull is over only after QEMU
has flushed its metadata. The note has the former backing name, and recovery without that QEMU puts it back.
No data is lost: the lower layer is removed only afterwards.
"""

from __future__ import annotations

import os
import re
import struct
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterable, Iterator, Mapping

from ..errors import MissingImage, SemisharedError, ToolFailed, ToolTimeout
from ..model.disk import names as disk_names
from ..model.steps import DiskRef
from ..named import NamedTuple
from ..tools import files, layers, progress, qemu_img
from ..tools.effects import point
from . import domain, job_events, libvirtd
from . import freeze as guest_freeze
from .domain import quoted

EQUAL_S = 30
END_S = 120
"""Seconds that an aborted job, or libvirt's snapshot, may take to end."""
BEGIN_S = 60
UNIT = 1 << 16
"""Bytes of QEMU's largest default granularity of a mirror, also for larger clusters."""
AT_ONCE = 1 << 24
"""Bytes that QEMU copies at once by default, while other I/O waits; a rate limit adds pauses."""


def find(name: str, path: str) -> tuple[str, str]:
    """Return target and active file of the guest's disk whose record names `path`."""
    path = os.path.normpath(path)
    folder = os.path.dirname(path)
    for target, source in domain.disks(name).items():
        plain = "/" + os.path.normpath(source).lstrip("/")
        if plain == path or (disk_names.are_layers(folder) and os.path.dirname(plain) == folder):
            return target, plain
        if disk_names.layers(plain) == folder:
            # It was a plain file when the guest started (go_over.py); its only layer still has that name.
            return target, os.path.join(os.path.dirname(plain), os.readlink(plain))
    raise MissingImage(f"domain {name} on {os.uname().nodename} has no disk {path}")


def opened(name: str, folder: str) -> set[int]:
    """Return the numbers of the layers in `folder` that libvirt lists in the running guest's disks."""
    from xml.etree import ElementTree

    sources = ElementTree.fromstring(domain.dumpxml(name)).iter("source")
    paths = [os.path.normpath(source.get("file", "")) for source in sources]
    return {
        int(os.path.basename(path))
        for path in paths
        if os.path.dirname(path) == folder and os.path.basename(path).isdigit()
    }


# -- notes of jobs ----------------------------------------------------------------------------------


class Beside(NamedTuple):
    """A second note of a job, elsewhere; it lasts as long as the note here."""

    note: Callable[[], object]
    forget: Callable[[], object]


NOTHING = Beside(lambda: None, lambda: None)


def end(directory: str, name: str, job: dict[str, object]) -> None:
    """End a job that a killed action has left in a running guest."""
    wait_for_snapshot(name)
    _finish(directory, name, job)


def _finish(directory: str, name: str, job: dict[str, object]) -> None:
    """End a job of a running guest, and flush what it has pulled."""
    end_job(name, str(job.get("target", "")))
    if job.get("layer"):
        flush(directory, name)


def wait_for_snapshot(name: str) -> None:
    """Wait until libvirt has finished a dead caller's snapshot: before, its active layer is not known."""
    deadline = time.monotonic() + END_S
    while domain.is_in(domain.job(name), "SNAPSHOT"):
        if time.monotonic() > deadline:
            raise ToolTimeout(f"libvirt does not finish a snapshot of {name} on {os.uname().nodename}")
        progress.touch()
        time.sleep(0.1)


def end_job(name: str, target: str) -> None:
    """Abort a job: a copy stays incomplete, a pull has pulled less."""
    deadline = time.monotonic() + END_S
    while target and job_events.block_job(name, target):
        try:
            _abort(name, target)
        except SemisharedError:
            # The job may have ended by itself.
            time.sleep(0.1)
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the job on disk {target} of {name} on {os.uname().nodename} does not end")


def _abort(name: str, target: str) -> None:
    domain.ask(
        name, f"blockjob {target} --abort", lambda guest: guest.blockJobAbort(target, 0), timeout_s=END_S
    )


@contextmanager
def noted(disk: DiskRef, name: str, target: str, beside: Beside = NOTHING, **pull: object) -> Iterator[None]:
    """Note a job that libvirt would continue after this process dies; end the job if the block fails.

    `pull`: the number of the `layer` pulled into; `below`, `below_format`: its backing file; `stand_ins`: the
    numbers of empty layers made for libvirt.
    """
    path = disk_names.job_note(disk.vm_dir, disk.disk)
    files.remove_staged(*os.path.split(path))
    job: dict[str, object] = {"target": target, "run": guest_freeze.run_of(name), **pull}
    files.write_json(path, job)
    point("job noted")
    try:
        beside.note()
        yield
    except BaseException:
        try:
            _finish(disk.vm_dir, name, job)
            beside.forget()
            files.unlink(path)
        except SemisharedError:
            pass  # the next action ends it
        raise
    beside.forget()
    files.unlink(path)
    point("job done")


def flush(directory: str, name: str) -> None:
    """Flush the guest's disks in QEMU: libvirt offers that only by stopping the guest."""
    if domain.state(name) == "running":
        with guest_freeze.resting(directory, name, "SUSPEND"):
            pass
    else:
        write_out(name)
    point("guest flushed")


def write_out(name: str) -> None:
    """Make the QEMU of a paused guest write all metadata of its disks."""
    # libvirt does nothing to a paused guest; QEMU flushes at each `stop`.
    domain.ask(name, "qemu-monitor-command", _stop, timeout_s=60)


def _stop(guest: Any) -> None:
    import libvirt_qemu

    libvirt_qemu.qemuMonitorCommand(guest, '{"execute":"stop"}', 0)


# -- jobs -------------------------------------------------------------------------------------------


def pull(disk: DiskRef, name: str, target: str, backing: str, layer: str, beside: Beside) -> None:
    """Have QEMU pull into the active layer `layer` all data above `backing` ('' for the whole chain)."""
    domain.check_plain(name, [target])
    # At most one file of the chain is on the network, the lowest.
    wanted = "" if re.match(layers.PROTOCOL, backing) else os.path.join(os.path.dirname(layer), backing)
    base = f"{target}[{_index(name, target, wanted)}]" if backing else None
    # Without the flag QEMU writes an absolute name, and the directory could not be moved any more.
    flags = libvirtd.binding().VIR_DOMAIN_BLOCK_REBASE_RELATIVE if disk_names.is_number(backing) else 0
    (folder, number), (below, below_format) = os.path.split(layer), layers.backing_of(layer)
    # For a relative name libvirt looks at every layer that the chain had since the guest's start, also at
    # merged ones.
    gone = (
        [known for known in sorted(opened(name, folder)) if not os.path.lexists(f"{folder}/{known}")]
        if flags
        else []
    )
    noting = noted(
        disk, name, target, beside, layer=number, below=below, below_format=below_format, stand_ins=gone
    )
    with noting, _standing_in(folder, gone), job_events.listening(name, target) as job:
        domain.ask(
            name,
            f"blockpull {target}",
            lambda guest: guest.blockRebase(target, base, 0, flags),
            timeout_s=END_S,
        )
        job.wait_until_over()
        if layers.backing_of(layer)[0] == below:
            raise ToolFailed(
                f"the pull into disk {target} of {name} on {os.uname().nodename} has ended before it was done"
            )
        point("layer pulled")
        flush(disk.vm_dir, name)


@contextmanager
def _standing_in(folder: str, gone: Iterable[int]) -> Iterator[None]:
    """Create empty files, within the block, for layers that are gone; QEMU does not open them."""
    for number in gone:
        with files.published(f"{folder}/{number}") as staged:
            qemu_img.create(staged, "qcow2", 0)
            os.chmod(staged, 0o660)
        point("layer stood in for")
    try:
        yield
    finally:
        leave(folder, gone)


def leave(folder: str, gone: Iterable[int]) -> None:
    """Remove the empty files made for libvirt; a file with a virtual size is none of them."""
    for number in gone:
        path = f"{folder}/{number}"
        if files.exists(path) and not qemu_img.virtual_size(path, "qcow2"):
            files.unlink(path)
            point("stand-in removed")


def _index(name: str, target: str, wanted: str) -> int:
    """Return libvirt's index of `wanted` in the backing chain of a running guest's disk.

    `wanted` is '' for an image on the network.
    """
    disk = dict(domain.elements(name)).get(target)
    for below in () if disk is None else disk.iter("backingStore"):
        source = below.find("source")
        path = source.get("file", "") if source is not None else ""
        is_wanted = (
            path and os.path.exists(path) and os.path.samefile(path, wanted)
            if wanted
            else below.get("type") == "network"
        )
        if is_wanted:
            return int(below.get("index", "0"))
    raise MissingImage(
        f"{wanted or 'an image on the network'} is not below disk {target} of the running domain {name}"
    )


def copy(disk: DiskRef, name: str, target: str, path: str, format: str, freeze: str) -> guest_freeze.Rest:
    """Copy a disk at one moment: QEMU mirrors it until both are equal, and lets go while the guest rests.

    The guest rests as `freeze` says.
    """
    domain.check_plain(name, [target])
    # libvirt would create it as root, and QEMU, which runs as another user, could not open it.
    qemu_img.create(path, format, capacity(name, target))
    xml = f"<disk type='file'><source file='{quoted(path)}'/><driver type='{format}'/></disk>"
    reuse = libvirtd.binding().VIR_DOMAIN_BLOCK_COPY_REUSE_EXT
    with noted(disk, name, target), job_events.listening(name, target) as job:
        domain.ask(
            name,
            f"blockcopy {target}",
            lambda guest: guest.blockCopy(target, xml, {}, reuse),
            timeout_s=END_S,
        )
        job.wait_until_ready()
        point("disk mirrored")
        with guest_freeze.resting(disk.vm_dir, name, freeze) as rested:
            if rested.how != "NONE":
                wait_for_equal(name, target)
            _abort(name, target)
            point("disk copied")
    return rested


def mirror(name: str, target: str, path: str, format: str, rate: int = 0) -> None:
    """Have QEMU mirror a disk's active layer, and later writes, to the file `path` until that is ended.

    Into a raw file goes the disk's whole content: `rate` bytes per second, 0 for no limit. QEMU completes a
    guest's write after both files have it: however slow the copy is, both become equal (from libvirt 8.0 on).
    """
    domain.check_plain(name, [target])
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT | libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
    values = {}
    if format == "raw":
        # libvirt before 8.0 has no word for it: there both become equal when the guest writes less.
        flags |= getattr(libvirt, "VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES", 0)
        if rate:
            values[libvirt.VIR_DOMAIN_BLOCK_COPY_BANDWIDTH] = rate
            values[libvirt.VIR_DOMAIN_BLOCK_COPY_BUF_SIZE] = at_once(rate)
    else:
        # No synchronous writes: QEMU has `path` open without its backing file. If a guest writes part of a
        # cluster that is not copied yet, QEMU would fill the rest with zeros.
        flags |= libvirt.VIR_DOMAIN_BLOCK_COPY_SHALLOW
        values[libvirt.VIR_DOMAIN_BLOCK_COPY_GRANULARITY] = unit(path)
    xml = f"<disk type='file'><source file='{quoted(path)}'/><driver type='{format}'/></disk>"
    domain.ask(
        name,
        f"blockcopy {target}",
        lambda guest: guest.blockCopy(target, xml, values, flags),
        timeout_s=BEGIN_S,
    )


def at_once(rate: int) -> int:
    """Return the bytes that QEMU copies at once to keep `rate` bytes per second: those of 0.1 s."""
    return min(max(rate // 10, UNIT), AT_ONCE)


def unit(path: str) -> int:
    """Return the granularity in bytes for mirroring into a qcow2 layer: at least a cluster.

    QEMU opens the layer without its backing file, so it copies whole clusters anyway. But it does not mark
    the part beyond a smaller unit as in flight (seen with 7.2, tests/tools/test_mirror.py): what the guest
    writes there meanwhile may be copied first, and older data after it.
    """
    bits: int = struct.unpack(">20xI", files.read(path, 24))[0]
    return max(1 << bits, UNIT)


def commit(name: str, target: str) -> None:
    """Have QEMU commit a disk's active layer into the one below, and later writes, until that is ended."""
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | libvirt.VIR_DOMAIN_BLOCK_COMMIT_SHALLOW
    domain.ask(
        name,
        f"blockcommit {target}",
        lambda guest: guest.blockCommit(target, None, None, 0, flags),
        timeout_s=BEGIN_S,
    )


def wait_for_equal(name: str, target: str) -> None:
    """Wait until a mirror has all that the resting guest has written."""
    deadline = time.monotonic() + EQUAL_S
    while True:
        at = job_events.block_job(name, target)
        if not at or at["cur"] == at["end"]:
            return
        if time.monotonic() > deadline:
            raise ToolTimeout(
                f"the copy of disk {target} of {name} on {os.uname().nodename} does not catch up "
                f"while the guest rests"
            )
        progress.touch()
        time.sleep(0.05)


def pivot(name: str, target: str) -> None:
    """Pivot: the resting guest goes on with the target of its blockjob."""
    flag = libvirtd.binding().VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
    domain.ask(
        name, f"blockjob {target} --pivot", lambda guest: guest.blockJobAbort(target, flag), timeout_s=60
    )


def capacity(name: str, target: str) -> int:
    """Return the size of a disk as the guest sees it."""
    return domain.ask(name, f"domblkinfo {target}", lambda guest: int(guest.blockInfo(target)[0]))


def switch(disk: DiskRef, name: str, target: str, path: str, freeze: str) -> guest_freeze.Rest:
    """Have the guest write to `path`, an empty layer over its active one; it rests meanwhile (`freeze`)."""
    domain.check_plain(name, [target])
    with noted(disk, name, target), guest_freeze.resting(disk.vm_dir, name, freeze) as rested:
        put_over(name, {target: path})
        point("guest switched")
    return rested


def put_over(name: str, paths: Mapping[str, str]) -> None:
    """Have the guest write, from one moment on, to the empty layers `paths`, by target, over its disks."""
    others = "".join(
        f"<disk name='{quoted(other)}' snapshot='no'/>" for other in domain.disks(name) if other not in paths
    )
    own = "".join(
        f"<disk name='{quoted(target)}' snapshot='external'><source file='{quoted(path)}'/></disk>"
        for target, path in paths.items()
    )
    xml = f"<domainsnapshot><disks>{own}{others}</disks></domainsnapshot>"
    libvirt = libvirtd.binding()
    flags = (
        libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
        | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_ATOMIC
        | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_NO_METADATA
        | libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_REUSE_EXT
    )
    about = " ".join(sorted(paths))
    domain.ask(
        name,
        f"snapshot-create-as {about}",
        lambda guest: guest.snapshotCreateXML(xml, flags),
        timeout_s=END_S,
    )
