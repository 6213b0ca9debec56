# SPDX-License-Identifier: Apache-2.0
"""Rows of `semishared status` for each share: how full it is, and which VMs have it."""

from __future__ import annotations

from typing import Callable, Iterable, Mapping

from ..config import Config
from ..errors import SemisharedError
from ..opennebula.xml import Datastore, Host, Image, Vm
from . import gc_kinds
from .share import Row, number_columns, share_state, state_column


def rows(
    datastores: Iterable[Datastore],
    images: Mapping[int, Image],
    vms: Iterable[Vm],
    config: Config,
    failed: Callable[[str, SemisharedError], None],
) -> list[Row]:
    """Return all shares."""
    having: dict[int, list[Row]] = {}
    for vm in vms:
        for disk in vm.disks:
            if disk.is_directory:
                image = images.get(disk.image_id)
                readonly = disk.is_readonly or image is not None and image.is_readonly
                having.setdefault(disk.image_id, []).append(
                    {
                        "vm": vm.id,
                        "name": vm.text("NAME"),
                        "disk": disk.id,
                        "tag": disk.mount_tag,
                        "host": vm.host,
                        "readonly": readonly,
                    }
                )
    found = []
    for store in gc_kinds.shares_listed(datastores, config, failed):
        for row in store.rows:
            image = images.get(row["image"])
            found.append(
                {
                    **row,
                    "datastore": store.store,
                    "name": image.name if image else None,
                    "vms": having.get(row["image"], []),
                    "state": share_state(row, image, store.store),
                }
            )
    return found


def is_wanted(row: Row, kind: str, thing: Vm | Host | Image | None) -> bool:
    """Tell whether a share belongs to the VM, host or image that was asked for, `kind` says which; None: to
    all.
    """
    if thing is None:
        return True
    if kind == "image":
        return bool(row["image"] == thing.id)
    return any(vm["vm"] == thing.id if kind == "vm" else vm["host"] == thing.name for vm in row["vms"])


def lines(found: Iterable[Row]) -> list[list[str]]:
    """Return them as a table."""
    table = [["SHARE", "DATASTORE", "OWNER", "SIZE", "USED", "SNAPSHOTS", "VMS", "STATE"]]
    for row in found:
        vms = ", ".join(map(_vm, row["vms"]))
        name = f"{row['image']} {row['name'] or '-'}"
        table.append([name, str(row["datastore"]), *number_columns(row), vms or "-", state_column(row)])
    return table


def _vm(vm: Row) -> str:
    return (
        f"{vm['vm']} {vm['name']}"
        + (f" on {vm['host']}" if vm["host"] else "")
        + (", read-only" if vm["readonly"] else "")
    )
