# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool to functions (model/steps_device.py)."""

from __future__ import annotations

from ..base import labels
from ..model import steps_device as d
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

        return {"devices": labels.described(step.root), "items": [*moving.held(step), *moved_layers.held(step)]}

    def MoveBase(self, step: d.MoveBase) -> object:
        from ..base import moving

        return moving.move_base(step, self.talk.send)

    def MoveLayers(self, step: d.MoveLayers) -> object:
        from ..disk import moved_layers

        return moved_layers.move(step, self.planned, self.talk.asking, self.talk.send)
