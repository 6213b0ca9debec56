# SPDX-License-Identifier: Apache-2.0
"""QEMU writes a running guest's disk to a second file as well, which the guest may go on with."""

from __future__ import annotations

from . import domain, libvirtd
from .domain import quoted

BEGIN_S = 60


def begin(name: str, target: str, path: str, granularity: int = 0) -> None:
    """Have QEMU write what a disk's active layer holds, and will, to the qcow2 file `path` as well, until somebody ends that.

    `granularity`: bytes of its units, 0 for what QEMU takes.
    """
    libvirt = libvirtd.binding()
    flags = (
        libvirt.VIR_DOMAIN_BLOCK_COPY_SHALLOW | libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT | libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
    )  # fmt: skip
    xml = f"<disk type='file'><source file='{quoted(path)}'/><driver type='qcow2'/></disk>"
    values = {libvirt.VIR_DOMAIN_BLOCK_COPY_GRANULARITY: granularity} if granularity else {}
    domain.ask(name, f"blockcopy {target}", lambda guest: guest.blockCopy(target, xml, values, flags), timeout_s=BEGIN_S)
