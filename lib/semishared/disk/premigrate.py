# SPDX-License-Identifier: Apache-2.0
"""What two hosts check and prepare before a running guest migrates between them.

Each writes into a store what the other reads there; the target opens the disks on the network; the guest
writes to deltas while its disks are sent.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..device import memory
from ..errors import MigrationRefused, MissingImage, SemisharedError, StoreUnavailable
from ..guest import job_lock, virsh
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.refs import DiskRef
from ..model.vm.move_steps import (
    AddDeltas,
    AllowMigration,
    CheckNotOpen,
    MergeDeltas,
    ReachDisk,
    WrittenProbe,
)
from ..tools import beneath, files
from ..tools.effects import point
from . import records, recovery, vm_dir
from .epochs import Planned


def write_probe(store_dir: str, text: str, side: bool) -> WrittenProbe:
    """Write a small file into a store for another host to read; return its name."""
    try:
        with beneath.directory(store_dir, disk_names.SIDE if side else "") as directory:
            files.remove_stale(directory)
            path = files.staged_name(f"{directory}/probe")
            files.write(path, text.encode())
    except OSError as e:
        raise StoreUnavailable(
            f"nothing can be written into {store_dir} on {os.uname().nodename}: {e.strerror}"
        ) from None
    name = os.path.basename(path)
    return WrittenProbe(f"{disk_names.SIDE}/{name}" if side else name)


def answer_probe(store_dir: str, name: str, text: str, answer: str) -> None:
    """Write `answer` into another host's probe; raise StoreUnavailable if the probe is not there."""
    with _probe(store_dir, name) as path:
        _expect(store_dir, path, text)
        files.write(path, answer.encode())


def check_probe(store_dir: str, name: str, text: str) -> None:
    """Remove a probe; raise StoreUnavailable if the other host has not answered in it."""
    with _probe(store_dir, name) as path:
        try:
            _expect(store_dir, path, text)
        finally:
            files.unlink(path)


@contextmanager
def _probe(store_dir: str, name: str) -> Iterator[str]:
    """Yield the path of a probe in its directory, opened beneath the store's."""
    directory, name = os.path.split(name)
    try:
        with beneath.directory(store_dir, directory) as where:
            yield f"{where}/{name}"
    except FileNotFoundError as e:
        raise StoreUnavailable(f"{store_dir} on {os.uname().nodename}: {e.strerror}") from None


def _expect(store_dir: str, path: str, text: str) -> None:
    try:
        if files.read(path, 1000).decode("ascii", "replace") == text:
            return
    except OSError:
        pass
    raise StoreUnavailable(f"{store_dir} on {os.uname().nodename} is not the same as on the other host")


def reach_disk(step: ReachDisk) -> None:
    """Raise MigrationRefused if QEMU on this host could not open the disk of an incoming VM."""
    from ..store.rbd import ceph
    from ..store.rbd import image as rbd_image

    disk, record = step.disk, Record.from_data({**step.record, "disk": step.disk.disk})
    network, image = record.network or record.over, record.stored or record.image
    assert network is not None and image is not None
    host = os.uname().nodename
    if network.secret not in virsh.secrets():
        raise MigrationRefused(
            f"libvirt on {host} does not know the secret {network.secret} for disk {disk.disk} of "
            f"VM {disk.vm}"
        )
    try:
        where, name = ceph.pool_of(image, image.access.reader)
        with ceph.opened(where, name, read_only=True) as opened:
            if network.snapshot and not rbd_image.find(opened, network.snapshot):
                raise MissingImage(f"it has no snapshot {network.snapshot}")
    except SemisharedError as e:
        raise MigrationRefused(
            f"{host} cannot open {network.name}, disk {disk.disk} of VM {disk.vm}: {e.detail}"
        ) from None


def add_deltas(step: AddDeltas, planned: Planned) -> None:
    """Have a running guest write to deltas."""
    from ..guest import go_over

    job_lock.take(step.vm, step.vm_dir)
    recovery.recover(step.vm_dir, step.domain)
    memory.more_each([disk_names.layers(disk_names.disk(step.vm_dir, disk)) for disk in step.disks])
    with (
        vm_dir.publishing(step.vm, step.vm_dir, planned),
        recovery.ended_on_failure(step.vm_dir, step.domain),
    ):
        go_over.begin(
            step.vm_dir,
            step.domain,
            [records.record_of(DiskRef(step.vm, disk, step.vm_dir)) for disk in step.disks],
        )


def merge_deltas(step: MergeDeltas) -> None:
    """Merge a guest's deltas, if any, into the layers below; take back a proof that no migration has used."""
    if files.unlink(disk_names.migration_note(step.vm_dir)):
        point("proof taken back")
    if recovery.left(step.vm_dir):
        job_lock.take(step.vm, step.vm_dir)
        recovery.recover(step.vm_dir, step.domain)


def allow_migration(step: AllowMigration) -> None:
    """Write the proof that both hosts see the same stores."""
    files.remove_staged(*os.path.split(disk_names.migration_note(step.vm_dir)))
    proof = {"shared_checked": list(step.stores), "foreign": list(step.foreign), "address": step.address}
    files.write_json(
        disk_names.migration_note(step.vm_dir),
        {"version": 1, "to": step.to, "brought": step.brought, **proof},
    )


def check_not_open(step: CheckNotOpen) -> None:
    """Raise MigrationRefused if a running guest has files of a VM directory open.

    Without `disks`, open disks are allowed; but raise it also for system snapshots, whose XML names the
    directory: the guest cannot go on in a copy.
    """
    from ..guest import domain

    vm_dir, name = step.vm_dir, step.domain
    if domain.state(name) in ("absent", "off"):
        return
    from xml.etree import ElementTree

    xml, here = ElementTree.fromstring(domain.dumpxml(name)), os.uname().nodename
    if not step.disks and domain.snapshots(name):
        raise MigrationRefused(
            f"domain {name} on {here} has system snapshots, which name its directory: it cannot "
            f"change while it runs"
        )
    devices = xml.find("devices")
    for parent, child in (
        (xml, "metadata"),
        *(((devices, "disk"),) if devices is not None and not step.disks else ()),
    ):
        for element in parent.findall(child):
            parent.remove(element)
    for element in xml.iter():
        for text in (*element.attrib.values(), element.text or ""):
            if f"{vm_dir}/" in text.replace("//", "/"):
                raise MigrationRefused(f"domain {name} on {here} has {text.strip()} open ({element.tag})")
