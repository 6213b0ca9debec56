# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool to functions (model/device/steps.py)."""

from __future__ import annotations

from ..disk import in_memory, on_devices, vm_dir
from ..model.device import steps as device_steps
from ..model.device.classes import Want
from ..pool import labels
from .work import Steps


class OnDevices(Steps):
    """Forwards: what is done stands in base/."""

    def ListDevices(self, step: device_steps.ListDevices) -> object:
        return labels.describe(step)

    def SetDevices(self, step: device_steps.SetDevices) -> object:
        return labels.declare(step)

    def CloseDevice(self, step: device_steps.CloseDevice) -> object:
        return labels.close(step)

    def ListHeld(self, step: device_steps.ListHeld) -> object:
        from ..disk import device_move
        from ..pool import moving

        return {
            "devices": labels.described(step.root),
            "items": [*moving.held(step), *device_move.held(step)],
        }

    def MoveBase(self, step: device_steps.MoveBase) -> object:
        from ..pool import moving

        return moving.move_base(step, self.talk.send)

    def MoveLayers(self, step: device_steps.MoveLayers) -> object:
        from ..disk import device_move

        return device_move.move(step, self.planned, self.talk.asking, self.talk.send)

    def PlaceLayers(self, step: device_steps.PlaceLayers) -> None:
        disk = step.disk
        with vm_dir.publishing(disk.vm, disk.vm_dir, self.planned, disk.disk):
            on_devices.place(
                disk.vm_dir, disk.vm, disk.disk, step.expected, want=Want(step.classes, step.size)
            )

    def NoteHot(self, step: device_steps.NoteHot) -> None:
        vm_dir.note_hot(step, self.planned)

    def NoteClasses(self, step: device_steps.NoteClasses) -> None:
        vm_dir.note_classes(step, self.planned)
        in_memory.check_made(step.disk)
