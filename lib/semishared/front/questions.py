# SPDX-License-Identifier: Apache-2.0
"""Answer a host that carries out a plan: what to remove for a base or for room, and whence to fetch.

    <DATASTORE_LOCATION>/.semishared/holders/<store>-<image>-<generation>      on the front-end
        {"holders": [HOST, ...], "arriving": [[HOST, SINCE, MAKER], ...]}

These are hints: a host that does not have the base (any more) says so, and the next one is asked.
Simultaneous clones on many cold hosts find one another here and become one chain (plan/base/sharing.py).
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Iterator

from ..config import NONE, Config
from ..errors import BadArguments, OnedUnavailable, SemisharedError
from ..model import answers
from ..model.base import names as base_names
from ..model.base.steps import Listed
from ..model.disk import names as disk_names
from ..opennebula.oned import Oned
from ..plan.base import eviction, sharing
from ..tools import files, locks, owner

KEEP_S = 30 * 86400
"""Hints that no action has touched for so many seconds go: mostly their images are gone."""


def _path(root: str, name: str) -> str:
    if not base_names.named(name):
        raise BadArguments(f"not a base: {name!r}")
    return base_names.holders(root, name)


@contextmanager
def _hints(root: str, name: str) -> Iterator[tuple[list[str], list[sharing.Arriving]]]:
    """Yield holders and arriving hosts, to be changed; what is in them at the end is written.

    A full front-end, or one that cannot read its hints, fails no deploy: then no host is known, and the store
    has the base.
    """
    path = _path(root, name)
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.exclusive(base_names.holders_lock(root), 30))
            holders, arriving = _read(path)
        except (SemisharedError, OSError):
            yield [], []
            return
        yield holders, arriving
        with suppress(SemisharedError, OSError):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            files.remove_stale(os.path.dirname(path))
            _forget_older(root, name)
            files.write_json(path, {"holders": holders, "arriving": [list(item) for item in arriving]})


def _read(path: str) -> tuple[list[str], list[sharing.Arriving]]:
    found = files.hint(path)
    holders = [str(host) for host in _list(found, "holders")]
    entries = [
        entry for entry in _list(found, "arriving") if isinstance(entry, list) and len(entry) in (2, 3)
    ]
    arriving = [sharing.Arriving(str(host), float(since), "".join(maker)) for host, since, *maker in entries]
    # A killed action has not reported its end, and its host side has gone with it.
    return holders, [
        item
        for item in arriving
        if not owner.is_gone(disk_names.staged(item.host, item.maker), other_boots=True)
    ]


def _list(found: dict[str, object], key: str) -> list[object]:
    value = found.get(key)
    return value if isinstance(value, list) else []


def _forget_older(root: str, name: str) -> None:
    """Remove hints about other generations of the image, which no clone needs any more, and old ones."""
    image = base_names.prefix_of(name)
    for entry in os.scandir(base_names.holders(root)):
        is_older = entry.name != name and base_names.prefix_of(entry.name) == image
        if is_older or entry.stat().st_mtime < time.time() - KEEP_S:
            files.unlink(entry.path)


def join(root: str, name: str, host: str, *, stays: bool = True) -> list[str]:
    """Note that `host` will get the base, if it is to stay there, and return the hosts to fetch it from."""
    return _join(root, name, host, stays)[0]


def _join(root: str, name: str, host: str, stays: bool) -> tuple[list[str], bool]:
    """As `join`; return also whether other hosts are getting it at this moment."""
    with _hints(root, name) as (holders, arriving):
        arriving[:] = [item for item in sharing.current(arriving, time.time()) if item.host != host]
        found, are_others = sharing.for_host(host, holders, arriving), bool(arriving)
        if stays:
            arriving.append(sharing.Arriving(host, time.time(), owner.suffix()))
    return found, are_others


def begin(root: str, name: str, hosts: list[str]) -> None:
    """Note that a session brings the base to `hosts`: a clone meanwhile follows one of them."""
    if hosts:
        with _hints(root, name) as (_, arriving):
            arriving[:] = [item for item in sharing.current(arriving, time.time()) if item.host not in hosts]
            arriving += [sharing.Arriving(host, time.time(), owner.suffix()) for host in hosts]


def leave(root: str, name: str, hosts: dict[str, bool]) -> None:
    """Note of each host whether it has the base now."""
    with _hints(root, name) as (holders, arriving):
        arriving[:] = [item for item in arriving if item.host not in hosts]
        holders[:] = [host for host in holders if host not in hosts] + [
            host for host, has in hosts.items() if has
        ]


def arrived(root: str, name: str, host: str, has: bool) -> None:
    """Note the result for a host that has asked for a base, if `join` has noted it.

    A base that the host only borrows is not noted: no other host can fetch it.
    """
    if not name:
        return
    with _hints(root, name) as (holders, arriving):
        if any(item.host == host for item in arriving):
            arriving[:] = [item for item in arriving if item.host != host]
            holders[:] = [other for other in holders if other != host] + [host] * has


def holders_of(root: str, name: str) -> list[str]:
    """Return the hosts that are said to have the base."""
    path = _path(root, name)
    try:
        return _read(path)[0]
    except (SemisharedError, OSError):
        return []


def answer(root: str, question: dict[str, Any], host: str, config: Config) -> dict[str, object]:
    """Return the answer to a `host` that asks for a base or for room (base/room.py).

    `arrived` must follow for its "name".
    """
    name = str(question.get("name", ""))
    if question.get("question") == "has":
        join(root, name, host)
        return {}
    listed, needed = answers.reported(question), eviction.number(question, "needed")
    limit = _limits(listed, host, config)
    if question.get("question") == "room":
        last = tuple(map(str, _list(question, "last")))
        return {"evict": _told(host, eviction.room_for_disk(listed, limit.floor, needed, last))}
    must, mends = (question.get(word) is True for word in ("must", "mends"))
    evict = eviction.room(listed, limit, host, needed, name, must=must, mends=mends)
    # No other host can have a content without a known generation.
    found, are_others = _join(root, name, host, question.get("stays") is not False) if name else ([], False)
    # A host in a chain, before or behind others, costs more than its own time.
    when = "last" if are_others else "quicker"
    return {
        "sources": found,
        "addresses": _at(found, config),
        "from_store": when,
        "codec": config.staging_compress,
        "rate": config.staging_rate,
        "evict": _told(host, evict),
    }


def _told(host: str, bases: list[str]) -> list[str]:
    """Return the bases that a host is to remove; the trail has them."""
    if bases:
        from . import trail

        trail.evicting(host, bases)
    return bases


def _at(hosts: list[str], config: Config) -> dict[str, str]:
    """Return where these hosts take bulk data, as far as they do not by their names."""
    if config.network_bulk == NONE:
        return {}
    from . import bulk_network

    known = bulk_network.addresses(config)
    return {host: known[host] for host in hosts if host in known}


def _limits(listed: Listed, host: str, config: Config) -> eviction.Limits:
    try:
        known = {item.name: item for item in Oned().hosts()}
    except OnedUnavailable:
        # A deploy needs no attributes of the host: without oned, the limits of all hosts hold.
        known = {}
    return eviction.limits_of(known.get(host), config.bases_size_limit, config.bases_free_floor, listed)
