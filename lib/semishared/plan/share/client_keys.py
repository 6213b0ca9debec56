# SPDX-License-Identifier: Apache-2.0
"""Keys of shares whose guests are Ceph clients themselves (SEMISHARED_SHARE_ACCESS = client).

The attribute is the image's, else its datastore's.

    context      get a key for each such disk of the VM, for that share alone (share/ceph_clients.py); tell it
                 to the guest in its CONTEXT
    deploy       gives the guest none of them (plan/libvirt/filesystems.py); of all others it knows the root
                 they are in, of when, and whether the image is read-only
    delete       of the VM's directory: take its keys back, also where its host does not answer
    mv           from a host that is lost: the same, before it boots elsewhere (plan/vm/failover.py)

oned calls context before each boot, so the attributes of that moment hold; the key is the same each time.
oned also calls it when a running VM gets or loses a NIC, or its CONTEXT changes: that guest keeps the key of
its mount, whatever attributes say now. oned itself never gets the key: it is added to context.sh in the ISO
alone. The image's READONLY counts, as oned lets the VM's DISK override it.

A context that oned has given up runs on, beside the delete of its VM. So it prepares the VM's directory
before it asks for a key, and again after. If the VM was deleted meanwhile, the second time fails, and the key
that came too late for the delete is taken back. Each key is of a SEQ of the VM's history: an action of an
earlier SEQ leaves it alone (share/ceph_clients.py).
"""

from __future__ import annotations

import re
from typing import Optional

from ... import NAME
from ...errors import BadRecord, LateAction, MissingImage, SemisharedError, VmGone
from ...model.attributes import STORE
from ...model.exchange import AskOned, Lines, On, Part, Plan, Say, ask, warn
from ...model.share import share
from ...model.share import steps as share_steps
from ...model.steps import PrepareVm
from ...named import NamedTuple
from ...opennebula.args import VmPlace
from ...opennebula.states import LcmState
from ...opennebula.xml import Datastore, Disk, Image, Vm
from ..image import placement
from ..libvirt.filesystems import check_tag

WORD = re.compile(r"[A-Za-z0-9_./:,\[\]=+\-]+\Z")
"""Words that need no quotes and cannot end them."""
RUNS = (LcmState.RUNNING, LcmState.HOTPLUG, LcmState.HOTPLUG_NIC)
"""States in which the context of a running VM is made anew."""
SHUT_OUT = (
    "a mount of a directory below it stays good as long as its connections: `ceph tell mds.0 session "
    "ls` names it, `session evict` ends it"
)
"""The manager finds a client only by the root of its mount, and the MDS asks for no key again."""


class Clients(NamedTuple):
    """The shares of a VM that the guest mounts itself."""

    disks: tuple[int, ...] = ()
    lines: bytes = b""
    """Lines for context.sh; secret."""
    roots: tuple[tuple[int, str, int, bool], ...] = ()
    """Roots of the shares that the host gives (NoteClients)."""


def directories(vm: Vm) -> list[Disk]:
    """Return the disks of a VM that are directories of our datastores."""
    return [disk for disk in vm.disks if disk.driver == NAME and disk.is_directory and disk.image_id >= 0]


def handed(vm: Vm, place: VmPlace) -> Part[Clients]:
    """Have a key for each share that the guest of a VM mounts itself, for its boot at `place`."""
    mine, roots, lines, answers = [], [], list[str](), dict[int, Optional[share_steps.GivenKey]]()
    for disk in directories(vm):
        image = yield AskOned("image", disk.image_id)
        datastore = yield AskOned("datastore", image.store_id)
        marker, reads = STORE.text(datastore), image.is_readonly
        if placement.is_client(image, datastore):
            mine.append(
                (disk, check_tag(disk.id, disk.mount_tag), (image, datastore), reads or disk.is_readonly)
            )
        elif marker or reads:
            roots.append((disk.image_id, marker, image.number("REGTIME"), reads))
    if mine:
        yield On(place.host, (PrepareVm(place.vm, place.path),))
    for disk, tag, facts, reads_alone in mine:
        same = [(one, reads) for one, _, _, reads in mine if one.image_id == disk.image_id]
        if disk is same[0][0]:
            reads = all(reads for _, reads in same)
            answers[disk.image_id] = yield from _key(vm, *facts, reads)
        answer = answers[disk.image_id]
        if not answer:
            continue
        if reads_alone:
            # This disk's own mode: by another disk the guest may still write.
            answer = answer._replace(access="ro")
        lines += [
            f"SEMISHARED_SHARE_{disk.id}_{name}='{value}'\n" for name, value in (("TAG", tag), *told(answer))
        ]
    found = tuple(disk.id for disk, _, _, _ in mine if answers[disk.image_id])
    lines += [f"SEMISHARED_SHARES='{' '.join(map(str, found))}'\n"] if found else []
    return Clients(found, "".join(lines).encode(), tuple(roots))


def _key(vm: Vm, image: Image, datastore: Datastore, reads: bool) -> Part[Optional[share_steps.GivenKey]]:
    """Have the key of a VM for a share; None for a running VM without one."""
    where = (share.tree(datastore), image.id, image.source, vm.id)
    if vm.lcm_state not in RUNS:
        give = share_steps.GiveKey(*where, reads, vm.seq)
        return (yield from ask(share.bridge(datastore), give))
    try:
        return (yield from ask(share.bridge(datastore), share_steps.ShowKey(*where)))
    except MissingImage:
        return None


def told(answer: share_steps.GivenKey) -> list[tuple[str, str]]:
    """Return a share's variables; raise BadRecord."""
    return [(name.upper(), value) for name, value in checked(answer)._asdict().items()]


def checked(answer: share_steps.GivenKey) -> share_steps.GivenKey:
    """Return the answer of the machine that gives keys; raise BadRecord for a value that is no shell word."""
    for name, value in answer._asdict().items():
        if not WORD.match(value):
            raise BadRecord(
                f"what clients are to be told of a share has {name} in a form that no client takes"
            )
    return answer


def or_taken_back(vm: Vm, plan: Plan) -> Plan:
    """Carry out the plan of a context; if the VM goes meanwhile, take back the keys that it was given."""
    try:
        yield from plan
    except (VmGone, LateAction):
        yield from withdrawn(vm)
        raise


def withdrawn(vm: Vm) -> Plan:
    """Take back all keys of a VM; a Ceph that does not answer does not keep a VM from its end."""
    for store in sorted({disk.store_id for disk in directories(vm)}):
        try:
            datastore = yield AskOned("datastore", store)
            tree = share.tree(datastore)
            if tree.backend.has_manager:
                take = share_steps.TakeKeys(tree, -1, vm.id, vm.seq)
                answer = yield from ask(share.bridge(datastore), take)
                yield Say(_taken, (vm.id, store, answer))
        except SemisharedError as e:
            which = f"the keys of VM {vm.id} for shares of datastore {store}"
            yield warn(f"{which} may be good still: {e}. `semishared gc` takes those of VMs that are gone")


def _taken(vm: int, store: int, answer: share_steps.TakenKeys) -> Lines:
    if not answer.taken:
        return ()
    text = (
        f"VM {vm} has no key any more for shares of datastore {store}, and what it had mounted by one "
        f"is shut out; {SHUT_OUT}"
    )
    return [("info", text)]
