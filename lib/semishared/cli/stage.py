# SPDX-License-Identifier: Apache-2.0
"""Put an image's base onto hosts before VMs need it there: one reading of the store, one stream to all.

Hosts that have the base cost nothing, and one that has a part of it gets the rest. Progress goes to the terminal as bars,
else to stdout as JSON lines, of which the last is the summary.

exit codes: 0 every named host has a verified base; 1 some have not, and the summary says which and why; 2 nothing was
begun: oned, the image or the arguments
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from .. import NAME
from ..config import COMPRESSORS, Config, load
from ..errors import BadArguments, BadAttribute, NotSupported, SemisharedError
from ..front.staging import Staging
from ..front.staging_hosts import Wish
from ..model import layout, stores
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host, Image
from ..plan.images import image_ref
from ..plan.staging import TRANSPORTS, when
from ..units import human
from . import hosts as on
from .base import rate
from .progress import Bars, Lines

READY, USED = 1, 2
"""States of images that can be staged (include/Image.h)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("image", nargs="?", metavar="IMAGE", help="id or name")
    parser.add_argument(
        "--due", action="store_true", help="all images with SEMISHARED_STAGE = on-upload (their own or their datastore's)"
    )
    on.add_arguments(parser)
    parser.add_argument("--rate", metavar="R", help="bytes per second that one host sends at most, e.g. 40M (default: semishared.conf)")
    parser.add_argument("--compress", choices=COMPRESSORS, help="default: semishared.conf, auto: what pays")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="default: auto: multicast, then chain, then unicast")
    parser.add_argument("--wait", action="store_true", help="wait where a clone or another session makes the base just now")
    parser.add_argument("--json", action="store_true", help="JSON lines also on a terminal")


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared stage`."""
    if os.geteuid() == 0:
        print(f"{NAME} stage: run this as oneadmin: files of root would be in the drivers' way", file=sys.stderr)
        return 2
    if arguments.due == bool(arguments.image):
        raise BadArguments("one image is wanted, or --due")
    config, oned = load(), Oned()
    oned.require_admin()
    hosts = on.chosen(oned.hosts(), arguments)
    wish = Wish(
        arguments.transport, arguments.compress or config.staging_compress,
        rate(arguments.rate) if arguments.rate else rate("0" if config.staging_rate == "none" else config.staging_rate),
        arguments.wait,
    )  # fmt: skip
    is_text = sys.stdout.isatty() and not arguments.json
    code = 0
    for image, datastore in wanted(oned, arguments):
        code = max(code, stage(image, datastore, hosts, wish, config, is_text))
    return code


def wanted(oned: Oned, arguments: argparse.Namespace) -> list[tuple[Image, Datastore]]:
    """Return the images to stage, with their datastores; raise BadArguments or NotSupported for one that cannot be."""
    datastores = {store.id: store for store in oned.datastores()}
    images = oned.images()
    if arguments.due:
        pairs = [(image, datastores[image.store_id]) for image in images if image.store_id in datastores]
        return [pair for pair in pairs if is_due(*pair)]
    found = [image for image in images if arguments.image in (str(image.id), image.name)]
    if len(found) > 1:
        found = [image for image in found if str(image.id) == arguments.image] or found
    if len(found) != 1:
        what = f"{len(found)} images are called" if found else "no image"
        raise BadArguments(f"{what} {arguments.image!r} in OpenNebula{': name one by its id' if found else ''}")
    image = found[0]
    trouble = cannot(image, datastores.get(image.store_id))
    if trouble:
        raise NotSupported(f"image {image.id}: {trouble}")
    return [(image, datastores[image.store_id])]


def cannot(image: Image, datastore: Datastore | None) -> str:
    """Return why an image has no bases, '' if it may have."""
    if datastore is None or datastore.driver != NAME:
        return f"its datastore is not of driver {NAME}"
    if image.is_persistent:
        return "it is persistent: its disks are attached in place and never have a base"
    if image.type not in (0, 2):
        return "it is no disk image"
    if image.number("STATE") not in (READY, USED) or not image.source:
        return "it is not ready"
    return ""


def is_due(image: Image, datastore: Datastore) -> bool:
    """Tell whether an image is to be staged as soon as it is there."""
    try:
        return not cannot(image, datastore) and when(image, datastore) == "on-upload"
    except BadAttribute as e:
        print(f"{NAME} stage: {e.line()}", file=sys.stderr)
        return False


def stage(image: Image, datastore: Datastore, hosts: list[Host], wish: Wish, config: Config, is_text: bool) -> int:
    """Stage one image; return the exit code."""
    root = layout.base_store(os.path.dirname(absolute(datastore.base_path, "BASE_PATH")))
    view = Bars(sys.stderr) if is_text else Lines(sys.stdout)
    try:
        found = image_ref(image, datastore)
        session = Staging(root, found, stores.bridge(datastore, image.id), hosts, wish, config, view.tell)
        session.run()
    except SemisharedError as e:
        view.close()
        print(f"{NAME} stage: image {image.id}: {e.line()}", file=sys.stderr)
        return 2
    view.close()
    outcome = summary(image, session)
    if is_text:
        show(outcome)
    else:
        print(json.dumps({"event": "summary", **outcome}), flush=True)
    return 0 if outcome["complete"] else 1


def summary(image: Image, session: Staging) -> dict[str, Any]:
    """Return what became of it: per host, and the bytes from each source."""
    rows = {name: outcome.data() for name, outcome in session.hosts.outcomes.items()}
    sources = {"stream": 0, "peers": 0, "store": 0}
    for outcome in session.hosts.outcomes.values():
        for name, entry in outcome.sources.items():
            sources[name if name in ("stream", "store") else "peers"] += entry["bytes"]
    stream = session.stream
    plain, packed = stream.get("plain"), stream.get("packed")
    return {
        "image": image.id, "name": image.name, "generation": session.image.generation, "transports": session.transports,
        "sender": session.sender, "seconds": round(session.seconds, 2), "bytes": sources, "stream": stream,
        "ratio": round(packed / plain, 3) if isinstance(plain, int) and isinstance(packed, int) and plain else None,
        "rate": int(packed / session.seconds) if isinstance(packed, int) and session.seconds else None,
        "complete": all(outcome.ok for outcome in session.hosts.outcomes.values()), "hosts": rows,
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print the summary for a person."""
    good = [name for name, row in found["hosts"].items() if row["ok"]]
    ways = ", then ".join(found["transports"]) or "nothing to do"
    amounts = ", ".join(f"{human(size)} from {name}" for name, size in found["bytes"].items() if size)
    print(f"image {found['image']} ({found['name']}), generation {found['generation'][:8]}: {len(good)} of {len(found['hosts'])} hosts")
    packed = f", packed to {found['ratio']:.0%}" if found["ratio"] else ""
    print(f"{ways}; {amounts or 'no bytes'}; {found['seconds']} s{packed}")
    for name, row in found["hosts"].items():
        if not row["ok"]:
            print(f"{name}: {row['why']}")
