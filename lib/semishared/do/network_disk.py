# SPDX-License-Identifier: Apache-2.0
"""Disks that QEMU opens over the network: as what its programs know them, and whether this host could open one."""

from __future__ import annotations

import os
import re

from ..errors import MigrationRefused, SemisharedError
from ..plan.network_disk import NetworkDisk
from ..plan.steps import ImageRef, TakeNetworkDisk
from . import domain, running, vm_dir
from .run import run
from .trace import point

ANSWER_S = 10
LIMITS = {name: ANSWER_S for name in ("client_mount_timeout", "rados_mon_op_timeout", "rados_osd_op_timeout")}
"""Of Ceph's answers: what it cannot do now it keeps silent about."""
ESCAPED, ESCAPE = re.compile(r"([:=@\\])"), r"\\\1"
"""What means something in the address of a disk on RBD (QEMU's block/rbd.c)."""


def take(step: TakeNetworkDisk, planned: float) -> None:
    """Record the disk of a VM on its way here; raise MigrationRefused if its QEMU would not find it."""
    disk = step.disk
    network, image = NetworkDisk.parse(step.record.get("network")), ImageRef.from_data(step.record.get("image"))
    host = os.uname().nodename
    if network.secret not in domain.virsh(running.URI, "secret-list").split():
        raise MigrationRefused(f"libvirt on {host} does not know the secret {network.secret} for disk {disk.disk} of VM {disk.vm}")
    try:
        check(network, image.access.reader)
    except SemisharedError as e:
        raise MigrationRefused(f"{host} cannot open {network.name}, disk {disk.disk} of VM {disk.vm}: {e.detail}") from None
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        vm_dir.write_record(disk, {**step.record, "disk": disk.disk})
    point("record published")


def url(network: NetworkDisk) -> str:
    """Return what qemu-img opens, as the guests' own user, whose keyring is on every host."""
    options = {"id": network.user, "conf": network.conf, "mon_host": ",".join(network.hosts), **LIMITS}
    texts = (f"{name}={ESCAPED.sub(ESCAPE, str(value))}" for name, value in options.items() if value)
    return ":".join([f"{network.protocol}:{network.name}", *texts])


def check(network: NetworkDisk, reader: str) -> None:
    """Open the disk as this host's own user and close it again."""
    words = ["rbd", "--id", reader, *(f"--{name}={value}" for name, value in LIMITS.items())]
    if network.conf:
        words += ["--conf", network.conf]
    if network.hosts:
        words += ["-m", ",".join(network.hosts)]
    run([*words, "info", network.name], timeout_s=2 * ANSWER_S)
