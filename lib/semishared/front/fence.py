# SPDX-License-Identifier: Apache-2.0
"""Shut a host out of all stores, prove it, let it in again: from a front-end, without the host.

    proof = Fence(oned, config).proof("host3")         looks, changes nothing
    proof = Fence(oned, config).fence("host3")         does what is missing, then the same
    proof.epoch, proof.boot, proof.since

There is a Proof iff the host, in the boot that the proof names, can write to no disk of our stores any more.
Either may raise NotFenced, with all that is missing; what was done until then stays done, and the next call
does it again, with the same result. The mark (front/fence_facts.py) is set first, so that `lift` finds what a
killed call has left. Each raises NoKey without the key by which marks of ours are known.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Sequence

from ..config import Config
from ..errors import BadArguments, NotFenced, SemisharedError, StillFenced
from ..model.store import template
from ..model.store.rbd_names import is_whole
from ..named import NamedTuple
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host
from ..plan.care import fence as plan
from ..store import writers
from ..store.rbd.blocklist import Fencer
from ..tools import owner
from ..tools.effects import point
from ..tools.hung_store import unless_it_hangs
from ..tools.run import run
from ..tools.this_machine import is_here, login
from . import fence_facts
from .fence_facts import Cloud, Marks

TURNS = 5
LOCKS_S = 330
"""Seconds that locks of a host that is off may stay: 300 on CephFS (mds_session_autoclose), 90 on NFSv4."""


class Proof(NamedTuple):
    """The proof that a host writes to no store any more."""

    host: str
    epoch: int
    """How many times it was fenced: 1 for the first."""
    boot: str
    """The boot id that is shut out, '' if its monitoring never said one."""
    since: int
    """Seconds since 1970, by the front-end's clock, at which it was proved."""
    off: str
    """How it is known to be off: `command`, `confirmed`; '' if blocklists alone shut it out."""
    blocked: tuple[str, ...]
    """Entries of blocklists, CLUSTER/ENTRY."""
    notes: tuple[str, ...] = ()
    """What failed and was not needed, since the host is off."""
    by: str = ""
    """USER@FRONT-END that noted it; '' in a mark of an older version."""


class Fence:
    """Fencing by one front-end; methods raise BadArguments for a host unknown to oned, OnedUnavailable."""

    def __init__(self, oned: Oned, config: Config, locks_s: float = LOCKS_S) -> None:
        self._oned, self._config, self._locks_s = oned, config, locks_s
        self._marks = Marks(oned)

    # -- out ------------------------------------------------------------------------------------------

    def fence(self, host: str, confirmed_off: bool = False) -> Proof:
        """Shut a host, by its name in OpenNebula, out of all stores; raise NotFenced if it may still write.

        `confirmed_off`: the administrator has seen that it is off.
        """
        if is_here(host):
            raise BadArguments(f"{host} is this front-end: nobody can shut out himself")
        cloud = fence_facts.ask(self._oned, host)
        try:
            return self._proof(cloud)
        except NotFenced:
            pass
        mark = plan.begun(
            self._marks.of(cloud.host), plan.boot_of(cloud.host), (), int(time.time())
        )._replace(clock=now())
        mark, missing = self._shut_out(cloud, mark)
        missing = [*missing, *cloud.odd]
        off, why_on = self._switched_off(cloud, confirmed_off, bool(cloud.mounted or missing))
        since, clock = (
            int(time.time()),
            now(),
        )  # before the wait for locks: meanwhile the host may be switched on again
        # A host that is off writes nothing: what a cluster said is then only a note for the administrator.
        notes = tuple(missing) if off else ()
        missing = self._still_locked(cloud) if off else [*missing, *why_on]
        if missing:
            raise NotFenced(f"{host} may still write: {'; '.join(missing)}")
        mark = mark._replace(state=plan.FENCED, since=since, off=off, by=_who(), clock=clock)
        self._note(cloud, mark)
        return _proven(host, mark)._replace(notes=notes)

    def _shut_out(self, cloud: Cloud, mark: plan.Mark) -> tuple[plan.Mark, list[str]]:
        """Block the host, with its new clients, in each cluster; return the new mark, and what is missing."""
        for turn in range(TURNS):
            ways, missing = self._ways(cloud)
            blocked = dict.fromkeys(
                [*mark.blocked, *(f"{way.fsid}/{entry}" for way in ways for entry in way.entries)]
            )
            if turn and len(blocked) == len(mark.blocked):
                return mark, missing
            mark = mark._replace(blocked=tuple(blocked))
            self._note(cloud, mark)
            missing += [text for way in ways for text in self._block(way)]
            if all(is_whole(entry) for way in ways for entry in way.entries):
                return mark, missing
        return mark, [*missing, f"{cloud.host.name} goes on to open images"]

    def _ways(self, cloud: Cloud) -> tuple[list[_Way], list[str]]:
        """Return how each cluster shuts the host out, and what is missing for that."""
        ways, missing = [], []
        for datastores in fence_facts.clusters(cloud.pools):
            try:
                fencer, ceph = fence_facts.look(cloud, datastores)
            except SemisharedError as e:
                missing.append(f"{_named(datastores)}: {e.detail}")
                continue
            entries, lacks = plan.blocks(ceph, cloud.machines(), cloud.on(datastores))
            ways.append(_Way(datastores, fencer, ceph.fsid, entries))
            missing += [f"{_named(datastores)}: {text}" for text in lacks]
        return ways, missing

    @staticmethod
    def _block(way: _Way) -> list[str]:
        """Block what is to be blocked in a cluster; return what could not be."""
        try:
            lacks = way.fencer.block(way.entries).lacks(way.entries)
        except SemisharedError as e:
            return [f"{_named(way.datastores)}: {e.detail}"]
        return [f"{_named(way.datastores)}: {', '.join(lacks)} is not on the blocklist"] if lacks else []

    def _switched_off(self, cloud: Cloud, confirmed_off: bool, needed: bool) -> tuple[str, list[str]]:
        """Have the host off if that is needed; return how it is known to be off, and why it is not."""
        if confirmed_off or not needed:
            return plan.CONFIRMED if confirmed_off else "", []
        command, where = self._config.fencing, f"{_named(cloud.mounted)}: " if cloud.mounted else ""
        if not command:
            return "", [
                f"{where}a host writes to a mounted store until it is off, and [fence] command is not set"
            ] if where else []
        try:
            run([*command, cloud.host.name], timeout_s=self._config.fence_timeout_s)
        except SemisharedError as e:
            return "", [f"{where}the fencing command failed: {e.detail}"]
        point("host switched off")
        return plan.COMMAND, []

    def _still_locked(self, cloud: Cloud) -> list[str]:
        """Return the files that are still locked for writing: locks of a host that is off go in time."""
        deadline = time.monotonic() + self._locks_s
        files = [store for store in cloud.mounted if not template.is_shares(store)]
        while True:
            asked = (
                unless_it_hangs(partial(writers.of_disk, path), [f"{path}: its store hangs"])
                for path in cloud.on(files)
            )
            held = [text for found in asked for text in found]
            if not held or time.monotonic() >= deadline:
                return held
            time.sleep(1)

    def _note(self, cloud: Cloud, mark: plan.Mark) -> None:
        self._marks.note(cloud.host, mark)
        point(f"mark {mark.state}")

    # -- proved ---------------------------------------------------------------------------------------

    def proof(self, host: str) -> Proof:
        """Return the proof that a host is shut out, as of now; raise NotFenced. Changes nothing."""
        return self._proof(fence_facts.ask(self._oned, host))

    def why_alive(self, host: str) -> str:
        """Return a sign that a host is not dead, '' if there is none."""
        return fence_facts.why_alive(
            fence_facts.ask(self._oned, host).host, self._config.hosts_connect_timeout_s
        )

    def _proof(self, cloud: Cloud) -> Proof:
        host, mark = cloud.host, self._marks.of(cloud.host)
        if mark.state != plan.FENCED:
            raise NotFenced(
                mark.strange
                or f"{host.name} is not fenced" + (": that was begun, and did not end" if mark.stands else "")
            )
        if mark.boot != plan.boot_of(host):
            raise NotFenced(f"{host.name} was fenced before it was started the last time")
        self._check_off(host, mark)
        missing = []
        if not mark.off:
            missing = [f"{_named([store])} was not there then" for store in cloud.mounted]
            for datastores in fence_facts.clusters(cloud.pools):
                try:
                    fencer = Fencer(*fence_facts.reached(datastores))
                    wanted = mark.entries(fencer.fsid)
                    listed, daemons = fencer.look()
                    lacks = (*listed.lacks(wanted), *plan.unlisted(cloud.machines(), daemons, wanted))
                except SemisharedError as e:
                    missing.append(f"{_named(datastores)}: {e.detail}")
                    continue
                if lacks:
                    missing.append(
                        f"{_named(datastores)}: {', '.join(lacks)} is not on the blocklist any more"
                    )
        if missing:
            raise NotFenced(f"{host.name} may write again: {'; '.join(missing)}")
        return _proven(host.name, mark)

    def _check_off(self, host: Host, mark: plan.Mark) -> None:
        """Raise NotFenced if a host noted as off is not: by that note VMs are started elsewhere.

        After the fencing command has switched a host off, OpenNebula's word counts for less, until it sees
        that the host is gone.
        """
        told = (
            fence_facts.why_alive(
                host, self._config.hosts_connect_timeout_s, as_monitored=mark.off == plan.CONFIRMED
            )
            if mark.off
            else ""
        )
        if told:
            said = "the fencing command said" if mark.off == plan.COMMAND else f"{mark.by or 'somebody'} said"
            when = time.strftime("%F %T", time.localtime(mark.since))
            raise NotFenced(f"{host.name} may write: {said} at {when} that it is off, and {told}")

    # -- in again -------------------------------------------------------------------------------------

    def is_held_out(self, host: str) -> bool:
        """Tell whether a host must prove a restart before it is let in."""
        mark = self._marks.of(fence_facts.ask(self._oned, host).host)
        return mark.stands and not mark.shut_nothing_out

    def lift(self, host: str, boot: str, up_s: float) -> tuple[str, ...]:
        """Let a host in again, with boot id `boot`, up for `up_s` seconds; one that is not shut out is in.

        Return the entries that stay, since no datastore of ours is on their cluster any more. Raise
        StillFenced if that may be the boot that was shut out, or a cluster cannot be asked.
        """
        cloud = fence_facts.ask(self._oned, host)
        mark = self._marks.of(cloud.host)
        if mark.strange:
            raise StillFenced(f"{mark.strange}; then --lift lets it in")
        if mark.shut_nothing_out:
            self._note(cloud, mark._replace(state=plan.LIFTED))
        if not mark.stands or mark.shut_nothing_out:
            return ()
        passed = plan.passed_s(mark, now())
        why = plan.not_anew(mark, boot, up_s, passed)
        if why:
            if passed is None and boot and not mark.asked:
                self._note(cloud, mark._replace(asked=boot))
            raise StillFenced(f"{host}: {why}")
        stay, left = set(mark.blocked), []
        for datastores in fence_facts.clusters(cloud.all_pools):
            try:
                fencer = Fencer(*fence_facts.reached(datastores))
                entries = mark.entries(fencer.fsid)
                fencer.unblock(entries)
                stay -= {f"{fencer.fsid}/{entry}" for entry in entries}
            except SemisharedError as e:
                left.append(f"{_named(datastores)}: {e.detail}")
        if left and stay:
            raise StillFenced(f"{host} is still shut out: {'; '.join(left)}")
        self._note(cloud, mark._replace(state=plan.LIFTED, off="", blocked=()))
        return tuple(sorted(stay))


def now() -> str:
    """Return this machine's boot id and the seconds since that boot: a clock that is never set."""
    return f"{owner.boot()}:{time.clock_gettime(time.CLOCK_BOOTTIME):.3f}"


class _Way(NamedTuple):
    """How to shut a host out of one cluster."""

    datastores: list[Datastore]
    fencer: Fencer
    fsid: str
    entries: tuple[str, ...]


def _proven(host: str, mark: plan.Mark) -> Proof:
    return Proof(host, mark.epoch, mark.boot, mark.since, mark.off, mark.blocked, by=mark.by)


def _who() -> str:
    """Return USER@FRONT-END of this process, as far as known: under sudo the user that called it."""
    name = f"{login()}@{os.uname().nodename}"
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c in "@._-"))


def _named(datastores: Sequence[Datastore]) -> str:
    return "datastore " + ", ".join(f"{store.id} ({store.name})" for store in datastores)
