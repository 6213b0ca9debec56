# SPDX-License-Identifier: Apache-2.0
"""A guest that stands still since a disk of it has failed, as its error policy has it: libvirt's `paused (I/O
error)`.

libvirt says so of nobody whom an operator or OpenNebula has paused, also after it was started again; QEMU
remembers which disk it was.
"""

from __future__ import annotations

from typing import Any, Dict

from . import domain, libvirtd


def is_waiting(name: str) -> bool:
    """Tell whether a guest stands still since a disk has failed."""
    return domain.ask(name, "domstate --reason", stands_still)


def stands_still(guest: Any) -> bool:
    """Tell it of libvirt's domain, within a call."""
    libvirt = libvirtd.binding()
    return tuple(guest.state()) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)


def failed(name: str) -> Dict[str, bool]:
    """Return the disks of a guest that stands still which have failed, by their targets, and whether for want
    of room; else nothing.
    """
    return domain.ask(name, "domblkerror", _failed)


def _failed(guest: Any) -> Dict[str, bool]:
    if not stands_still(guest):
        return {}
    full = libvirtd.binding().VIR_DOMAIN_DISK_ERROR_NO_SPACE
    return {target: error == full for target, error in guest.diskErrors(0).items()}


def go_on(name: str) -> None:
    """Let a guest run that stands still since a disk has failed: it writes that again. Nothing is done to one
    that is paused otherwise.
    """
    domain.ask(name, "resume", lambda guest: guest.resume() if stands_still(guest) else None)
