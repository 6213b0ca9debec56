# SPDX-License-Identifier: Apache-2.0
"""Steps on the base store to functions (model/base/steps.py): staging, `semishared base`, status, plan."""

from __future__ import annotations

from ..base import room
from ..model.base import steps as base_steps
from .work import Steps


class OnBases(Steps):
    """Forwards: what is done stands in base/."""

    def ListBases(self, step: base_steps.ListBases) -> object:
        return room.list_bases(step.root)

    def VerifyBase(self, step: base_steps.VerifyBase) -> object:
        from ..stage import scrub

        return scrub.verify(step, self.talk.send)

    def ReadBase(self, step: base_steps.ReadBase) -> object:
        from ..stage import scrub

        return scrub.read(step, self.talk.send)

    def MendBase(self, step: base_steps.MendBase) -> object:
        from ..stage import scrub

        return scrub.mend(step, self.talk.asking)

    def ServeBase(self, step: base_steps.ServeBase) -> object:
        from ..stage import peers

        return peers.serve(step, self.talk.send, self.talk.send_data)

    def ServeExtents(self, step: base_steps.ServeExtents) -> object:
        from ..stage import peers

        return peers.serve_extents(step, self.talk.send, self.talk.send_data)

    def SendManifest(self, step: base_steps.SendManifest) -> object:
        from ..stage import manifests

        manifests.send_manifest(step, self.talk.send_data)
        return None

    def FetchBases(self, step: base_steps.FetchBases) -> object:
        from ..stage import fetch

        return fetch.receive(step, self.talk.send, self.talk.poll)

    def StreamBases(self, step: base_steps.StreamBases) -> object:
        from ..stage import multicast

        return multicast.send(step, self.talk.poll)

    def DescribeBase(self, step: base_steps.DescribeBase) -> object:
        from ..stage import describe

        return describe.describe(step)

    def EvictBase(self, step: base_steps.EvictBase) -> object:
        return room.evict(step.root, step.name)

    def DetachVm(self, step: base_steps.DetachVm) -> object:
        from ..disk import detach

        return detach.detach(step, self.planned, self.talk.asking)

    def ReportDisks(self, step: base_steps.ReportDisks) -> object:
        from ..disk import report

        return report.report(step)

    def RehearseHypervisor(self, step: base_steps.RehearseHypervisor) -> object:
        from ..vmm import rehearsal

        return rehearsal.rehearse(step)
