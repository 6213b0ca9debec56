# SPDX-License-Identifier: Apache-2.0
"""Steps that concern a host's base store to functions (model/steps_base.py): staging, and what `semishared
base`, status and plan ask.
"""

from __future__ import annotations

from ..base import room
from ..model import steps_base as b
from .conversation import Steps


class OnBases(Steps):
    """Forwards: what is done stands in base/."""

    def ListBases(self, step: b.ListBases) -> object:
        return room.list_bases(step.root)

    def VerifyBase(self, step: b.VerifyBase) -> object:
        from ..base import scrub

        return scrub.verify(step, self.talk.send)

    def ReadBase(self, step: b.ReadBase) -> object:
        from ..base import scrub

        return scrub.read(step, self.talk.send)

    def MendBase(self, step: b.MendBase) -> object:
        from ..base import scrub

        return scrub.mend(step, self.talk.asking)

    def ServeBase(self, step: b.ServeBase) -> object:
        from ..base import peers

        return peers.serve(step, self.talk.send, self.talk.send_data)

    def ServeExtents(self, step: b.ServeExtents) -> object:
        from ..base import peers

        return peers.serve_extents(step, self.talk.send, self.talk.send_data)

    def SendManifest(self, step: b.SendManifest) -> object:
        from ..base import manifests

        manifests.send_manifest(step, self.talk.send_data)
        return None

    def FetchBases(self, step: b.FetchBases) -> object:
        from ..base import fetch

        return fetch.receive(step, self.talk.send, self.talk.poll)

    def StreamBases(self, step: b.StreamBases) -> object:
        from ..base import multicast

        return multicast.send(step, self.talk.poll)

    def DescribeBase(self, step: b.DescribeBase) -> object:
        from ..base import describe

        return describe.describe(step)

    def EvictBase(self, step: b.EvictBase) -> object:
        return room.evict(step.root, step.name)

    def DetachVm(self, step: b.DetachVm) -> object:
        from ..disk import detach

        return detach.detach(step, self.planned, self.talk.asking)

    def ReportDisks(self, step: b.ReportDisks) -> object:
        from ..disk import report

        return report.report(step)

    def RehearseHypervisor(self, step: b.RehearseHypervisor) -> object:
        from ..vmm import rehearsal

        return rehearsal.rehearse(step)
