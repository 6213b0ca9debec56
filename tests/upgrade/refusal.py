# SPDX-License-Identifier: Apache-2.0
"""Every transfer action as oned would call it, for machines that have different versions: each must be
refused in one line.
"""

from __future__ import annotations

import base64
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

from lab.cloud import DATASTORES, SYSTEM
from upgrade.world import Old

DONE = "(done)"
TM = "/var/lib/one/remotes/tm/semishared"


class Call(NamedTuple):
    """A call of a transfer action: its words, and whether oned gives it the VM on stdin."""

    action: str
    words: Tuple[str, ...]
    vm: int


def calls(old: Old, host: str, running: str, off: str, places: Sequence[str]) -> Iterator[Call]:
    """Yield calls of all actions that have something to do on `host`, which has these two VMs, for a disk of
    each place.
    """
    oned = old.cloud.oned
    for name in (running, off):
        vm = old.vms[name]
        tail, place = (str(vm), str(SYSTEM)), f"{host}:{old.cloud.vm_dir(vm)}"
        is_off = name == off
        for disk in {
            disk.place: disk for disk in old.disks(name) if disk.place in (*places, "volatile")
        }.values():
            path = f"{place}/disk.{disk.id}"
            if disk.image < 0:
                yield Call("mkimage", ("16", disk.format, path, *tail), vm)
                continue
            store = (str(vm), str(old.store))
            source = oned.image(disk.image).source
            yield Call("ln" if disk.place == "in-place" else "clone", (f"fe:{source}", path, *store), vm)
            yield Call("cpds", (path, f"{source}-saved", "-1", *store), vm)
            yield (
                Call("mvds", (path, source, *store), vm)
                if disk.place == "in-place"
                else Call("delete", (path, *store), vm)
            )
            yield Call("snap_create" if is_off else "snap_create_live", (path, "7", *store), vm)
            yield Call("snap_delete", (path, "0", *store), vm)
            if is_off:
                yield Call("snap_revert", (path, "0", *store), vm)
                yield Call("resize", (path, "64", *store), vm)
        yield Call("mkswap", ("16", f"{place}/disk.30", *tail), vm)
        yield Call("context", (f"/var/lib/one/vms/{vm}/context.sh", f"{place}/disk.31", *tail), vm)
        yield Call("delete", (place, *tail), vm)
        disks = ":".join(str(disk.id) for disk in old.disks(name))
        live = "" if is_off else "_live"
        yield Call(f"prebackup{live}", (place, disks, f"one-{vm}", "-", *tail), vm)
        yield Call(f"postbackup{live}", (place, disks, f"one-{vm}", "-", *tail), vm)


def moves(old: Old, here: str, there: str, live: str, off: str) -> Iterator[Call]:
    """Yield calls of the actions between two hosts, `here` has these two VMs; and between a host and the
    front-end.
    """
    vm = old.vms[off]
    directory, tail = old.cloud.vm_dir(vm), (str(vm), str(SYSTEM))
    for other in (there, "fe"):
        yield Call("mv", (f"{here}:{directory}", f"{other}:{directory}", *tail), vm)
    yield Call("mv", (f"{here}:{directory}", f"{here}:{DATASTORES}/102/{vm}", str(vm), "102"), vm)
    vm = old.vms[live]
    for action in ("premigrate", "failmigrate", "postmigrate"):
        yield Call(action, (here, there, old.cloud.vm_dir(vm), str(vm), str(SYSTEM)), vm)


def refusal(old: Old, call: Call) -> str:
    """Make a call and return the one line that oned would show; what else went wrong is returned as a
    complaint.
    """
    xml = old.cloud.oned.vm(call.vm).to_xml().encode()
    stdin = base64.b64encode(xml) if call.action.endswith("migrate") else xml
    done = old.cloud.lab.fe.run([f"{TM}/{call.action}", *call.words], input=stdin, check=False, timeout=120)
    lines = [
        line
        for line in done.stderr.decode().splitlines()
        if not line.startswith(("INFO:", "WARN:", "DEBUG:"))
    ]
    if not done.returncode and not done.stdout and not lines:
        return DONE
    if done.returncode != 1 or len(lines) != 1 or done.stdout:
        return f"exit code {done.returncode}, stdout {done.stdout!r}, stderr {done.stderr.decode()!r}"
    return lines[0]


def differences(before: Dict[str, object], after: Dict[str, object]) -> List[str]:
    """Return what is not as it was."""
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
