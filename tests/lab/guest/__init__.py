# SPDX-License-Identifier: Apache-2.0
"""Real guests, bootable images with a verifier inside, and the client that talks to it over the serial
console.

Of two kinds: METAL has no operating system, for tests whose guest only writes and reads blocks; LINUX where a
kernel, its file systems or its other drivers are the point. METAL boots in a thirtieth of the time.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Callable, NamedTuple

from lab.guest import linux, metal
from lab.guest.client import Guest, GuestError, content, serial_path, serial_xml

BOOT = "/var/lib/libvirt/boot"
"""Where hosts have what guests boot from without their disks."""


class System(NamedTuple):
    """What runs in a guest."""

    os: dict[str, str]
    """What of a VM template's OS boots it from files below BOOT."""
    files: Callable[[], dict[str, Path]]
    image: Callable[[], Path]


METAL = System({"KERNEL": f"{BOOT}/metal"}, metal.boot_files, metal.disk_image)
LINUX = System(
    {"KERNEL": f"{BOOT}/vmlinux", "INITRD": f"{BOOT}/initrd", "KERNEL_CMD": linux.COMMAND_LINE},
    linux.boot_files,
    linux.disk_image,
)


def lay_out_boot(folder: Path, system: System = METAL) -> None:
    """Put into a host's BOOT, seen from outside, what guests boot from without their disks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in system.files().items():
        subprocess.run(["cp", "--reflink=auto", str(source), str(folder / name)], check=True)


def write_guest_image(dest: Path, system: System = METAL) -> Path:
    """Write a disk image that boots through the BIOS to `dest`."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(system.image()), str(dest)], check=True)
    return dest


__all__ = [
    "BOOT",
    "Guest",
    "GuestError",
    "LINUX",
    "METAL",
    "System",
    "content",
    "lay_out_boot",
    "serial_path",
    "serial_xml",
    "write_guest_image",
]
