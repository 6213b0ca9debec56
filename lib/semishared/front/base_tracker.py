# SPDX-License-Identifier: Apache-2.0
"""What the front-end says to a host that is to clone and has no base: what to remove for it, and from whom to get it.

    <DATASTORE_LOCATION>/.semishared/holders/<store>-<image>-<generation>      on the front-end
        {"holders": [HOST, ...], "arriving": [[HOST, SINCE], ...]}

These are hints: a host that does not have the base (any more) says so, and the next one is asked. Simultaneous clones on
many cold hosts find one another here and become one chain (plan/sources.py).
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Iterator

from ..base.cache import BASE
from ..config import Config
from ..errors import BadArguments, NoSpace, OnedUnavailable
from ..opennebula.oned import Oned
from ..plan import eviction, sources
from ..tools import files, locks
from ..units import human

KEEP_S = 30 * 86400
"""Hints that nobody has touched for so long go: of images that are gone, mostly."""


def _path(root: str, name: str) -> str:
    if not BASE.match(name):
        raise BadArguments(f"not a base: {name!r}")
    return f"{root}/holders/{name}"


@contextmanager
def _hints(root: str, name: str) -> Iterator[tuple[list[str], list[sources.Arriving]]]:
    """Yield holders and arriving hosts, to be changed; what is in them at the end is written."""
    path = _path(root, name)
    with locks.exclusive(f"{root}/locks/holders", 30):
        found = files.read_json(path) or {}
        holders = [str(host) for host in _list(found, "holders")]
        pairs = [pair for pair in _list(found, "arriving") if isinstance(pair, list) and len(pair) == 2]
        arriving = [sources.Arriving(str(host), float(since)) for host, since in pairs]
        yield holders, arriving
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.remove_stale(os.path.dirname(path))
        _forget_older(root, name)
        files.write_json(path, {"holders": holders, "arriving": [list(item) for item in arriving]})


def _list(found: dict[str, object], key: str) -> list[object]:
    value = found.get(key)
    return value if isinstance(value, list) else []


def _forget_older(root: str, name: str) -> None:
    """Remove the hints about other generations of the image, from which nobody clones any more, and those of long ago."""
    image = name.rpartition("-")[0]
    for entry in os.scandir(f"{root}/holders"):
        is_older = entry.name != name and entry.name.rpartition("-")[0] == image
        if is_older or entry.stat().st_mtime < time.time() - KEEP_S:
            files.unlink(entry.path)


def join(root: str, name: str, host: str) -> list[str]:
    """Note that `host` is about to get the base, and return from whom."""
    with _hints(root, name) as (holders, arriving):
        arriving[:] = [item for item in sources.current(arriving, time.time()) if item.host != host]
        found = sources.for_host(host, holders, arriving)
        arriving.append(sources.Arriving(host, time.time()))
    return found


def begin(root: str, name: str, hosts: list[str]) -> None:
    """Note that a session brings the base to `hosts`: who clones meanwhile follows one of them."""
    if hosts:
        with _hints(root, name) as (_, arriving):
            arriving[:] = [item for item in sources.current(arriving, time.time()) if item.host not in hosts]
            arriving += [sources.Arriving(host, time.time()) for host in hosts]


def leave(root: str, name: str, hosts: dict[str, bool]) -> None:
    """Note of each host whether it has the base now."""
    with _hints(root, name) as (holders, arriving):
        arriving[:] = [item for item in arriving if item.host not in hosts]
        holders[:] = [host for host in holders if host not in hosts] + [host for host, has in hosts.items() if has]


def holders_of(root: str, name: str) -> list[str]:
    """Return who is said to have the base."""
    with _hints(root, name) as (holders, _):
        return list(holders)


def answer(root: str, question: dict[str, object], host: str, config: Config) -> dict[str, object]:
    """Return what a cloning `host` has to know to get the base that it asks for; `leave` must follow."""
    evict = _room(question, host, config)
    found = join(root, str(question.get("name")), host)
    return {"sources": found, "from_store": "last", "codec": config.staging_compress, "rate": 0, "evict": evict}


def _room(question: dict[str, object], host: str, config: Config) -> list[str]:
    """Return which bases have to go on `host`; raise NoSpace if that is not enough."""
    try:
        known = {item.name: item for item in Oned().hosts()}
    except OnedUnavailable:
        # What a host's own attributes may add is no reason to fail a deploy: what holds for all hosts holds.
        known = {}
    limit = eviction.limits_of(known.get(host), config.bases_size_limit, config.bases_free_floor, _number(question, "total"))
    return room(question, limit, host, _number(question, "needed"), str(question.get("name")))


def room(listed: dict[str, object], limit: eviction.Limits, host: str, needed: int, name: str) -> list[str]:
    """Return which bases have to go so that `needed` bytes more can come; raise NoSpace if all that may is not enough."""
    bases = [eviction.Held.of(row) for row in _list(listed, "bases") if isinstance(row, dict)]
    free = _number(listed, "free")
    chosen = eviction.choose(bases, limit, free, needed, name)
    gone = sum(base.bytes for base in bases if base.name in chosen)
    left = eviction.missing([base for base in bases if base.name not in chosen], limit, free + gone, needed)
    if left > 0:
        raise NoSpace(f"no space for a base of {human(needed)} on {host}: {human(left)} over its size limit or free-space floor")
    return chosen


def _number(data: dict[str, object], key: str) -> int:
    value = data.get(key)
    return value if isinstance(value, int) else 0
