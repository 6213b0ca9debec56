# SPDX-License-Identifier: Apache-2.0
"""The disks of a running guest: what it writes to, and what is done to them through libvirt while it runs.

libvirt goes on when its caller dies: a job stays in QEMU, a guest stays paused. So whatever is begun in a guest is noted
beside the VM's records before, and `recover` ends what is noted; every action on a running guest's disks begins with
that, and with the turn (turns.py), so that what it finds noted is nobody's work any more.

    .semishared/frozen.json     the guest rests, by us (rest.py)
    .semishared/job.N.json      a job for disk N: a snapshot, a copy or a pull

A pull ends with a new backing name in the layer's header, while QEMU still has in memory where in the layer the pulled
data is: a QEMU that dies now leaves a layer that lies over the wrong one. So a pull is over when QEMU has been made to
write all it knows; its note says what the layer lay over, and who finds it without its QEMU puts that name back. All the
data is there, in the layer that is not removed before.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager
from typing import Iterator

from ..disk import layers, vm_dir
from ..errors import MissingImage, SemisharedError, ToolTimeout
from ..model.steps import DiskRef
from ..tools import files, progress, qemu_img
from ..tools.crash_points import point
from . import domain, rest

URI = domain.HERE
JOB = re.compile(r"job\.[0-9]+\.json\Z")
EQUAL_S = 30
END_S = 120
"""How long a snapshot that libvirt is taking, or a job that was told to end, may take for that."""


def find(name: str, path: str) -> tuple[str, str]:
    """Return the target of the running guest's disk whose recorded file is `path`, and the file that it writes to."""
    path = os.path.normpath(path)
    folder = os.path.dirname(path)
    for line in domain.virsh(URI, "--quiet", "domblklist", name).splitlines():
        target, _, source = line.strip().partition(" ")
        plain = os.path.normpath(source.strip())
        plain = "/" + plain.lstrip("/")
        if plain == path or (folder.endswith(".snap") and os.path.dirname(plain) == folder):
            return target, plain
    raise MissingImage(f"domain {name} on {os.uname().nodename} has no disk {path}")


def opened(name: str, folder: str) -> set[int]:
    """Return the numbers of the layers in `folder` by which libvirt knows what the running guest has open."""
    from xml.etree import ElementTree

    sources = ElementTree.fromstring(domain.dumpxml(URI, name)).iter("source")
    paths = [os.path.normpath(source.get("file", "")) for source in sources]
    return {int(os.path.basename(path)) for path in paths if os.path.dirname(path) == folder and os.path.basename(path).isdigit()}


# -- what is noted ----------------------------------------------------------------------------------


def recover(directory: str, name: str) -> None:
    """End what a killed action has left in the guest: a rest, jobs; `name` is '' when no guest runs."""
    rest.wake(directory, name)
    for note in sorted(filter(JOB.match, _names(f"{directory}/{vm_dir.RECORDS}"))):
        path = f"{directory}/{vm_dir.RECORDS}/{note}"
        job = files.read_json(path) or {}
        if rest.is_of_this_run(job, name):
            _wait_for_snapshot(name)
            _finish(directory, name, job)
        else:
            _put_back(directory, int(note.split(".")[1]), job)
        files.unlink(path)
        point("job ended")


def is_settled(directory: str) -> bool:
    """Tell whether nothing is noted that `recover` would end."""
    return not any(name == rest.NOTE or JOB.match(name) for name in _names(f"{directory}/{vm_dir.RECORDS}"))


def _finish(directory: str, name: str, job: dict[str, object]) -> None:
    """End a job of a guest that runs; what it has pulled becomes durable."""
    _end_job(name, str(job.get("target", "")))
    if job.get("layer"):
        flush(directory, name)


def _put_back(directory: str, disk: int, job: dict[str, object]) -> None:
    """Put a layer back over what it lay over before a pull that its QEMU did not live to finish."""
    below, record = str(job.get("below", "")), vm_dir.read_record(directory, disk)
    if "layer" not in job or not record:
        return
    folder = os.path.dirname(str(record["path"]))
    layer = f"{folder}/{job['layer']}"
    # The one below is gone only if the pull was over, and the power as well before the note was.
    if files.exists(layer) and os.path.exists(f"{folder}/{below}") and layers.backing_of(layer)[0] != below:
        qemu_img.lay_over(layer, below, str(job.get("below_format", "")))
        point("layer put back")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _wait_for_snapshot(name: str) -> None:
    """Wait until libvirt has finished a snapshot that its dead caller has asked for: only then it says who writes where."""
    deadline = time.monotonic() + END_S
    while re.search(r"^Operation:\s+Snapshot", domain.virsh(URI, "domjobinfo", name), re.MULTILINE):
        if time.monotonic() > deadline:
            raise ToolTimeout(f"libvirt does not finish a snapshot of {name} on {os.uname().nodename}")
        progress.touch()
        time.sleep(0.1)


def job_info(name: str, target: str) -> str:
    """Return what libvirt says of QEMU's job on a disk: how far it has come, among other things."""
    return domain.virsh(URI, "blockjob", name, target, "--info", "--raw")


def has_job(name: str, target: str) -> bool:
    """Tell whether QEMU is at work on a disk."""
    return bool(re.search(r"^\s*type=", job_info(name, target), re.MULTILINE))


def _end_job(name: str, target: str) -> None:
    """End a job; a copy is cut short, a pull has pulled less."""
    deadline = time.monotonic() + END_S
    while target and has_job(name, target):
        try:
            domain.virsh(URI, "blockjob", name, target, "--abort", timeout_s=END_S)
        except SemisharedError:
            # It has ended by itself.
            time.sleep(0.1)
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the job on disk {target} of {name} on {os.uname().nodename} does not end")


@contextmanager
def noted(disk: DiskRef, name: str, target: str, **pull: str) -> Iterator[None]:
    """Do, within the block, what libvirt may go on with when we are dead; end it when the block fails.

    `pull`: the number of the `layer` that is pulled into, and of that which it lies over: `below`, `below_format`.
    """
    path = f"{disk.vm_dir}/{vm_dir.RECORDS}/job.{disk.disk}.json"
    files.remove_staged(*os.path.split(path))
    job: dict[str, object] = {"target": target, "run": rest.run_of(name), **pull}
    files.write_json(path, job)
    point("job noted")
    try:
        yield
    except BaseException:
        try:
            _finish(disk.vm_dir, name, job)
            files.unlink(path)
        except SemisharedError:
            pass  # whoever comes next ends it
        raise
    files.unlink(path)
    point("job done")


def flush(directory: str, name: str) -> None:
    """Make QEMU write all it knows of the guest's disks; a stopped guest is the one flush that libvirt offers."""
    if domain.state(URI, name) == "running":
        with rest.resting(directory, name, "SUSPEND"):
            pass
    else:
        # libvirt leaves a paused guest alone; QEMU flushes whenever it is told to stop.
        domain.virsh(URI, "qemu-monitor-command", name, '{"execute":"stop"}', timeout_s=60)
    point("guest flushed")


# -- jobs -------------------------------------------------------------------------------------------


def pull(disk: DiskRef, name: str, target: str, backing: str, layer: str) -> None:
    """Let QEMU copy into a disk's active layer, the file `layer`, what that does not share with `backing` ('' for nothing)."""
    base: list[str] = []
    if backing:
        base = ["--base", f"{target}[{_index(name, target, os.path.join(os.path.dirname(layer), backing))}]"]
        if "/" not in backing:
            # Else QEMU writes an absolute name into the header, and the directory could not be moved any more.
            base.append("--keep-relative")
    below, below_format = layers.backing_of(layer)
    with noted(disk, name, target, layer=os.path.basename(layer), below=below, below_format=below_format):
        domain.virsh_while(lambda: job_info(name, target), URI, "blockpull", name, target, *base, "--wait")
        point("layer pulled")
        flush(disk.vm_dir, name)


def _index(name: str, target: str, wanted: str) -> int:
    """Return libvirt's index of the file `wanted` in the backing chain of a running guest's disk."""
    from xml.etree import ElementTree

    for disk in ElementTree.fromstring(domain.dumpxml(URI, name)).iterfind("devices/disk"):
        element = disk.find("target")
        if element is None or element.get("dev") != target:
            continue
        for below in disk.iter("backingStore"):
            source = below.find("source")
            path = source.get("file", "") if source is not None else ""
            if path and os.path.exists(path) and os.path.samefile(path, wanted):
                return int(below.get("index", "0"))
    raise MissingImage(f"{wanted} is not below disk {target} of the running domain {name}")


def copy(disk: DiskRef, name: str, target: str, path: str, format: str, freeze: str) -> rest.Rest:
    """Copy a disk at one moment: blockcopy mirrors until the two are equal; the guest rests (`freeze`) while that lets go."""
    # Made by us, not by libvirt: that would make it as root, and QEMU, which is not, could not open it.
    qemu_img.create(path, format, capacity(name, target))
    with noted(disk, name, target):
        domain.virsh_while(
            lambda: job_info(name, target),
            URI, "blockcopy", name, target, "--dest", path, "--format", format, "--reuse-external", "--wait",
        )  # fmt: skip
        point("disk mirrored")
        with rest.resting(disk.vm_dir, name, freeze) as rested:
            if rested.how != "NONE":
                _wait_for_equal(name, target)
            domain.virsh(URI, "blockjob", name, target, "--abort", timeout_s=END_S)
            point("disk copied")
    return rested


def _wait_for_equal(name: str, target: str) -> None:
    """Wait until a mirror holds all that a guest which rests has written."""
    deadline = time.monotonic() + EQUAL_S
    while True:
        at = dict(re.findall(r"^\s*(cur|end)=([0-9]+)$", job_info(name, target), re.MULTILINE))
        if not at or at.get("cur") == at.get("end"):
            return
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the copy of disk {target} of {name} on {os.uname().nodename} does not catch up while the guest rests")
        progress.touch()
        time.sleep(0.05)


def capacity(name: str, target: str) -> int:
    """Return the size of a disk as the guest sees it."""
    words = domain.virsh(URI, "domblkinfo", name, target).split()
    return int(words[words.index("Capacity:") + 1])


def switch(disk: DiskRef, name: str, target: str, path: str, freeze: str) -> rest.Rest:
    """Let the guest write to `path` from now on, an empty layer over what it writes to; it rests (`freeze`) meanwhile."""
    lines = domain.virsh(URI, "--quiet", "domblklist", name).splitlines()
    others = [line.split()[0] for line in lines if line.split() and line.split()[0] != target]
    with noted(disk, name, target), rest.resting(disk.vm_dir, name, freeze) as rested:
        domain.virsh(
            URI, "snapshot-create-as", name, "--disk-only", "--atomic", "--no-metadata", "--reuse-external",
            f"--diskspec={target},snapshot=external,file={path}",
            *(f"--diskspec={other},snapshot=no" for other in others), timeout_s=120,
        )  # fmt: skip
        point("guest switched")
    return rested


