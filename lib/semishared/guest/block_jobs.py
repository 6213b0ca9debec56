# SPDX-License-Identifier: Apache-2.0
"""The disks of a running guest: what it writes to, and what is done to them through libvirt while it runs.

libvirt goes on when its caller dies: a job stays in QEMU, a guest stays paused. So whatever is begun in a
guest is noted beside the VM's records before, and disk/recovery.py ends what is noted; every action on a
running guest's disks begins with that, and with the turn (job_lock.py), so that what it finds noted is
nobody's work any more.

    .semishared/frozen.json     the guest rests, by us (guest/freeze.py)
    .semishared/job.N.json      a job for disk N: a snapshot, a copy or a pull

A pull ends with a new backing name in the layer's header, while QEMU still has in memory where in the layer
the pulled data is: a QEMU that dies now leaves a layer that lies over the wrong one. So a pull is over when
QEMU has been made to write all it knows; its note says what the layer lay over, and who finds it without its
QEMU puts that name back. All the data is there, in the layer that is not removed before.
"""

from __future__ import annotations

import os
import re
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
"""How long a snapshot that libvirt is taking, or a job that was told to end, may take for that."""


def find(name: str, path: str) -> tuple[str, str]:
    """Return the target of the guest's disk with recorded file `path`, and the file that it writes to."""
    path = os.path.normpath(path)
    folder = os.path.dirname(path)
    for target, source in domain.disks(name).items():
        plain = "/" + os.path.normpath(source).lstrip("/")
        if plain == path or (disk_names.are_layers(folder) and os.path.dirname(plain) == folder):
            return target, plain
        if disk_names.layers(plain) == folder:
            # It was a plain file when the guest was started (deltas.py), and its only layer has that name
            # still.
            return target, os.path.join(os.path.dirname(plain), os.readlink(plain))
    raise MissingImage(f"domain {name} on {os.uname().nodename} has no disk {path}")


def opened(name: str, folder: str) -> set[int]:
    """Return the numbers of the layers in `folder` by which libvirt knows what the running guest has open."""
    from xml.etree import ElementTree

    sources = ElementTree.fromstring(domain.dumpxml(name)).iter("source")
    paths = [os.path.normpath(source.get("file", "")) for source in sources]
    return {
        int(os.path.basename(path))
        for path in paths
        if os.path.dirname(path) == folder and os.path.basename(path).isdigit()
    }


# -- what is noted ----------------------------------------------------------------------------------


class Beside(NamedTuple):
    """What notes a job elsewhere too, for as long as it is noted here."""

    note: Callable[[], object]
    forget: Callable[[], object]


NOTHING = Beside(lambda: None, lambda: None)


def end(directory: str, name: str, job: dict[str, object]) -> None:
    """End a job that a killed action has left in a guest that runs."""
    wait_for_snapshot(name)
    _finish(directory, name, job)


def _finish(directory: str, name: str, job: dict[str, object]) -> None:
    """End a job of a guest that runs; what it has pulled becomes durable."""
    end_job(name, str(job.get("target", "")))
    if job.get("layer"):
        flush(directory, name)


def wait_for_snapshot(name: str) -> None:
    """Wait until libvirt has finished a dead caller's snapshot: only then it knows the active layer."""
    deadline = time.monotonic() + END_S
    while domain.is_in(domain.job(name), "SNAPSHOT"):
        if time.monotonic() > deadline:
            raise ToolTimeout(f"libvirt does not finish a snapshot of {name} on {os.uname().nodename}")
        progress.touch()
        time.sleep(0.1)


def end_job(name: str, target: str) -> None:
    """End a job; a copy is cut short, a pull has pulled less."""
    deadline = time.monotonic() + END_S
    while target and job_events.block_job(name, target):
        try:
            _abort(name, target)
        except SemisharedError:
            # It has ended by itself.
            time.sleep(0.1)
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the job on disk {target} of {name} on {os.uname().nodename} does not end")


def _abort(name: str, target: str) -> None:
    domain.ask(
        name, f"blockjob {target} --abort", lambda guest: guest.blockJobAbort(target, 0), timeout_s=END_S
    )


@contextmanager
def noted(disk: DiskRef, name: str, target: str, beside: Beside = NOTHING, **pull: object) -> Iterator[None]:
    """Do, within the block, what libvirt may go on with when we are dead; end it when the block fails.

    `pull`: the number of the `layer` that is pulled into, and of that which it lies over: `below`,
    `below_format`; `stand_ins`: the numbers of layers that are there for libvirt alone.
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
            pass  # whoever comes next ends it
        raise
    beside.forget()
    files.unlink(path)
    point("job done")


def flush(directory: str, name: str) -> None:
    """Make QEMU flush the guest's disks: a stopped guest is the one flush that libvirt offers."""
    if domain.state(name) == "running":
        with guest_freeze.resting(directory, name, "SUSPEND"):
            pass
    else:
        write_out(name)
    point("guest flushed")


def write_out(name: str) -> None:
    """Make the QEMU of a guest that rests write all it knows of its disks."""
    # libvirt leaves a paused guest alone; QEMU flushes whenever it is told to stop.
    domain.ask(name, "qemu-monitor-command", _stop, timeout_s=60)


def _stop(guest: Any) -> None:
    import libvirt_qemu

    libvirt_qemu.qemuMonitorCommand(guest, '{"execute":"stop"}', 0)


# -- jobs -------------------------------------------------------------------------------------------


def pull(disk: DiskRef, name: str, target: str, backing: str, layer: str, beside: Beside) -> None:
    """Let QEMU copy into the active layer `layer` what it does not share with `backing` ('' for none)."""
    domain.check_plain(name, [target])
    # On the network there is at most one, the lowest.
    wanted = "" if re.match(layers.PROTOCOL, backing) else os.path.join(os.path.dirname(layer), backing)
    base = f"{target}[{_index(name, target, wanted)}]" if backing else None
    # Else QEMU writes an absolute name into the header, and the directory could not be moved any more.
    flags = libvirtd.binding().VIR_DOMAIN_BLOCK_REBASE_RELATIVE if disk_names.is_number(backing) else 0
    (folder, number), (below, below_format) = os.path.split(layer), layers.backing_of(layer)
    # For a relative name libvirt looks into all that the guest has had below its disk since it was started,
    # also what was merged away.
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
    """Have an empty file, within the block, in place of each layer that is gone; QEMU opens none of them
    anew.
    """
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
    """Remove what stands in for layers that are gone; what has a size is none of that."""
    for number in gone:
        path = f"{folder}/{number}"
        if files.exists(path) and not qemu_img.virtual_size(path, "qcow2"):
            files.unlink(path)
            point("stand-in removed")


def _index(name: str, target: str, wanted: str) -> int:
    """Return libvirt's index of the file `wanted` ('' for what is on the network) in the backing chain of a
    running guest's disk.
    """
    from xml.etree import ElementTree

    for disk in ElementTree.fromstring(domain.dumpxml(name)).iterfind("devices/disk"):
        element = disk.find("target")
        if element is None or element.get("dev") != target:
            continue
        for below in disk.iter("backingStore"):
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
    """Copy a disk at one moment: blockcopy mirrors until the two are equal; the guest rests (`freeze`) while
    that lets go.
    """
    domain.check_plain(name, [target])
    # Made by us, not by libvirt: that would make it as root, and QEMU, which is not, could not open it.
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


def wait_for_equal(name: str, target: str) -> None:
    """Wait until a mirror holds all that a guest which rests has written."""
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
    """Let a guest that rests go on with what its disk was copied to, or committed to."""
    flag = libvirtd.binding().VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT
    domain.ask(
        name, f"blockjob {target} --pivot", lambda guest: guest.blockJobAbort(target, flag), timeout_s=60
    )


def capacity(name: str, target: str) -> int:
    """Return the size of a disk as the guest sees it."""
    return domain.ask(name, f"domblkinfo {target}", lambda guest: int(guest.blockInfo(target)[0]))


def switch(disk: DiskRef, name: str, target: str, path: str, freeze: str) -> guest_freeze.Rest:
    """Let the guest write to `path` from now on, an empty layer over what it writes to; it rests (`freeze`)
    meanwhile.
    """
    domain.check_plain(name, [target])
    with noted(disk, name, target), guest_freeze.resting(disk.vm_dir, name, freeze) as rested:
        put_over(name, {target: path})
        point("guest switched")
    return rested


def put_over(name: str, paths: Mapping[str, str]) -> None:
    """Let the guest write, from one moment on, to the empty layer `paths[target]` over what each of these
    disks writes to.
    """
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
