# SPDX-License-Identifier: Apache-2.0
"""The transfer actions for disks whose image is reached over the network: host and bridge take turns (plan/rbd.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterable

from ..errors import NotSupported, SemisharedError
from ..model import steps as s
from ..model import steps_image, stores
from ..model.record import Record

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore
    from .action import Action


class Bridge:
    """The machine that changes images of a datastore."""

    def __init__(self, action: Action, datastore: Datastore, number: int) -> None:
        self._action = action
        self.host = stores.bridge(datastore, number)

    @classmethod
    def of(cls, action: Action, image: s.ImageRef) -> Bridge:
        """Return the bridge of the datastore that an image on record is of."""
        from ..opennebula.oned import Oned

        return cls(action, Oned().datastore(image.store), image.id)

    def run(self, steps: Iterable[s.Step]) -> list[Any]:
        """Carry out steps there."""
        return self._action.on(self.host, steps)


def restore(action: Action, disk: s.DiskRef, record: Record, size: int, bring: Callable[[s.Step], None]) -> None:
    """Replace the content of a disk on the network; `bring` lets the host carry out a step that a backup follows."""
    if record.readonly:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only and cannot be restored")
    image = record.stored
    assert image is not None
    bridge = Bridge.of(action, image)
    (begun,) = bridge.run([steps_image.BeginChange(image, size)])
    try:
        bring(steps_image.RestoreImage(disk, image._replace(source=begun["hidden"])))
    except SemisharedError:
        bridge.run([steps_image.EndChange(image, whole=False)])
        raise
    bridge.run([steps_image.EndChange(image, whole=True)])
