# SPDX-License-Identifier: Apache-2.0
"""Steps that concern diffs (model/disk/commit_steps.py) to functions."""

from __future__ import annotations

from ..disk import commits, diff_rebase, lost_host_claim, retained_diffs, vm_dir, vm_dir_inventory
from ..model.disk import commit_steps as c
from .work import Steps


class OnCommits(Steps):
    """Forwards what disk/ does."""

    def CreateDiff(self, step: c.CreateDiff) -> object:
        return commits.make(step, self.planned, self.talk.asking)

    def LookForDiff(self, step: c.LookForDiff) -> object:
        before = lost_host_claim.owner(step.disk, step.image, self.planned.seq)
        return {"before": before.to_data(), "epoch": self.planned.seq} if before else {}

    def TakeTurn(self, step: c.TakeTurn) -> object:
        return {"runs": commits.take_turn(step)}

    def CheckDiff(self, step: c.CheckDiff) -> object:
        return commits.check(step.disk)

    def CommitDisk(self, step: c.CommitDisk) -> object:
        return commits.commit(step, self.planned, self.talk.asking)

    def FinishDisk(self, step: c.FinishDisk) -> object:
        return commits.finish(step, self.planned, self.talk.asking)

    def RenewVm(self, step: c.RenewVm) -> object:
        return diff_rebase.renew(step, self.planned, self.talk.asking)

    def KeepStale(self, step: c.KeepStale) -> object:
        with vm_dir.publishing(step.vm, step.vm_dir, self.planned):
            if vm_dir_inventory.fingerprint(step.vm_dir) != step.seen:
                return {"kept": [], "seen": step.seen}
            found = retained_diffs.keep_stale(step.vm, step.vm_dir)
            return {"kept": found, "seen": vm_dir_inventory.fingerprint(step.vm_dir) if found else step.seen}

    def FindKept(self, step: c.FindKept) -> object:
        return {
            "kept": [
                item
                for system in step.systems
                for item in retained_diffs.found(f"{step.location}/{system}", step.vm)
            ]
        }
