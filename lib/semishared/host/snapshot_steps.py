# SPDX-License-Identifier: Apache-2.0
"""Steps about snapshots and sizes of a VM's disks to functions (model/disk/snapshot_steps.py)."""

from __future__ import annotations

from ..disk import layering, snapshots, vm_dir
from ..model import steps as s
from .work import Steps


class OnSnapshots(Steps):
    """Forwards: what is done stands in disk/."""

    def DescribeDisk(self, step: s.DescribeDisk) -> object:
        return snapshots.describe(step)

    def LookAtDisk(self, step: s.LookAtDisk) -> object:
        return snapshots.look_at(step)

    def NameLayer(self, step: s.NameLayer) -> None:
        layering.name_layer(step, self.planned)

    def AddLayer(self, step: s.AddLayer) -> None:
        layering.add_layer(step, self.planned)

    def ActivateLayer(self, step: s.ActivateLayer) -> None:
        layering.activate_layer(step, self.planned)

    def SwitchLayer(self, step: s.SwitchLayer) -> object:
        return layering.switch_layer(step, self.planned)

    def RestGuest(self, step: s.RestGuest) -> object:
        return snapshots.rest_for(step, lambda: self.talk.ask(rests=step.domain))

    def MergeLayer(self, step: s.MergeLayer) -> None:
        vm_dir.check_wanted(step.disk, self.planned)
        layering.merge_layer(step, self.planned)

    def PullLayer(self, step: s.PullLayer) -> None:
        vm_dir.check_wanted(step.disk, self.planned)
        layering.pull_layer(step)

    def DropStrays(self, step: s.DropStrays) -> None:
        with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, self.planned, step.disk.disk):
            layering.drop_strays(step, self.planned)

    def DropLayer(self, step: s.DropLayer) -> None:
        with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, self.planned, step.disk.disk):
            layering.drop_layer(step)

    def CopyOut(self, step: s.CopyOut) -> object:
        return snapshots.copy_out(step, self.planned)

    def GrowDisk(self, step: s.GrowDisk) -> object:
        vm_dir.check_wanted(step.disk, self.planned)
        return snapshots.grow(step)

    def AllowGrowth(self, step: s.AllowGrowth) -> None:
        snapshots.allow_growth(step)
