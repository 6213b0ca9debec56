# SPDX-License-Identifier: Apache-2.0
"""Marks (model/disk/marks.py) in the disks of a running guest.

libvirt goes by checkpoints, one for each bitmap, and with checkpoints it refuses much else. So it knows one
of ours only within a backup; the bitmaps stay in QEMU and in the layers, and libvirt carries them along when
it takes a snapshot, or commits, pulls or mirrors a layer.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Any, Callable, Collection, Dict, Iterator, List, Set

from ..errors import ToolFailed
from ..model.disk import marks as model
from ..tools.effects import point
from ..tools.run import QUICK_S
from . import domain, libvirtd
from .domain import quoted


def bitmaps(name: str) -> Dict[str, List[Dict[str, Any]]]:
    """Return the bitmaps of a guest's QEMU, by the file that has them: `name`, `count`, `inconsistent`."""
    found: Dict[str, List[Dict[str, Any]]] = {}
    for node in json.loads(domain.ask(name, "qemu-monitor-command", _nodes))["return"]:
        for bitmap in node.get("dirty-bitmaps", ()):
            if bitmap.get("name") and node.get("file"):
                found.setdefault(str(node["file"]), []).append(bitmap)
    return found


def _nodes(guest: Any) -> str:
    import libvirt_qemu

    command = '{"execute": "query-named-block-nodes", "arguments": {"flat": true}}'
    return str(libvirt_qemu.qemuMonitorCommand(guest, command, 0))


def checkpoint(name: str, targets: Collection[str], others: Collection[str]) -> str:
    """Return libvirt's XML of a checkpoint of the disks `targets`, and not of the `others`."""
    disks = [f"<disk name='{quoted(target)}' checkpoint='bitmap'/>" for target in targets]
    disks += [f"<disk name='{quoted(target)}' checkpoint='no'/>" for target in others]
    # libvirt wants a time of those that it does not know yet, and goes by none.
    about = f"<name>{name}</name><creationTime>1</creationTime>"
    return f"<domaincheckpoint>{about}<disks>{''.join(disks)}</disks></domaincheckpoint>"


def forget(name: str) -> None:
    """Have libvirt know no checkpoint of ours; the bitmaps stay."""
    libvirt = libvirtd.binding()

    def do(guest: Any) -> None:
        for known in guest.listAllCheckpoints():
            if model.is_name(known.getName()):
                known.delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)

    domain.ask(name, "checkpoint-delete --metadata", do, timeout_s=QUICK_S)


def define(name: str, mark: str, targets: Collection[str]) -> Set[str]:
    """Have libvirt know a mark in those of the disks `targets` where it is valid; return them."""
    valid = set(targets)
    if not _defined(name, mark, valid):
        valid = {target for target in targets if _defined(name, mark, {target}, only_asks=True)}
        if valid and not _defined(name, mark, valid):
            return set()
    return valid


def _defined(name: str, mark: str, targets: Set[str], *, only_asks: bool = False) -> bool:
    """Tell whether libvirt finds a mark whole in all of these disks; with it known then, or not."""
    if not targets:
        return True
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE
    flags |= libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE_VALIDATE
    xml = checkpoint(mark, sorted(targets), set(domain.disks(name)) - targets)
    try:
        domain.ask(name, "checkpoint-create --redefine-validate", _create(xml, flags), timeout_s=QUICK_S)
    except ToolFailed:
        return False
    if only_asks:
        forget(name)
    return True


def _create(xml: str, flags: int) -> Callable[[Any], None]:
    def do(guest: Any) -> None:
        guest.checkpointCreateXML(xml, flags)

    return do


def drop(name: str, keep: Collection[str] = (), *, foreign: bool = False) -> None:
    """Remove all marks from a guest's disks but those to `keep`; all other bitmaps too if `foreign`.

    libvirt opens the layers below for that, and removes a bitmap from each.
    """
    opened = {target: {path, *domain.below(name, target)} for target, path in domain.disks(name).items()}
    forget(name)
    found = {path: {bitmap["name"] for bitmap in rows} for path, rows in bitmaps(name).items()}
    names = {one for known in found.values() for one in known}
    for one in sorted(names - set(keep)):
        if not (foreign or model.is_name(one)) or not one.isprintable():
            continue
        libvirt = libvirtd.binding()
        targets = [
            target for target, paths in opened.items() if any(one in found.get(path, ()) for path in paths)
        ]
        xml = checkpoint(quoted(one), targets, set(opened) - set(targets))
        flags = libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE
        domain.ask(name, "checkpoint-create --redefine", _create(xml, flags), timeout_s=QUICK_S)
        domain.ask(name, "checkpoint-delete", _delete(one), timeout_s=QUICK_S)
        point("mark dropped")


def _delete(checkpoint_name: str) -> Callable[[Any], None]:
    def do(guest: Any) -> None:
        guest.checkpointLookupByName(checkpoint_name).delete(0)

    return do


@contextmanager
def known(name: str) -> Iterator[None]:
    """Have libvirt forget, at the end of the block, the checkpoints that were made in it."""
    try:
        yield
    finally:
        forget(name)
