# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that compares the pools of hosts with what declares them: only where one is
declared, or was.
"""

from __future__ import annotations

from ..config import Config
from ..errors import SemisharedError
from ..model.steps_device import ListDevices
from ..opennebula.oned import Oned
from ..opennebula.xml import Host
from ..plan import pool
from ..plan.diagnosis import BROKEN, WARNING, Cloud, Finding
from ..wire.session import Session
from . import hosts as on
from .pool import declaration

WATCH = "semishared-ram.sh enable SIZE KIND TIMES, once more (docs/how-to/pool.md)"


def findings(cloud: Cloud, config: Config) -> list[Finding]:
    """Return what is wrong."""
    wanted = [
        host for host in cloud.hosts if host.attribute("SEMISHARED_POOL") or config.pool_devices != "none"
    ]
    if not wanted:
        return []
    roots = on.roots(Oned())

    def one(session: Session, host: Host) -> list[pool.Wrong]:
        rows: list[dict[str, object]] = []
        for root in roots:
            (listed,) = session.run([ListDevices(root)])
            rows += listed["devices"] if isinstance(listed, dict) else []
        return pool.differences(_declared(host, config), rows) + pool.unreserved(rows, host.reserved_memory)

    # A host that does not answer is a finding of others.
    answers = on.Survey().ask(wanted, "doctor", config, one)
    return [_finding(host, wrong) for host, found in answers.items() for wrong in found]


def _finding(host: str, wrong: pool.Wrong) -> Finding:
    check = f"as oneadmin: semishared pool check {host}"
    severity, mend = {
        pool.ABSENT: (BROKEN, check),
        pool.CHANGED: (WARNING, check),
        pool.LOST: (WARNING, "onevm recover --recreate VM"),
        pool.UNRESERVED: (WARNING, f"onehost update {host}"),
        pool.UNWATCHED: (WARNING, f"as root on {host}: {WATCH}"),
        pool.LIMITED: (WARNING, f"as root on {host}: echo 0 >/sys/block/zram0/mem_limit, or whichever it is"),
        pool.OLD: (WARNING, f"as oneadmin: semishared pool add {host}"),
        pool.UNSAFE: (BROKEN, f"as root on {host}: {WATCH}; then, when no disk is there, stop and start it"),
    }[wrong.kind]
    return Finding(severity, host, f"pool: {wrong.text}", mend)


def _declared(host: Host, config: Config) -> "tuple[pool.Declared, ...]":
    try:
        return declaration(host, config.pool_devices)
    except SemisharedError:
        return ()  # its attributes are a finding of their own
