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
