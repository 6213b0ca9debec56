# SPDX-License-Identifier: Apache-2.0
"""Decide how a host is shut out of all stores, what of that is proved, and what is missing.

Ceph: an entry of the blocklist for each address that is the host's alone. Where an OSD has that address too,
the host's clients one by one, and only if each disk that it may have open shows its client: one that is not
seen would come back and write.

A mounted store has no such list. That a lock is gone proves nothing: a server takes it from a client that is
cut off, and the client writes when it is back. So a host has to be off: a command of the site said so, or the
operator does.

The mark of a fenced host is SEMISHARED_FENCED in a document of oned's, under a code (front/fence_facts.py).
"""

from __future__ import annotations

import re
from typing import Collection, Mapping, Optional, Sequence

from ...model import attributes
from ...model.store.rbd_names import Ceph, canonical, ip_of, whole
from ...named import NamedTuple
from ...opennebula.xml import Host, View

ATTRIBUTE = attributes.FENCED.name
BEGUN, FENCED, LIFTED = "begun", "fenced", "lifted"
COMMAND, CONFIRMED = "command", "confirmed"


class Mark(NamedTuple):
    """What oned's document says of a host's last fence."""

    state: str = ""
    """begun, fenced, lifted; '' of a host that never was."""
    epoch: int = 0
    """Counts the fences of the host; never falls."""
    boot: str = ""
    """The boot id that is shut out, '' if the host's monitoring never reported one."""
    since: int = 0
    """Seconds since 1970 at which it was begun, or proved, by the front-end's clock: for people."""
    off: str = ""
    """How it is known to be off: command, confirmed, or '' : it is not."""
    blocked: tuple[str, ...] = ()
    """Entries of blocklists, CLUSTER/ENTRY."""
    by: str = ""
    """USER@FRONT-END that noted it; '' in a mark of an older version."""
    clock: str = ""
    """The same moment as `since`, by a clock that is never set: BOOT:SECONDS of the front-end that noted it;
    '' of older versions.
    """
    asked: str = ""
    """The boot id at the last attempt to let the host in, if its age was unknown then."""
    strange: str = ""
    """Why the note is not believed; nothing else is known of the host then."""

    @property
    def stands(self) -> bool:
        """Tell whether the host is shut out, or on the way to that."""
        return self.state in (BEGUN, FENCED)

    @property
    def shut_nothing_out(self) -> bool:
        """Tell whether a fence was begun and put nothing on a blocklist: no entry keeps the host out."""
        return self.state == BEGUN and not self.blocked

    def entries(self, fsid: str) -> tuple[str, ...]:
        """Return the entries in the blocklist of one cluster."""
        return tuple(word.partition("/")[2] for word in self.blocked if word.startswith(f"{fsid}/"))

    def values(self, host: int) -> dict[str, str]:
        """Return the attributes that note this of a host, by its id in OpenNebula; the code covers all."""
        return {
            "HOST": str(host),
            "STATE": self.state,
            "EPOCH": str(self.epoch),
            "BOOT": self.boot,
            "SINCE": str(self.since),
            "OFF": self.off,
            "BLOCKED": " ".join(self.blocked),
            "BY": self.by,
            "CLOCK": self.clock,
            "ASKED": self.asked,
        }

    def template(self, host: int, code: str) -> str:
        """Return the attribute as oned reads it."""
        inside = ", ".join(
            f'{name} = "{value}"' for name, value in {**self.values(host), "CODE": code}.items()
        )
        return f"{ATTRIBUTE} = [ {inside} ]"


def mark_of(noted: View) -> Mark:
    """Return the mark in the template of a document; an empty one if it has none."""
    path = f"TEMPLATE/{ATTRIBUTE}"
    return Mark(
        noted.text(f"{path}/STATE"),
        noted.number(f"{path}/EPOCH", 0),
        noted.text(f"{path}/BOOT"),
        noted.number(f"{path}/SINCE", 0),
        noted.text(f"{path}/OFF"),
        tuple(noted.text(f"{path}/BLOCKED").split()),
        noted.text(f"{path}/BY"),
        noted.text(f"{path}/CLOCK"),
        noted.text(f"{path}/ASKED"),
    )


def boot_of(host: Host) -> str:
    """Return the boot id that the host's probe reported last, '' if it never did."""
    return boot_id(host.text("TEMPLATE/SEMISHARED/BOOT"))


def boot_id(text: str) -> str:
    """Return the host's boot id if it has that form, else '': it stands in a template between quotes."""
    return text if re.match(r"[0-9a-f-]{36}\Z", text) else ""


def addresses_of(host: Host) -> frozenset[str]:
    """Return the addresses that the host's probe reported last."""
    return frozenset(map(canonical, host.told_addresses)) - {""}


def begun(mark: Mark, boot: str, blocked: Collection[str], now: int) -> Mark:
    """Return the mark to set before anything is done.

    --lift removes what it names, so it forgets no entry that may be there.
    """
    epoch = mark.epoch if mark.stands and mark.boot == boot else mark.epoch + 1
    return Mark(BEGUN, epoch, boot, now, "", tuple(dict.fromkeys([*mark.blocked, *blocked])))


# -- Ceph -------------------------------------------------------------------------------------------


class Machines(NamedTuple):
    """Which machines have which addresses."""

    host: str
    told: Mapping[str, frozenset[str]]
    """Host -> addresses that its monitoring reported."""
    front_end: frozenset[str]

    @property
    def own(self) -> frozenset[str]:
        """Return the addresses that monitoring reported for the host."""
        return self.told.get(self.host, frozenset())

    @property
    def others(self) -> frozenset[str]:
        """Return the addresses that another machine has, too."""
        return self.front_end.union(*(found for name, found in self.told.items() if name != self.host))


class Blocks(NamedTuple):
    """How a host is shut out of one cluster."""

    entries: tuple[str, ...]
    missing: tuple[str, ...]
    """Why these entries would not shut out all of its clients; none: they do."""


def blocks(cluster: Ceph, machines: Machines, disks: Sequence[str]) -> Blocks:
    """Return how to shut a host out of a cluster; `disks`: POOL/IMAGE that its guests may write to."""
    told, others = machines.own, machines.others
    openers = [opener for opener in cluster.openers if opener.image in disks]
    seen = {ip_of(opener.address) for opener in openers}
    missing = [
        f"{opener.client} at {opener.address} has {opener.image} open, and no machine's "
        f"monitoring has told that address"
        for opener in openers
        if told and ip_of(opener.address) not in told | others
    ]
    missing += [
        f"{ip} is an address of another machine too, and has a disk of this host open"
        for ip in sorted(seen & told & others)
    ]
    # A host whose probe is older reports no address: those count that have its disks open.
    mine = (told or seen) - others
    if not mine:
        missing.append(f"no address of {machines.host} alone is known, and none of its disks shows one")
    singles = mine & cluster.daemons
    if singles:
        missing += _unseen(cluster, machines.host, singles, disks)
    clients = {opener.address: None for opener in cluster.openers if ip_of(opener.address) in singles}
    return Blocks((*map(whole, sorted(mine - singles)), *clients), tuple(missing))


def unlisted(machines: Machines, daemons: Collection[str], entries: Collection[str]) -> tuple[str, ...]:
    """Return the addresses of a fenced host, as far as known now, that its `entries` do not cover."""
    mine = machines.own - machines.others
    left = mine - set(map(ip_of, entries)) - set(daemons)
    return tuple(sorted(left)) if mine or entries else (machines.host,)


def _unseen(cluster: Ceph, host: str, ips: Collection[str], disks: Sequence[str]) -> list[str]:
    """Return why clients of the host may be unseen, where each one has to be shut out by itself."""
    why = f"{', '.join(sorted(ips))} is an OSD's address too, so that clients are shut out one by one"
    known = {opener.image for opener in cluster.openers if ip_of(opener.address) in ips}
    found = [
        f"{why}, and the one that has {disk} open is not seen"
        for disk in disks
        if disk in cluster.images and disk not in known
    ]
    if host in cluster.bridges:
        found.append(f"{why}, and {host} is a bridge (BRIDGE_LIST) that may open any image anew")
    return found


# -- back again -------------------------------------------------------------------------------------


def passed_s(mark: Mark, clock: str) -> Optional[float]:
    """Return the seconds since a host was fenced, by the front-end's `clock`.

    None if another front-end fenced it, or another boot of this one.
    """
    (boot, _, then), (own, _, now) = mark.clock.partition(":"), clock.partition(":")
    return float(now) - float(then) if boot and boot == own else None


def not_anew(mark: Mark, boot: str, up_s: float, passed: Optional[float]) -> str:
    """Return why a fenced host may not be let in, '' if it may.

    It has `boot` and is up for `up_s` seconds; the fence was `passed` seconds ago.
    """
    if boot in ("", mark.boot, mark.asked):
        return "it has not been restarted since: its boot id is the one that is shut out"
    if mark.asked:
        return ""  # it has booted since it was last to be let in
    if passed is None:
        return (
            f"nobody knows whether boot {boot} is of before, as another front-end, or this one before "
            f"its restart, has shut it out"
        )
    # Also another boot: one that monitoring had not reported when the host was fenced. It is as old as its
    # guests.
    if not up_s < passed:
        return (
            f"it has not been restarted since: it is up for {up_s:.0f} s, and was fenced {passed:.0f} s ago"
        )
    return ""
