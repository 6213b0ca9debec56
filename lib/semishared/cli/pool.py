# SPDX-License-Identifier: Apache-2.0
"""Look after the pool of a host: the local devices on which disks and bases lie.

  list     which devices there are, how full, and what they hold
  add      make the pool what SEMISHARED_POOL of the host (or else [pool] in semishared.conf) declares: label
  new devices, and let
           those that are not declared any more take nothing more
  check    compare the devices with what is declared
  drain    move all disks and bases of a DEVICE to the others; from then on it takes nothing, until `add`
  takes it back
  rebalance  move as little as makes no device much fuller than the others

exit codes: 0 all is well; 1 check: something is not as it is declared; drain, rebalance: something stays
where it is, and a row says why; 2 the host could not be asked, or cannot have such a pool
"""

from __future__ import annotations

import argparse
import sys
from typing import List, Optional

from ..config import Config, load
from ..errors import BadArguments, BadPool
from ..front.pool_moves import Moving
from ..model.attributes import HOST_POOL
from ..model.device.classes import MEMORY
from ..model.device.steps import ListDevices, PoolDevice, SetDevices
from ..named import NamedTuple, to_data
from ..opennebula.report import printable
from ..opennebula.xml import Host
from ..plan.device import choose
from ..units import human
from ..wire.session import Session
from . import command as on
from . import progress
from .command import Row, argument, flag, put, put_json

MOVES = ("drain", "rebalance")
ARGUMENTS = (
    argument("verb", choices=("list", "add", "check", *MOVES)),
    argument(
        "hosts", metavar="HOST", help="a host, or A,B (drain, rebalance: one), by their names in OpenNebula"
    ),
    argument("device", metavar="DEVICE", nargs="?", help="drain: where the device is mounted, or its UUID"),
    on.rate_limit("drain, rebalance: bytes per second at most, e.g. 40M (default: no limit)"),
    flag("--dry-run", "drain, rebalance: say what would be moved, and change nothing"),
    flag("--json", "one JSON object on stdout instead of lines; JSON lines of what is moved"),
)


class Pool(NamedTuple):
    """A host's pool, as `--json` has it."""

    host: str
    devices: List[PoolDevice]
    changes: List[str]
    wrong: List[str]


def check(arguments: argparse.Namespace) -> None:
    """Raise BadArguments for options that a verb does not have: they would be taken for effective."""
    verb = arguments.verb
    if (verb == "drain") != (arguments.device is not None):
        missing = "drain needs the device: semishared pool drain HOST DEVICE"
        raise BadArguments(missing if verb == "drain" else f"{verb} takes no device")
    if verb not in MOVES and (arguments.rate is not None or arguments.dry_run):
        raise BadArguments(f"{verb} moves nothing: --rate and --dry-run are for drain and rebalance")


def declaration(host: Host, default: str) -> tuple[choose.Declared, ...]:
    """Return the devices that are declared for a host, none without a declaration; raise BadPool."""
    text = HOST_POOL.text(host) or default
    return () if text == "none" else choose.declared(text)


def run(arguments: argparse.Namespace) -> int:
    """Carry out `semishared pool`."""
    on.refuse_root()
    check(arguments)
    config, oned = load(), on.administrator()
    hosts, roots = on.named(oned.hosts(), arguments.hosts), on.roots(on.ours(oned.datastores()))
    if len(roots) > 1:
        what = "what is on a device could be another's than is asked"
        raise BadPool(f"datastores lie in {len(roots)} places on each host: {what}")
    if arguments.verb in MOVES:
        return move(arguments, config, hosts, roots)
    survey = on.Survey()

    def one(session: Session, host: Host) -> Pool:
        declared = declaration(host, config.pool_devices)
        devices: list[PoolDevice] = []
        changes: list[str] = []
        for root in roots:
            if arguments.verb == "add":
                if not declared:
                    raise BadPool(f"nothing declares a pool of {host.name}")
                words = tuple(device.word for device in declared)
                changed = session.ask(SetDevices(root, words, host.id))._asdict()
                changes += [f"{path}: {what}" for what, paths in changed.items() for path in paths]
            devices += session.ask(ListDevices(root)).devices
        wrong = [wrong.text for wrong in choose.differences(declared, devices)]
        return Pool(host.name, devices, changes, wrong)

    pools = list(survey.ask(hosts, "pool", config, one).values())
    survey.told(arguments, {"hosts": to_data(pools)}, lambda: show(pools, arguments.verb))
    if survey.errors:
        return 2
    return int(arguments.verb == "check" and any(pool.wrong for pool in pools))


def _state(device: PoolDevice) -> str:
    if device.state:
        return device.state
    if not device.weight:
        return "takes nothing more"
    return f"{len(device.lost)} disks are lost with what memory held" if device.lost else "ok"


def _columns(device: PoolDevice) -> list[str]:
    sizes = human(device.total), human(device.free)
    promised = human(device.promised) if device.class_ == MEMORY else "-"
    holds = str(device.disks), str(device.bases)
    what = device.path, device.class_ or "-", f"{device.weight:g}"
    return [*what, *sizes, promised, *holds, _state(device)]


def show(pools: list[Pool], verb: str) -> None:
    """Print a table of devices, what was changed, and what differs from its declaration."""
    if verb != "check":
        on.table(
            "HOST|DEVICE|CLASS|WEIGHT|SIZE|FREE|PROMISED|DISKS|BASES|STATE",
            [[pool.host, *_columns(device)] for pool in pools for device in pool.devices],
        )
    for pool in pools:
        if not pool.devices and verb != "check":
            put(f"{pool.host}: no pool: disks and bases lie below DATASTORE_LOCATION")
        for line in (*pool.changes, *pool.wrong):
            put(f"{pool.host}: {line}")
        if verb == "check" and not pool.wrong:
            put(f"{pool.host}: {len(pool.devices)} devices, as declared")


def move(arguments: argparse.Namespace, config: Config, hosts: List[Host], roots: List[str]) -> int:
    """Carry out drain or rebalance on one host; return the exit code."""
    if len(hosts) != 1:
        raise BadArguments(f"{arguments.verb} is for one host")
    limit = on.rate(arguments.rate)
    if not roots:
        raise BadArguments("OpenNebula has no datastore of semishared")
    (host,), (root,) = hosts, roots
    if host.is_offline:
        raise BadArguments(f"{host.name} is offline in OpenNebula")
    is_text = not arguments.json
    view: Optional[progress.Bars] = progress.Bars(sys.stderr) if is_text and sys.stderr.isatty() else None
    lines = progress.Lines(sys.stdout)

    def tell(**event: object) -> None:
        if not is_text:
            lines.tell(**event)
        elif event["event"] == "note" and view is None:
            put(printable(f"{event['host']}: {event['text']}"), flush=True)
        elif event["event"] == "vm":
            put(printable(text_of(event)), flush=True)
        elif view is not None:
            view.tell(**event)

    with Moving(config, host.name, root, tell, limit, is_dry=arguments.dry_run) as moving:
        rows = moving.drain(arguments.device) if arguments.verb == "drain" else moving.rebalance()
        is_over = not arguments.dry_run
        left = is_over and arguments.verb == "drain" and not moving.is_empty(arguments.device)
    failed = any(row["how"] in ("stays", "failed") for row in rows) or left
    summary = _summary(arguments, host.name, rows, left)
    if is_text:
        put(printable(summary))
    else:
        empty = not left if is_over else None
        put_json({"event": "summary", "empty": empty, "text": summary, "rows": rows}, None)
    return int(failed)


def text_of(row: Row) -> str:
    """Return a row's line."""
    where = f"{row['from']} -> {row['to']}" if row["to"] else str(row["from"])
    how = f"{row['how']}: {row['why']}" if row["why"] else str(row["how"])
    took = f" in {row['seconds']:.1f} s" if row["how"] == "moved" else ""
    return f"{row['what']}  {human(int(row['bytes']))}  {where}  {how}{took}"


def _summary(arguments: argparse.Namespace, host: str, rows: List[Row], left: bool) -> str:
    done = [row for row in rows if row["how"] in ("moved", "would move")]
    how = "would go" if arguments.dry_run else "have gone"
    said = f"{human(sum(int(row['bytes']) for row in done))}, {len(done)} of {len(rows)}, {how}"
    if arguments.verb == "rebalance":
        return f"{host}: {said}" if rows else f"{host}: no device is much fuller than the others"
    if arguments.dry_run:
        return f"{host}: {said}"
    state = "is not empty yet, and takes nothing more" if left else "is empty, and takes nothing more"
    return f"{host}: {said}; {arguments.device} {state}"
