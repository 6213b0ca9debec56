# SPDX-License-Identifier: Apache-2.0
"""Shares whose guests are clients of Ceph themselves (SEMISHARED_SHARE_ACCESS = client of the image, else of its datastore).

    context      have a key for each such disk of the VM, for that share alone (share/ceph_clients.py); tell it to the guest in its CONTEXT
    deploy       gives the guest none of them (plan/filesystems.py)
    delete       of the VM's directory: take its keys back

oned calls context before each boot, so what attributes say by then holds; the key is the same each time. oned itself never has it: it is
added to context.sh in the ISO alone.
"""

from __future__ import annotations

import re

from .. import NAME
from ..errors import BadRecord, SemisharedError
from ..model import shares
from ..model import steps_share as s
from ..model.exchange import AskOned, On, Part, Plan, warn
from ..named import NamedTuple
from ..opennebula.xml import Disk, Vm
from . import placement
from .filesystems import check_tag

TOLD = ("monitors", "fs", "path", "user", "key", "access")
WORD = re.compile(r"[A-Za-z0-9_./:,\[\]=+\-]+\Z")
"""What needs no quotes, nor can end them."""


class Clients(NamedTuple):
    """The shares of a VM that are its guest's own affair."""

    disks: tuple[int, ...] = ()
    lines: bytes = b""
    """For context.sh; secret."""


def directories(vm: Vm) -> list[Disk]:
    """Return the disks of a VM that are directories of our datastores."""
    return [disk for disk in vm.disks if disk.driver == NAME and placement.is_directory(disk) and disk.image_id >= 0]


def handed(vm: Vm) -> Part[Clients]:
    """Have keys for the shares of a VM whose client its guest is."""
    found, lines = [], []
    for disk in directories(vm):
        image = yield AskOned("image", disk.image_id)
        datastore = yield AskOned("datastore", disk.store_id)
        if not placement.is_client(image, datastore):
            continue
        tag = check_tag(disk.id, disk.text("MOUNT_TAG"))
        step = s.GiveKey(shares.tree(datastore), image.id, vm.id, disk.is_readonly)
        (answer,) = yield On(shares.bridge(datastore), (step,))
        found.append(disk.id)
        lines += [f"SEMISHARED_SHARE_{disk.id}_{name}='{value}'\n" for name, value in (("TAG", tag), *told(answer))]
    lines += [f"SEMISHARED_SHARES='{' '.join(map(str, found))}'\n"] if found else []
    return Clients(tuple(found), "".join(lines).encode())


def told(answer: dict[str, str]) -> list[tuple[str, str]]:
    """Return the variables of a share, by what the machine that gives keys has answered; raise BadRecord for what is no word of a shell."""
    for name in TOLD:
        if not WORD.match(answer[name]):
            raise BadRecord(f"what clients are to be told of a share has {name} in a form that no client takes")
    return [(name.upper(), answer[name]) for name in TOLD]


def withdrawn(vm: int, stores: tuple[int, ...]) -> Plan:
    """Take back the keys of a VM that is gone, for shares of some datastores: a Ceph that does not answer keeps no VM from its end."""
    for store in stores:
        try:
            datastore = yield AskOned("datastore", store)
            tree = shares.tree(datastore)
            if tree.fs == "cephfs":
                yield On(shares.bridge(datastore), (s.TakeKeys(tree, -1, vm),))
        except SemisharedError as e:
            yield warn(f"the keys of VM {vm} for shares of datastore {store} may be good still, until `semishared gc` takes them: {e}")
