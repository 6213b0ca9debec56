# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool to functions (model/steps_device.py)."""

from __future__ import annotations

from ..base import labels
from ..disk import in_memory, on_devices, vm_dir
from ..model import steps_device as d
from ..model.device_class import Want
from .conversation import Steps


class OnDevices(Steps):
    """Forwards: what is done stands in base/."""

    def ListDevices(self, step: d.ListDevices) -> object:
        return labels.describe(step)

    def SetDevices(self, step: d.SetDevices) -> object:
        return labels.declare(step)

    def CloseDevice(self, step: d.CloseDevice) -> object:
        return labels.close(step)

    def ListHeld(self, step: d.ListHeld) -> object:
        from ..base import moving
        from ..disk import moved_layers

        return {
            "devices": labels.described(step.root),
            "items": [*moving.held(step), *moved_layers.held(step)],
        }

    def MoveBase(self, step: d.MoveBase) -> object:
        from ..base import moving

        return moving.move_base(step, self.talk.send)

    def MoveLayers(self, step: d.MoveLayers) -> object:
        from ..disk import moved_layers

        return moved_layers.move(step, self.planned, self.talk.asking, self.talk.send)

    def PlaceLayers(self, step: d.PlaceLayers) -> None:
        disk = step.disk
        with vm_dir.publishing(disk.vm, disk.vm_dir, self.planned, disk.disk):
            on_devices.place(
                disk.vm_dir, disk.vm, disk.disk, step.expected, want=Want(step.classes, step.size)
            )

    def NoteHot(self, step: d.NoteHot) -> None:
        vm_dir.note_hot(step, self.planned)

    def NoteClasses(self, step: d.NoteClasses) -> None:
        vm_dir.note_classes(step, self.planned)
        in_memory.check_made(step.disk)
