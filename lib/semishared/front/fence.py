# SPDX-License-Identifier: Apache-2.0
"""Shut a host out of all stores, prove it, and let it in again. (INTERFACE: bodies follow)

The mark of a fenced host is SEMISHARED_FENCED in its template in OpenNebula, which oned replicates to every front-end and which
monitoring never touches (Host::update_info merges what probes say by name):

    SEMISHARED_FENCED = [ STATE = "fenced",            begun | fenced | lifted
        EPOCH = "3",                                   counts the host's fences, from 1; never falls, also not by --lift
        BOOT = "6f0c...", SINCE = "1763842000",        boot id that is shut out ('' if its probe never said one), unix seconds
        OFF = "command",                               command | confirmed | '' : how it was switched off, if it was
        BLOCKED = "FSID/10.0.0.3:0/0 FSID/[fd00::3]:0/0" ]   entries of blocklists, by cluster

What failover needs:

    from ..front.fence import Fence
    proof = Fence(oned, config).proof("host3")         # raises NotFenced (SS...) with what is missing: looks, changes nothing
    proof = Fence(oned, config).fence("host3")         # does it, then the same proof; raises NotFenced. Idempotent
    proof.epoch, proof.boot, proof.since

Exit code 0 of `semishared fence HOST` (and a Proof) iff no disk of any of our stores can be written by that host any more:
the boot of it that the mark names. A host that has come back with another boot id has none of its old guests.
"""

from __future__ import annotations

from typing import NamedTuple

from ..config import Config
from ..opennebula.oned import Oned


class Proof(NamedTuple):
    """That a host writes to no store any more."""

    host: str
    epoch: int
    """How many times it was fenced: 1 for the first."""
    boot: str
    """The boot id that is shut out, '' if its monitoring never said one."""
    since: int
    """When it was proved, in seconds since 1970 by the front-end's clock."""
    off: str
    """`command`, `confirmed`, or '' if blocklists alone shut it out."""
    blocked: tuple[str, ...]
    """Entries of blocklists, FSID/ADDRESS."""


class Fence:
    """Fencing by one front-end."""

    def __init__(self, oned: Oned, config: Config) -> None:
        self._oned, self._config = oned, config

    def fence(self, host: str, confirmed_off: bool = False) -> Proof:
        """Shut a host, by its name in OpenNebula, out of all stores; raise NotFenced if some store is left, with all that is missing."""
        raise NotImplementedError

    def proof(self, host: str) -> Proof:
        """Return the proof that a host is shut out, as of now; raise NotFenced. Changes nothing."""
        raise NotImplementedError

    def lift(self, host: str) -> None:
        """Let a host in again that has another boot id than the one it was fenced with; raise StillFenced."""
        raise NotImplementedError
