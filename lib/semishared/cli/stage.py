# SPDX-License-Identifier: Apache-2.0
"""Put bases of images onto hosts before VMs need them there: one reading of the store, one stream to all.

Each IMAGE goes to the hosts behind its @, or else to those that the options name: `stage web@h1,h2 db@h3` is
one session. What several hosts lack, of whichever images, is sent once; what one host alone lacks goes to
that host; what it has of another base is not sent. Hosts that have the base cost nothing. Progress goes to
the terminal as bars, else to stdout as JSON lines, of which the last is the summary.

exit codes: 0 every named host has its verified bases, or would get them (--dry-run); 1 some have not, and the
summary says which and why; 2 nothing was begun: oned, an image or the arguments
"""

from __future__ import annotations

import argparse
from typing import Any, Container, Dict, List, Mapping, Optional, Sequence, Tuple

from .. import NAME
from ..config import COMPRESSORS, Config, load
from ..errors import BadArguments, BadAttribute, NotSupported, OnedUnavailable, SemisharedError
from ..front import trail
from ..front.staging import Staging
from ..front.staging_look import Look
from ..front.staging_round import Outcome, Wanted, Wish
from ..model.attributes import STAGE
from ..named import to_data
from ..opennebula.oned import Oned
from ..opennebula.states import ImageState
from ..opennebula.xml import Datastore, Host, Image
from ..plan.base.sharing import TRANSPORTS
from ..plan.care.clusters import one_of
from ..plan.image import placement
from ..units import human
from . import command as on
from . import progress
from .command import argument, flag, put, warn

ARGUMENTS = (
    argument(
        "image", nargs="*", metavar="IMAGE[,IMAGE...][@HOST[,HOST...]]", help="ids or names; to which hosts"
    ),
    flag("--due", "all images with SEMISHARED_STAGE = on-upload (their own or their datastore's)"),
    *on.HOSTS,
    on.rate_limit("bytes per second that one host sends at most, e.g. 40M (default: semishared.conf)"),
    argument("--compress", choices=COMPRESSORS, help="default: semishared.conf, auto: what pays"),
    argument(
        "--transport",
        choices=TRANSPORTS,
        default="auto",
        help="default: auto: multicast, then chain, then unicast",
    ),
    flag("--wait", "wait where a clone or another session makes the base just now"),
    flag("--dry-run", "say which bases would come to which hosts, from where, and bring none"),
    flag("--json", "JSON lines also on a terminal"),
)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared stage`."""
    on.refuse_root()
    if arguments.due == bool(arguments.image):
        raise BadArguments("images are wanted, or --due")
    config, oned = load(), on.administrator()
    known = oned.hosts()
    hosts = on.chosen(known, arguments)
    wish = Wish(
        arguments.transport,
        arguments.compress or config.staging_compress,
        on.rate(arguments.rate) if arguments.rate else config.staging_rate,
        arguments.wait,
    )
    stores = {store.id: store for store in oned.datastores()}
    images = oned.images()
    if arguments.due:
        if arguments.hosts is None and arguments.cluster is None:
            # An offline host is meant to be away: no run of a timer fails for it.
            hosts = [host for host in hosts if not host.is_offline]
        known_stores = [(image, stores[image.store_id]) for image in images if image.store_id in stores]
        due = [(image, store, hosts) for image, store in known_stores if is_due(image, store)]
        return stage_each(oned, due, known, wish, config, arguments)
    orders = wanted(images, stores, arguments.image, hosts, known)
    return stage(oned, orders, known, wish, config, arguments)


Order = Tuple[Image, Datastore, List[Host]]
"""An image, its datastore, and its hosts."""


def wanted(
    images: list[Image],
    datastores: dict[int, Datastore],
    words: list[str],
    hosts: list[Host],
    known: list[Host],
) -> list[Order]:
    """Return the images with their hosts; raise BadArguments or NotSupported for an impossible one."""
    found, called = [], {image.name for image in images}
    for word in words:
        # Names may have any character: a whole name is tried first.
        names, at, places = (word, "", "") if word in called else word.partition("@")
        there = on.named(known, places) if at else hosts
        for name in [names] if names in called else names.split(","):
            image = Image(one_of(images, name.strip(), "image").element)
            trouble = cannot(image, datastores.get(image.store_id))
            if trouble:
                raise NotSupported(f"image {image.id}: {trouble}")
            found.append((image, datastores[image.store_id], there))
    return found


def cannot(image: Image, datastore: Datastore | None) -> str:
    """Return why an image has no bases, '' if it may have."""
    if datastore is None or datastore.driver != NAME:
        return f"its datastore is not of driver {NAME}"
    if image.is_persistent and not placement.is_diff(image, datastore):
        return "it is persistent: its disks are attached in place and never have a base"
    if not image.is_disk:
        return "it is no disk image"
    if image.state not in (ImageState.READY, ImageState.USED, ImageState.USED_PERS) or not image.source:
        return "it is not ready"
    return ""


def is_due(image: Image, datastore: Datastore) -> bool:
    """Tell whether an image is to be staged as soon as it exists."""
    try:
        return not cannot(image, datastore) and STAGE.value(image, datastore) == "on-upload"
    except BadAttribute as e:
        warn(f"{NAME} stage: {e.line()}")
        return False


def stage_each(
    oned: Oned,
    due: list[Order],
    known: list[Host],
    wish: Wish,
    config: Config,
    arguments: argparse.Namespace,
) -> int:
    """Stage each image in a session of its own; return the exit code.

    An image that fails does not keep the others from hosts, and a host that does not answer costs its time
    once: the sessions after that leave it out. The next run tries it again.
    """
    silent: Silent = {}
    worst = 0
    if arguments.json and not due:
        # A timer's run that has nothing to do has no line in a log; a program that asked gets its answer.
        nothing = Staging("", {}, [], wish, config, lambda **_: None)
        progress.view(arguments).summary(lambda: None, summary({}, nothing, is_dry=arguments.dry_run))
    for order in due:
        worst = max(worst, stage(oned, [order], known, wish, config, arguments, silent))
    for host, why in silent.items():
        warn(f"{NAME} stage: {host} is left out, and tried again by the next --due: {why}")
    return worst


Silent = Dict[str, str]
"""Hosts that could not be reached, and why."""


def stage(
    oned: Oned,
    orders: list[Order],
    known: list[Host],
    wish: Wish,
    config: Config,
    arguments: argparse.Namespace,
    silent: Optional[Silent] = None,
) -> int:
    """Stage images in one session, or only look at that (--dry-run); return the exit code.

    `silent`: hosts that are left out, which this session adds to; the caller says them. None: none is.
    """
    images = {image.id: image for image, _, _ in orders}
    view, is_dry = progress.view(arguments), arguments.dry_run
    kind = Look if is_dry else Staging
    try:
        with view:
            roots = on.roots(store for _, store, _ in orders)
            if len(roots) > 1:
                raise BadArguments(f"their datastores have base stores in several places: {', '.join(roots)}")
            wants: dict[str, list[Wanted]] = {}
            for image, store, hosts in orders:
                item = Wanted.of(image, store)
                for host in hosts:
                    if host.name not in (silent or ()):
                        wants.setdefault(host.name, []).append(item)
            session = kind(roots[0], wants, known, wish, config, view.tell)
            if wants or silent is None:
                reached(session, silent)
    except SemisharedError as e:
        warn(f"{NAME} stage: image {', '.join(map(str, images))}: {e.line()}")
        return 2
    outcome = summary(images, session, gone_of(oned, orders), silent or {}, is_dry=is_dry)
    moved, good = sum(outcome["bytes"].values()), [it for it, row in outcome["hosts"].items() if row["ok"]]
    if moved:
        what = f"image {', '.join(map(str, images))}: {moved} bytes; complete on {', '.join(good) or 'none'}"
        trail.note("stage bases", what, trail.OK if outcome["complete"] else "in part")
    view.summary(lambda: show(outcome, silent or {}), outcome)
    return 0 if outcome["complete"] or is_dry and would_be(outcome) else 1


def would_be(found: dict[str, Any]) -> bool:
    """Tell whether each host would have all its bases."""
    rows = found["hosts"].values()
    return not found["gone"] and all(row["ok"] or row["would"] and not row["why"] for row in rows)


def reached(session: Staging, silent: Optional[Silent]) -> None:
    """Run a session; note in `silent`, if given, the hosts that it could not reach.

    Raise as the session does, unless it fails for want of any host that answers.
    """
    try:
        session.run()
    except SemisharedError:
        if silent is None or not all(outcome.silent for outcome in session.hosts.outcomes.values()):
            raise
    finally:
        if silent is not None:
            found = session.hosts.outcomes.items()
            silent.update({host: outcome.silent for host, outcome in found if outcome.silent})


def gone_of(oned: Oned, orders: list[Order]) -> list[int]:
    """Return the images that oned has no more, or changed: no VM will start from their present bases."""
    found = set()
    for number, store in {image.id: store for image, store, _ in orders}.items():
        try:
            if cannot(oned.image(number), store):
                found.add(number)
        except OnedUnavailable:
            found.add(number)
    return sorted(found)


def summary(
    images: dict[int, Image],
    session: Staging,
    gone: Sequence[int] = (),
    silent: Mapping[str, str] = {},
    *,
    is_dry: bool = False,
) -> dict[str, Any]:
    """Return the results: per host, also those left out as `silent`, and the bytes from each source."""
    left_out = {name: Outcome(why) for name, why in silent.items()}
    rows = {name: outcome.data() for name, outcome in {**left_out, **session.hosts.outcomes}.items()}
    sources = {"stream": 0, "peers": 0, "store": 0, "here": 0}
    for outcome in session.hosts.outcomes.values():
        for name, entry in outcome.sources.items():
            sources[name if name in sources else "peers"] += entry.bytes
    stream = session.stream
    generations = {ref.id: ref.generation for ref in session.images.values()}
    return {
        "images": [
            {"id": image.id, "name": image.name, "generation": generations.get(image.id, "")}
            for image in images.values()
        ],
        "dry_run": is_dry,
        "transports": session.transports,
        "sender": session.sender,
        "seconds": round(session.seconds, 2),
        "bytes": sources,
        "common": session.common,
        "unique": session.unique,
        "stream": to_data(stream) if stream else {},
        "ratio": round(stream.packed / stream.plain, 3) if stream and stream.plain else None,
        "rate": int(stream.packed / session.seconds) if stream and session.seconds else None,
        "complete": not gone and all(row["ok"] for row in rows.values()),
        "hosts": rows,
        "gone": list(gone),
    }


def show(found: dict[str, Any], silent: Container[str] = ()) -> None:
    """Print the summary for a person, but for hosts that are `silent`: they get one line for all images."""
    good = [name for name, row in found["hosts"].items() if row["ok"]]
    ways = ", then ".join(found["transports"]) or "nothing to do"
    amounts = ", ".join(f"{human(size)} from {name}" for name, size in found["bytes"].items() if size)
    for image in found["images"]:
        put(f"image {image['id']} ({image['name']}), generation {image['generation'][:8]}")
    packed = f", packed to {found['ratio']:.0%}" if found["ratio"] else ""
    put(
        f"{len(good)} of {len(found['hosts'])} hosts; {ways}; {amounts or 'no bytes'}; "
        f"{found['seconds']} s{packed}"
    )
    for name, row in found["hosts"].items():
        for line in row["would"]:
            put(f"{name}: would {line}")
        if not row["ok"] and name not in silent and (row["why"] or not row["would"]):
            put(f"{name}: {row['why']}")
    for number in found["gone"]:
        put(
            f"image {number} was deleted, or is not ready any more: no VM starts from these "
            f"bases, and {NAME} gc removes them"
        )
