# SPDX-License-Identifier: Apache-2.0
"""Parts of plans for which a running guest is frozen or suspended, and their log lines."""

from __future__ import annotations

from typing import Any

from ...model import steps as s
from ...model.exchange import Lines, On, Plan, Say, While
from ...named import NamedTuple


class Guest(NamedTuple):
    """The guest that uses a disk."""

    domain: str = ""
    """libvirt's name of the guest, '' if none runs."""
    freeze: str = "NONE"
    """How it rests for a moment (guest/freeze.py)."""


def meanwhile(host: str, disk: s.DiskRef, guest: Guest, then: On) -> Plan:
    """Have `then` done while a guest rests; its host wakes the guest also if that fails, or if we die."""
    if guest.freeze == "NONE":
        yield then
        return
    rest = s.RestGuest(disk.vm, disk.vm_dir, guest.domain, guest.freeze)
    rested, _ = yield While(On(host, (rest,)), then)
    yield Say(lines, tuple(rested))


def lines(*answers: Any) -> Lines:
    """Say how a guest rested for a copy or snapshot of its disk; other answers have nothing about it."""
    for found in answers:
        how, why = found if isinstance(found, s.Rested) else ("", "")
        if how == "AGENT":
            yield "info", "the guest's agent froze its file systems for the moment that was kept"
        elif how == "SUSPEND":
            yield "info", f"the guest was suspended for the moment that was kept{f' ({why})' if why else ''}"
        elif how == "NONE" and why:
            yield (
                "warn",
                f"the guest could neither be frozen nor suspended ({why}): what was kept is what "
                f"a power cut leaves",
            )
