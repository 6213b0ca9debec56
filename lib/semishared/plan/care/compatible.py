# SPDX-License-Identifier: Apache-2.0
"""Which system datastores a VM is sent to, by the image datastores of its disks.

oned writes the system datastores that a VM may use into AUTOMATIC_DS_REQUIREMENTS: the clusters of its image
datastores, and the ids that all of these name in COMPATIBLE_SYS_DS (VirtualMachine.cc). TM_MAD is not among
them. A scheduler that goes by that alone sends a VM to a system datastore where oned refuses to deploy it
(check_tm_mad in VirtualMachineDisk.cc), and does so again in each round.
"""

from __future__ import annotations

import re
from typing import Iterable, Sequence

from ... import NAME
from ...model.attributes import COMPATIBLE
from ...model.store import template
from ...named import NamedTuple
from ...opennebula.states import DatastoreType
from ...opennebula.xml import Datastore


class Change(NamedTuple):
    """The value that an image datastore is to have in COMPATIBLE_SYS_DS."""

    store: Datastore
    systems: tuple[int, ...]

    @property
    def value(self) -> str:
        return ",".join(map(str, self.systems))


def images(datastores: Iterable[Datastore]) -> list[Datastore]:
    """Return the datastores of images that become disks in a system datastore: no files, backups, shares."""
    return [
        store
        for store in datastores
        if store.type == DatastoreType.IMAGE_DS and not template.is_shares(store)
    ]


def named(store: Datastore) -> frozenset[int]:
    """Return the ids in COMPATIBLE_SYS_DS, as oned reads them: what is no number is passed over."""
    words = (re.match(r"\s*([+-]?[0-9]+)", word) for word in COMPATIBLE.text(store).split(","))
    return frozenset(int(word.group(1)) for word in words if word)


def takes(system: Datastore, store: Datastore) -> bool:
    """Tell whether oned deploys a disk of `store` in `system`: it has the driver, or targets for it."""
    driver = system.driver.strip().upper()
    if driver == store.driver.strip().upper():
        return True
    return all(store.attribute(f"{name}_{driver}") for name in ("CLONE_TARGET", "LN_TARGET", "DISK_TYPE"))


def is_near(system: Datastore, store: Datastore) -> bool:
    """Tell whether both are in one cluster; oned refuses VMs of a datastore that is in none."""
    return not {*system.clusters}.isdisjoint(store.clusters)


def is_sent(store: Datastore, system: Datastore) -> bool:
    """Tell whether the scheduler may send a VM with images of `store` to `system`."""
    names = named(store)
    return system.is_enabled and is_near(system, store) and (not names or system.id in names)


def astray(store: Datastore, datastores: Sequence[Datastore]) -> list[Datastore]:
    """Return the system datastores to which VMs of `store` may be sent and oned refuses to deploy them.

    Of two that are both other drivers' nothing is said.
    """
    systems = [one for one in datastores if one.is_system and NAME in (one.driver, store.driver)]
    return [one for one in systems if is_sent(store, one) and not takes(one, store)]


def unreached(datastores: Sequence[Datastore]) -> list[Datastore]:
    """Return the system datastores to which no VM with an image is sent, though some image datastore could.

    One made after the others named theirs is such.
    """
    stores = images(datastores)
    return [
        system
        for system in datastores
        if system.is_system
        and system.is_enabled
        and any(takes(system, store) and is_near(system, store) for store in stores)
        and not any(takes(system, store) and is_sent(store, system) for store in stores)
    ]


def changes(datastores: Sequence[Datastore], *, ours: bool) -> list[Change]:
    """Return what `setup` has to write, in our image datastores or in those of other drivers.

    A choice that is there stays, without what oned would refuse, and with what no image datastore names yet.
    """
    systems = [one for one in datastores if one.is_system]
    late = {system.id for system in unreached(datastores)}
    found = []
    for store in images(datastores):
        if (store.driver == NAME) != ours:
            continue
        able = {system.id for system in systems if takes(system, store)}
        has = named(store)
        wanted = (has & able) | (able & late) if has & able else able
        if not ours and not astray(store, datastores) and not able & late:
            continue  # as it is, it stands in no one's way
        if wanted and wanted != has:
            found.append(Change(store, tuple(sorted(wanted))))
    return found
