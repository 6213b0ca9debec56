# SPDX-License-Identifier: Apache-2.0
"""Judge where the scheduler may send VMs, by the datastores of all drivers (checks.py has the rows)."""

from __future__ import annotations

from typing import Sequence

from ... import NAME as DRIVER
from ...named import NamedTuple
from ...opennebula.xml import Datastore
from . import compatible
from .checks import Finding, Judge, judged


class Sent(NamedTuple):
    """A datastore, and all datastores."""

    store: Datastore
    datastores: Sequence[Datastore]

    def astray(self, has_images: bool) -> object:
        """Return the system datastores where oned refuses its VMs, as words; False if it has none."""
        if self.store.has_images != has_images:
            return False
        found = compatible.astray(self.store, self.datastores)
        return bool(found) and {"systems": ", ".join(f"{one.id} ({one.name})" for one in found)}

    def is_unreached(self) -> bool:
        """Tell whether it is a system datastore to which no VM with an image is sent."""
        return self.store in compatible.unreached(self.datastores)

    def has_no_home(self) -> bool:
        """Tell whether our image datastore has VMs that no system datastore of ours gets."""
        systems = [one for one in self.datastores if one.is_system and one.driver == DRIVER]
        return (
            self.store.driver == DRIVER
            and self.store.has_images
            and bool(systems)
            and not any(compatible.is_sent(self.store, one) for one in systems)
        )


SCHEDULER: dict[str, Judge] = {
    "sent-astray": lambda sent: sent.astray(True),
    "sent-nowhere": lambda sent: sent.has_no_home(),
    "sent-later": lambda sent: sent.astray(False),
    "unreached": lambda sent: sent.is_unreached(),
}


def quoted(name: str) -> str:
    """Return a name of OpenNebula's as a word of the shell."""
    is_plain = name and all(c.isalnum() or c in "-_." for c in name)
    return name if is_plain else "'" + name.replace("'", "'\\''") + "'"


def setup_command(datastores: Sequence[Datastore], image: str) -> str:
    """Return the command that sets up the image datastore of this name."""
    system = next((store.name for store in datastores if store.is_system and store.driver == DRIVER), "")
    names = [f"--image {quoted(image)}", *([f"--system {quoted(system)}"] if system else [])]
    return f"{DRIVER} setup --apply {' '.join(names)}"


def of_scheduler(datastores: Sequence[Datastore], front_end: str) -> list[Finding]:
    """Judge the datastores of an OpenNebula that has system datastores of ours, all drivers' among them."""
    if not any(store.is_system and store.driver == DRIVER for store in datastores):
        return []
    found: list[Finding] = []
    stores = compatible.images(datastores)
    own = next((store.name for store in stores if store.driver == DRIVER), "")
    for store in stores:
        is_ours = store.driver == DRIVER
        setup = setup_command(datastores, store.name if is_ours else own)
        mend = setup if is_ours else f"{setup} --stock-compatible"
        if not any(change.store is store for change in compatible.changes(datastores, ours=is_ours)):
            mend = f"make a system datastore with TM_MAD = {store.driver} in one of its clusters; then {mend}"
        name = f"datastore {store.id} ({store.name})"
        sent = Sent(store, datastores)
        found += judged("sent", SCHEDULER, sent, front_end, name=name, id=store.id, mend=mend)
    for system in (store for store in datastores if store.is_system):
        mend = setup_command(datastores, own) + ("" if system.driver == DRIVER else " --stock-compatible")
        name = f"datastore {system.id} ({system.name})"
        sent = Sent(system, datastores)
        found += judged("unreached", SCHEDULER, sent, front_end, name=name, mend=mend)
    return found
