# SPDX-License-Identifier: Apache-2.0
"""QEMU mirrors a running guest's disk to a second file, and the guest pivots to that file."""

from __future__ import annotations

import os
import struct
from typing import Collection, Dict

from ..errors import GuestNotFrozen
from ..tools import files
from ..tools.effects import point
from . import active_layer, block_jobs, domain, freeze, libvirtd
from .domain import quoted

BEGIN_S = 60
UNIT = 1 << 16
"""Bytes of QEMU's largest default granularity of a mirror, also for larger clusters."""
AT_ONCE = 1 << 24
"""Bytes that QEMU copies at once by default, while other I/O waits; a rate limit adds pauses."""


def begin(name: str, target: str, path: str) -> None:
    """Have QEMU mirror a disk's active layer, and later writes, to the qcow2 file `path` until ended."""
    # Not VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES: QEMU has `path` open without its backing file. If a guest
    # writes part of a cluster that is not copied yet, QEMU would fill the rest with zeros.
    libvirt = libvirtd.binding()
    values = {libvirt.VIR_DOMAIN_BLOCK_COPY_GRANULARITY: unit(path)}
    _begin(name, target, path, "qcow2", values, libvirt.VIR_DOMAIN_BLOCK_COPY_SHALLOW)


def begin_whole(name: str, target: str, path: str, rate: int) -> None:
    """Have QEMU mirror a disk's whole content, and later writes, to the raw file `path` until it is ended.

    It copies `rate` bytes per second, 0 for no limit. QEMU completes a guest's write after both files have
    it: however slow the copy is, both become equal.
    """
    libvirt = libvirtd.binding()
    values = {}
    if rate:
        values = {
            libvirt.VIR_DOMAIN_BLOCK_COPY_BANDWIDTH: rate,
            libvirt.VIR_DOMAIN_BLOCK_COPY_BUF_SIZE: at_once(rate),
        }
    _begin(name, target, path, "raw", values, libvirt.VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES)


def at_once(rate: int) -> int:
    """Return the bytes that QEMU copies at once to keep `rate` bytes per second: those of 0.1 s."""
    return min(max(rate // 10, UNIT), AT_ONCE)


def _begin(name: str, target: str, path: str, format: str, values: Dict[str, int], flags: int) -> None:
    domain.check_plain(name, [target])
    libvirt = libvirtd.binding()
    flags |= libvirt.VIR_DOMAIN_BLOCK_COPY_REUSE_EXT | libvirt.VIR_DOMAIN_BLOCK_COPY_TRANSIENT_JOB
    xml = f"<disk type='file'><source file='{quoted(path)}'/><driver type='{format}'/></disk>"
    domain.ask(
        name,
        f"blockcopy {target}",
        lambda guest: guest.blockCopy(target, xml, values, flags),
        timeout_s=BEGIN_S,
    )


def unit(path: str) -> int:
    """Return the granularity in bytes for mirroring into a qcow2 layer: at least a cluster.

    QEMU opens the layer without its backing file, so it copies whole clusters anyway. But it does not mark
    the part beyond a smaller unit as in flight (seen with 7.2, tests/tools/test_mirror.py): what the guest
    writes there meanwhile may be copied first, and older data after it.
    """
    bits: int = struct.unpack(">20xI", files.read(path, 24))[0]
    return max(1 << bits, UNIT)


def go_over(vm_dir: str, name: str, targets: Collection[str], otherwise: str, origin: str = "") -> None:
    """Pivot the guest to the mirrors of these disks, each equal once before; update the records of `vm_dir`.

    `otherwise`: what the error says becomes of the disks; `origin`: the VM directory that the guest comes
    from, if another (relocation.py). Raise GuestNotFrozen if the guest does not rest, or not long enough:
    some disks may have gone over then.

    All disks pivot in one rest. While the guest rests the records may name either side; once it runs they
    must name what it writes to. So nothing wakes the guest between a pivot and its record (guest/freeze.py
    limits a rest), and after an early wake no further disk is switched.
    """
    with freeze.resting(origin or vm_dir, name, "SUSPEND", copy=vm_dir if origin else "") as rested:
        if rested.how == "NONE":
            # A user has paused it, and may resume it between the pivot and the records.
            how = "was paused by somebody else" if domain.state(name) == "paused" else "does not run any more"
            raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} {how}: {otherwise}")
        for target in targets:
            block_jobs.wait_for_equal(name, target)
        # Metadata of the mirror may still be in QEMU's memory, and its source may be removed.
        block_jobs.write_out(name)
        point("mirrors equal")
        for target in targets:
            with freeze.held(origin or vm_dir, name, rested):
                block_jobs.pivot(name, target)
                point("guest has gone over")
                active_layer.settle(vm_dir, name)
