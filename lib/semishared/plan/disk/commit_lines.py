# SPDX-License-Identifier: Apache-2.0
"""What a VM's log says of disks whose writing belongs into an image (plan/disk/commits.py)."""

from __future__ import annotations

from typing import Any

from ...model.exchange import Lines
from ...model.refs import Owner
from ...units import human


def made(vm: int, disk: int, *answers: Any) -> Lines:
    """Say whose writing the image does not wait for any more, now that a disk has claimed it; the last of
    `answers` tells.
    """
    found = answers[-1] or {}
    before = Owner.from_data(found.get("before"))
    if before and (before.vm, before.disk) != (vm, disk):
        yield (
            "warn",
            (
                f"the image waited for disk {before.disk} of VM {before.vm} on {before.host}: "
                f"what that has not committed can only become "
                f"another image now (semishared commit {before.vm} {before.disk} --as-new-image NAME)"
            ),
        )
    yield from _kept(vm, found)


def left_behind(vm: int, disk: int, data: Any) -> Lines:
    """Say what an image waited for before its VM was made anew."""
    before = Owner.from_data(data)
    if before:
        yield (
            "warn",
            (
                f"the image waited for this disk as it was before the VM was made anew, on "
                f"{before.host}: what that has not committed can only "
                f"become another image now (semishared commit {vm} {disk} --as-new-image NAME; if "
                f"that host was away, after semishared gc)"
            ),
        )


def finished(vm: int, *answers: Any) -> Lines:
    """Say what was committed of disks that were taken away, and what was kept."""
    for answer in answers:
        if answer and answer.get("bytes"):
            yield "info", f"{human(answer['bytes'])} were committed to the image"
        yield from _kept(vm, answer)


def renewed(*answers: Any) -> Lines:
    """Say what was committed of a VM before it was moved, and what goes with it as it is."""
    for disk in (disk for answer in answers for disk in (answer or {}).get("disks", ())):
        if disk["bytes"]:
            yield "info", f"{human(disk['bytes'])} of disk {disk['disk']} were committed to the image"
    # Who was asked twice has been refused twice.
    for disk in (answers[-1] or {}).get("disks", ()) if answers else ():
        if disk.get("why"):
            how = "was not committed to its image, and goes" if disk["waiting"] else "goes"
            base = ", its base with it" if disk["with_base"] else ""
            yield "warn", f"disk {disk['disk']} {how} with the VM as it is{base}: {disk['why']}"


def _kept(vm: int, answer: Any) -> Lines:
    found = (answer or {}).get("kept") or []
    for place in [found] if isinstance(found, str) else found:
        yield (
            "warn",
            f"what was not committed is kept in {place}: semishared commit {vm} brings it to its image",
        )
