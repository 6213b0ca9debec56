# SPDX-License-Identifier: Apache-2.0
"""QEMU writes a running guest's disk to a second file as well, and the guest goes over to that file."""

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
"""Bytes of QEMU's largest unit of a mirror, if it may choose, also of larger clusters."""
AT_ONCE = 1 << 24
"""Bytes that QEMU copies at once, if it may choose, while who uses the device waits; a rate is kept by how
long it rests then.
"""


def begin(name: str, target: str, path: str) -> None:
    """Have QEMU write what a disk's active layer holds, and will, to the qcow2 file `path` as well, until
    somebody ends that.
    """
    # Not VIR_DOMAIN_BLOCK_COPY_SYNCHRONOUS_WRITES: QEMU has `path` open without what that lies over, and
    # where a guest writes a part of a cluster that nothing was copied into, the rest of it would be filled
    # with zeros.
    libvirt = libvirtd.binding()
    values = {libvirt.VIR_DOMAIN_BLOCK_COPY_GRANULARITY: unit(path)}
    _begin(name, target, path, "qcow2", values, libvirt.VIR_DOMAIN_BLOCK_COPY_SHALLOW)


def begin_whole(name: str, target: str, path: str, rate: int) -> None:
    """Have QEMU write a disk, with all that its active layer lies over, to the raw file `path` as well, until
    somebody ends that.

    It is copied at `rate` bytes per second, 0 for no limit. What the guest writes is written to both before
    the guest is told: however fast it writes, and slow the copy is, they come to be equal.
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
    """Return how many bytes QEMU is to copy at once to keep a rate, in bytes per second: what that allows in
    a tenth of a second.
    """
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
    """Return the bytes of the units in which QEMU is to mirror into a qcow2 layer: never less than a cluster.

    It opens the layer without what that lies over, so it copies whole clusters all the same. But of what it
    adds to a smaller unit it does not note that it is under way (seen with 7.2, tests/tools/test_mirror.py):
    what the guest writes there meanwhile may be copied first, and what was read before it last.
    """
    bits: int = struct.unpack(">20xI", files.read(path, 24))[0]
    return max(1 << bits, UNIT)


def go_over(vm_dir: str, name: str, targets: Collection[str], otherwise: str, origin: str = "") -> None:
    """Let the guest go on with the mirrors of these disks, which have been equal once, and the records of
    `vm_dir` say so.

    `otherwise`: what is said to become of one that somebody has paused; `origin`: the VM directory that it
    comes from, if another (relocation.py). Raise GuestNotFrozen if it does not rest, or not long enough: some
    of its disks may have gone over then.

    All disks go over in one freeze. While the guest is frozen the records may name either side; once it runs
    they have to name what it writes to. So nothing thaws the guest between a pivot and its record
    (guest/freeze.py limits a freeze), and after an early thaw no further disk is switched.
    """
    with freeze.resting(origin or vm_dir, name, "SUSPEND", copy=vm_dir if origin else "") as rested:
        if rested.how == "NONE":
            # Whoever has paused it may let it go on any time, between the switch and the records.
            how = "was paused by somebody else" if domain.state(name) == "paused" else "does not run any more"
            raise GuestNotFrozen(f"domain {name} on {os.uname().nodename} {how}: {otherwise}")
        for target in targets:
            block_jobs.wait_for_equal(name, target)
        # What was mirrored is in QEMU's memory still, and what it is mirrored from may go.
        block_jobs.write_out(name)
        point("mirrors equal")
        for target in targets:
            with freeze.held(origin or vm_dir, name, rested):
                block_jobs.pivot(name, target)
                point("guest has gone over")
                active_layer.settle(vm_dir, name)
