# SPDX-License-Identifier: Apache-2.0
"""Carry a VM directory from machine to machine: tar at both ends, the stream's hash in the middle.

The source is removed only after the target has published (CONTRACT §7, defect 14: wipe-then-copy loses data).
What each crash leaves: at the target `.incoming-VM`, removed by the next run; at both ends a whole directory, of
which the source's is the one that counts, and the next run replaces the target's by it.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import Callable, Iterator

from ..errors import ImageChanged, MissingImage, StoreUnavailable, TransferCorrupt
from ..plan.steps import ImageRef, ReceiveVm, RenameVm
from . import bases, beneath, files, layout, progress, vm_dir
from .run import piped, work
from .trace import point

CHUNK = 1 << 20


def send(directory: str, write: Callable[[bytes], None]) -> dict[str, object]:
    """Write the directory as a tar stream; return {"present": bool, "sha256": ...}."""
    beneath.refuse_link(directory)
    if not os.path.isdir(directory):
        return {"present": False}
    argv = ["tar", "--create", "--sparse", "--file=-", f"--directory={directory}", "."]
    digest = hashlib.sha256()
    with piped(argv, feed=False) as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            digest.update(chunk)
            write(chunk)
            progress.count("sent", len(chunk))
    return {"present": True, "sha256": digest.hexdigest()}


@contextmanager
def _removed_on_failure(staging: str) -> Iterator[None]:
    """Remove what was received if it cannot be published: it may be what fills the disk."""
    try:
        yield
    except BaseException:
        work(["rm", "-rf", "--one-file-system", "--", staging])
        raise


def receive(step: ReceiveVm, chunks: Iterator[bytes]) -> str:
    """Unpack the stream beside the VM directory and return the stream's sha256."""
    staging = vm_dir.incoming(step.vm_dir)
    work(["rm", "-rf", "--one-file-system", "--", staging])
    with files.enough_space(staging):
        os.makedirs(staging)
    point("incoming made")
    with _removed_on_failure(staging):
        received = _unpack(staging, chunks)
        layout.check_received(staging, step.vm, step.vm_dir)
    point("incoming unpacked")
    return received


def _unpack(staging: str, chunks: Iterator[bytes]) -> str:
    """Unpack a tar stream into `staging` and return the stream's sha256."""
    digest = hashlib.sha256()
    argv = ["tar", "--extract", "--sparse", "--file=-", f"--directory={staging}", "--no-same-owner"]
    with piped(argv, feed=True) as stream:
        for chunk in chunks:
            digest.update(chunk)
            progress.count("received", len(chunk))
            stream.write(chunk)
    return digest.hexdigest()


def publish(step: ReceiveVm, sent_sha256: str, received_sha256: str, planned: float) -> None:
    """Give the received directory its bases and leases and rename it to the VM directory."""
    staging = vm_dir.incoming(step.vm_dir)
    with _removed_on_failure(staging):
        if sent_sha256 != received_sha256:
            raise TransferCorrupt(f"VM {step.vm}: what arrived on {os.uname().nodename} is not what was sent")
        _publish(staging, step.vm, step.vm_dir, step.keep_bases, planned)


def _publish(staging: str, vm: int, directory: str, keep_bases: bool, planned: float) -> None:
    for record in vm_dir.records(staging):
        _adopt(staging, directory, vm, record, keep_bases)
    files.fsync_tree(staging)
    point("incoming adopted")
    old = vm_dir.outgoing(directory)
    with vm_dir.publishing(vm, directory, planned):
        work(["rm", "-rf", "--one-file-system", "--", old])
        if os.path.lexists(directory):
            os.rename(directory, old)
            point("older directory set aside")
        os.rename(staging, directory)
        files.fsync(os.path.dirname(directory))
        point("vm directory published")
        work(["rm", "-rf", "--one-file-system", "--", old])


def _adopt(staging: str, directory: str, vm: int, record: dict[str, object], keep_bases: bool) -> None:
    """Make one disk of a received directory usable here."""
    disk = int(str(record["disk"]))
    if "network" in record:
        return  # libvirt opens it, or says why not
    if record["place"] == "shared":
        path = str(record["path"])
        if keep_bases and not os.path.exists(path):
            raise StoreUnavailable(f"{path} of disk {disk} is not there on {os.uname().nodename}")
        return
    path = str(record["path"])
    # disk.N itself, or its active layer disk.N.snap/K; backing names among layers are relative.
    here = directory + path[path.rindex(f"/disk.{disk}") :]
    if path != here:
        files.write_json(vm_dir.record_path(staging, disk), {**record, "path": here})
    image = record.get("image")
    if record["how"] == "overlay" and keep_bases and isinstance(image, dict):
        try:
            bases.lease(bases.root_of(directory), ImageRef.from_data(image), vm, disk)
        except ImageChanged as e:
            raise ImageChanged(f"disk {disk} of VM {vm} needs the image as it was: {e.detail}") from None


def rename(step: RenameVm, planned: float) -> None:
    """Move a VM directory to another system datastore of this host; by rename where that is one file system."""
    beneath.refuse_link(step.source)
    if not os.path.isdir(step.source):
        if os.path.isdir(step.vm_dir):
            return
        raise MissingImage(f"{step.source} is not there on {os.uname().nodename}")
    vm_dir.prepare(step.vm, step.vm_dir, planned)
    staging = vm_dir.incoming(step.vm_dir)
    work(["rm", "-rf", "--one-file-system", "--", staging])
    with _removed_on_failure(staging):
        work(["cp", "-a", "--sparse=always", "--reflink=auto", "--", step.source, staging])
        point("directory copied")
        layout.check_received(staging, step.vm, step.vm_dir)
        _publish(staging, step.vm, step.vm_dir, step.keep_bases, planned)
    work(["rm", "-rf", "--one-file-system", "--", step.source])
