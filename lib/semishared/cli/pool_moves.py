# SPDX-License-Identifier: Apache-2.0
"""`semishared pool drain` and `rebalance`: what was moved, what stays and why, and progress meanwhile."""

from __future__ import annotations

import argparse
import sys
from typing import List, Sequence

from ..config import Config
from ..errors import BadArguments
from ..front.pool_moves import Moving
from ..opennebula.report import printable
from ..opennebula.xml import Host
from ..plan.device.pool_rows import Row
from ..units import human
from .base import rate
from .command import put, put_json
from .progress import Bars, Lines


def run(arguments: argparse.Namespace, config: Config, hosts: Sequence[Host], roots: Sequence[str]) -> int:
    """Carry out one of the two on one host; return the exit code."""
    if len(hosts) != 1:
        raise BadArguments(f"{arguments.verb} is for one host")
    limit = 0 if arguments.rate is None else rate(arguments.rate)
    if not roots:
        raise BadArguments("OpenNebula has no datastore of semishared")
    (host,), (root,) = hosts, roots
    if host.is_offline:
        raise BadArguments(f"{host.name} is offline in OpenNebula")
    is_text = not arguments.json
    view = Bars(sys.stderr) if is_text and sys.stderr.isatty() else None
    lines = Lines(sys.stdout)

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
        put_json(
            {"event": "summary", "empty": not left if is_over else None, "text": summary, "rows": rows}, None
        )
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
