# SPDX-License-Identifier: Apache-2.0
"""Bring what local disks of persistent images hold (SEMISHARED_PLACE = local) to their images, also while the
VM runs.

  commit VM            all such disks of a VM (id or name), and what was kept when it was deleted
  commit VM DISK       one of them

Only what was written since the last commit goes. An image that is not what the disk lies over any more is
left alone, and so is the disk. --as-new-image NAME does not touch the image: it says, or prepares, how the
disk becomes another one.

exit codes: 0 committed, or there was nothing to commit; 1 a disk was refused, with its line; 2 there is no
such VM or disk, or a machine or oned could not be asked
"""

from __future__ import annotations

import argparse
import os
import shlex
from typing import Iterator, Optional

from .. import NAME
from ..errors import BadArguments, BadRecord, SemisharedError
from ..front import front_ends, publication
from ..front.action import Action, carry_out
from ..model import steps as s
from ..model.base.steps import KeptDisk
from ..model.disk import commit_steps as c
from ..model.disk import names as disk_names
from ..model.disk import record
from ..model.exchange import On, Part, ask
from ..model.store import access as store_access
from ..named import NamedTuple
from ..opennebula.args import DiskPlace, VmPlace, absolute
from ..opennebula.oned import Oned
from ..opennebula.report import Report
from ..opennebula.states import VmState
from ..opennebula.xml import Vm
from ..plan.care import gc_places
from ..plan.disk import commits, disks
from ..plan.image import disk_image
from ..plan.store import rbd
from ..plan.vm import at_rest
from ..tools.this_machine import are_one, is_here
from ..units import human, mib_ceil
from . import command as on
from .command import Row, argument, flag, put, warn

ARGUMENTS = (
    argument("vm", metavar="VM", help="id or name"),
    argument("disk", metavar="DISK", nargs="?", type=int, help="its number (DISK_ID); without it all"),
    argument(
        "--as-new-image",
        metavar="IMAGE",
        help="leave the image alone: how to make another one, of this name, of the disk",
    ),
    on.rate_limit("bytes per second to the store at most, e.g. 40M (default: no limit)"),
    flag("--dry-run", "say which disks would be committed, and do nothing"),
    on.JSON_FOR_LINES,
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared commit`."""
    on.refuse_root()
    most = limit(arguments)
    oned = on.administrator()
    vm = _vm(oned, arguments.vm)
    action = committing(vm)
    here = of_vm(oned, vm, action, arguments.disk, arguments.as_new_image, most)
    silent: list[Row] = []
    work = [Work(disk, "", part) for disk, part in here]
    work += _kept(oned, vm, arguments, action, silent, has_own=bool(work))
    if not work and not silent and arguments.disk is not None:
        _refuse_unknown(vm, arguments.disk)
    if not work and not arguments.json:
        which = f"disk {arguments.disk} of " if arguments.disk is not None else ""
        put(f"{which}VM {vm.id}: nothing is local and of a persistent image, and nothing was kept")
    rows = [_carried_out(vm, one, action, arguments) for one in work]
    failed = next((row for row in reversed(rows) if row["how"] == "failed"), None)
    if work and not arguments.as_new_image and not arguments.dry_run:
        error = f"commit: {failed['id']} {failed['why']}" if failed else ""
        publication.after(oned, action.config, {vm.id: error})
    if arguments.json:
        on.put_json({"vm": vm.id, "dry_run": arguments.dry_run, "rows": rows, "errors": silent})
    return 1 if failed else 2 if silent else 0


class Work(NamedTuple):
    """What is to be done with a disk, or with what was kept of it."""

    disk: int
    kept: str
    """`kept in DIRECTORY on HOST` of a diff whose VM was deleted, else ''."""
    part: Part[str]


def _carried_out(vm: Vm, work: Work, action: Action, arguments: argparse.Namespace) -> Row:
    """Do the work on a disk, print what has become of it, and return its row."""
    row: Row = {"vm": vm.id, "disk": work.disk, "kept": work.kept, "how": "", "why": "", "id": "", "said": ""}
    what = f"VM {vm.id} disk {work.disk}{work.kept and f' {work.kept}'}"
    if arguments.dry_run:
        does = f"another image {arguments.as_new_image} would be made" if arguments.as_new_image else ""
        row.update(how="would commit", said=does or "would be committed")
    else:
        try:
            said = carry_out(work.part, action)
            row.update(how="told" if arguments.as_new_image else "committed", said=said)
        except SemisharedError as e:
            row.update(how="failed", id=e.id, why=e.detail)
            warn(f"{what}: {e.line()}")
    if row["how"] != "failed" and not arguments.json:
        put(f"{what}: {row['said']}", flush=True)
    return row


def _refuse_unknown(vm: Vm, disk: int) -> None:
    """Raise BadArguments for a number that no disk of the VM has."""
    numbers = [one.id for one in vm.disks]
    if disk not in numbers:
        has = f"its disks: {', '.join(map(str, numbers))}" if numbers else "it has none"
        raise BadArguments(f"no disk {disk} of VM {vm.id} in OpenNebula ({has}), and none was kept")


def limit(arguments: argparse.Namespace) -> int:
    """Return the most bytes per second to the store, 0 for no limit; raise BadArguments."""
    most = on.rate(arguments.rate)
    if most and arguments.as_new_image:
        raise BadArguments("--rate is for what goes to the image, which --as-new-image leaves alone")
    return most


def committing(vm: Vm) -> Action:
    """Return the action that commits disks of a VM."""
    action = Action("commit", [], Report("commit"))
    action.vm, action.seq, action.bulk = vm.id, vm.seq, True
    return action


def _vm(oned: Oned, word: str) -> Vm:
    """Return the VM of this id or name, a DONE one by its id; raise BadArguments, OnedUnavailable."""
    if word.isdigit() and word.isascii():
        return on.known(oned.vm, int(word), "VM")
    found = [vm.id for vm in oned.vms() if vm.name == word]
    if len(found) != 1:
        which = "more than one VM" if found else "no VM"
        raise BadArguments(f"{which} {word!r} in OpenNebula: its id says which")
    return oned.vm(found[0])


def of_vm(
    oned: Oned, vm: Vm, action: Action, disk: Optional[int] = None, as_new_image: str = "", most: int = 0
) -> Iterator[tuple[int, Part[str]]]:
    """Yield the work for each disk (or one) of a VM in OpenNebula, by number; its part returns the result.

    `most`: bytes per second to the store, 0 for no limit. Raise BadArguments for a VM in an unfit state.
    """
    if vm.state == VmState.DONE:
        return
    machine, vm_dir, found = _found(oned, vm, action)
    failed = bool(gc_places.after_failure(vm, os.uname().nodename, is_here))
    # Its host says in the disk's turn whether the guest runs. A VM at rest is where no domains are.
    domain = "" if vm.is_on_front_end else disks.running_domain(vm)
    for known in record.described(found):
        if known.place.commits and disk in (None, known.disk):
            at = DiskPlace(VmPlace(machine, vm_dir, vm.id), disk_names.disk_name(known.disk), known.disk)
            if as_new_image and failed:
                # OpenNebula saves no disk of such a VM, and ends it only if its disk is committed or goes
                # too.
                whole = s.DiskRef(vm.id, known.disk, vm_dir)
                yield known.disk, _rescued(machine, vm, whole, known, vm.disk(known.disk).size, as_new_image)
            elif as_new_image:
                words = ["onevm", "disk-saveas", str(vm.id), str(known.disk), as_new_image]
                yield known.disk, _told(shlex.join(words))
            else:
                yield known.disk, _committed(at, vm, domain, action.config.freeze, most)


def _found(oned: Oned, vm: Vm, action: Action) -> tuple[str, str, s.DescribedVm]:
    """Return the machine, directory and description of a VM's files; raise BadArguments if unknown."""
    front_end = os.uname().nodename
    settled = gc_places.place_of(vm, front_end, is_here)
    failed = gc_places.after_failure(vm, front_end, is_here)
    if settled is None and not failed:
        when = "commit when it is in RUNNING, POWEROFF or UNDEPLOYED"
        raise BadArguments(f"VM {vm.id} has no host, or OpenNebula is at work on it: {when}")
    places, there = [settled] if settled else failed, []
    for place in places:
        machine = "localhost" if is_here(place.machine) else place.machine
        vm_dir = f"{absolute(oned.datastore(place.system).base_path, 'BASE_PATH')}/{vm.id}"
        there.append((machine, vm_dir, carry_out(ask(machine, s.DescribeVm(vm.id, vm_dir)), action)))
    if settled:
        machine, vm_dir, here = there[0]
        if vm.is_on_front_end and not here.present:
            rests = carry_out(at_rest.elsewhere(VmPlace(machine, vm_dir, vm.id), vm), action)
            if rests.machine:
                found = carry_out(ask(rests.machine, s.DescribeVm(vm.id, vm_dir)), action)
                return rests.machine, vm_dir, found
            rests.refuse(vm.id, "is not on this front-end")
        return there[0]
    have = [found for found in there if found[2].present]
    if len(have) != 1:
        which = " and ".join(f"{machine} ({vm_dir})" for machine, vm_dir, _ in have) or "no machine"
        raise BadArguments(f"{which} has the files of VM {vm.id}: onevm recover {vm.id} first")
    return have[0]


def _told(command: str) -> Part[str]:
    yield from ()
    return f"run `{command}`"


def _committed(place: DiskPlace, vm: Vm, domain: str, freeze: str, most: int) -> Part[str]:
    done = yield from commits.commit(place, vm, domain, freeze, most)
    return f"{human(done)} committed" if done else "nothing new to commit"


def _kept(
    oned: Oned, vm: Vm, arguments: argparse.Namespace, action: Action, silent: list[Row], has_own: bool
) -> Iterator[Work]:
    """Yield the work for a VM's kept disks; add machines that cannot be asked to `silent`."""
    systems = [store for store in oned.datastores() if store.is_system and store.driver == NAME]
    others = {host.name for host in oned.hosts() if not host.is_offline and not is_here(host.name)}
    # A VM that was at rest left its disk on the front-end that led then.
    led = {name for name in front_ends.others(oned) if not any(are_one(name, host) for host in others)}
    numbers = tuple(sorted(store.id for store in systems))

    for location in sorted(set(map(on.location, systems))):
        for machine in sorted({*others, *led, "localhost"}):
            try:
                found = carry_out(ask(machine, c.FindKept(vm.id, location, numbers)), action).kept
            except SemisharedError as e:
                warn(f"{machine}: what it may have kept is not known: {e.line()}")
                # A lost front-end may be why this one leads: what the VM has now is what was asked for.
                if not (has_own and machine in led):
                    silent.append({"host": machine, "error": e.line()})
                continue
            for item in found:
                if arguments.disk not in (None, item.disk):
                    continue
                disk, new = s.DiskRef(vm.id, item.disk, item.path), arguments.as_new_image
                kept = f"kept in {disk.vm_dir} on {machine}"
                if new:
                    yield Work(disk.disk, kept, _new(machine, vm, disk, item, new))
                else:
                    yield Work(disk.disk, kept, _finished(machine, vm, disk, item, limit(arguments)))


def _image(machine: str, vm: Vm, disk: s.DiskRef, item: KeptDisk) -> Part[s.ImageRef]:
    """Return the image of a kept disk, by oned; raise BadRecord if the record does not name one."""
    if not item.image:
        what = f"what disk {disk.disk} of VM {disk.vm} was made from"
        raise BadRecord(f"{what} cannot be understood: {disk.vm_dir} on {machine}")
    return (yield from disk_image.confirmed(vm, disk.disk, item.image))


def _finished(machine: str, vm: Vm, disk: s.DiskRef, item: KeptDisk, most: int) -> Part[str]:
    image = yield from _image(machine, vm, disk, item)
    done = yield from commits.kept(machine, disk, image.id, most)
    return f"{human(done)} committed, and gone"


def _new(machine: str, vm: Vm, disk: s.DiskRef, item: KeptDisk, name: str) -> Part[str]:
    """Make another image of a kept disk, which may then go."""
    command = yield from _saved(machine, vm, disk, item, name)
    return f"run `{command}`, then `{shlex.join([NAME, 'gc', '--discard', os.path.basename(disk.vm_dir)])}`"


def _rescued(machine: str, vm: Vm, disk: s.DiskRef, known: record.Record, size: int, name: str) -> Part[str]:
    """Make another image of a disk whose own image refuses the commit, so that its VM cannot end."""
    kept = KeptDisk(disk.vm_dir, vm.id, disk.disk, known.of_image.to_data(), 0, size)
    command = yield from _saved(machine, vm, disk, kept, name)
    then = f"`{NAME} gc` names what was kept of it then, which --discard removes"
    return f"run `{command}`, then `onevm recover --delete {disk.vm}`; {then}"


def _saved(machine: str, vm: Vm, disk: s.DiskRef, item: KeptDisk, name: str) -> Part[str]:
    """Make a file or image of a disk beside the images; return OpenNebula's command to register it."""
    image, random = (yield from _image(machine, vm, disk, item)), os.urandom(16).hex()
    if store_access.is_path(image.source):
        path = store_access.new_source(image.access, image.root, image.id, random)
        yield On(machine, (s.SaveDisk(disk, path, image.format, ""),))
    else:
        bridge = yield from rbd.bridge_of(image)
        access = image.access.by_bridge() if are_one(machine, bridge) else image.access
        local = rbd.Local(machine, disk, item.size, access)
        path = yield from rbd.fill_beside(local, image, bridge, random)
    words = ["--datastore", str(image.store), "--name", name, "--source", path, "--format", image.format]
    return shlex.join(["oneimage", "create", *words, "--size", str(mib_ceil(item.size)), "--persistent"])
