# SPDX-License-Identifier: Apache-2.0
"""The part of `semishared doctor` that compares the pools of hosts with what declares them: only where one is declared, or was."""

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


def findings(cloud: Cloud, config: Config) -> list[Finding]:
    """Return what is wrong."""
    wanted = [host for host in cloud.hosts if host.attribute("SEMISHARED_POOL") or config.pool_devices != "none"]
    if not wanted:
        return []
    roots = on.roots(Oned())

    def one(session: Session, host: Host) -> list[str]:
        rows: list[dict[str, object]] = []
        for root in roots:
            (listed,) = session.run([ListDevices(root)])
            rows += listed["devices"] if isinstance(listed, dict) else []
        return pool.differences(_declared(host, config), rows) + pool.unreserved(rows, host.reserved_memory)

    # A host that does not answer is a finding of others.
    answers = on.Survey().ask(wanted, "doctor", config, one)
    return [_finding(host, text) for host, texts in answers.items() for text in texts]


def _finding(host: str, text: str) -> Finding:
    if text.endswith(pool.LOST):
        return Finding(WARNING, host, f"pool: {text}", "onevm recover --recreate VM")
    if "RESERVED_MEM" in text:
        return Finding(WARNING, host, f"pool: {text}", f"onehost update {host}")
    return Finding(WARNING if "pool add" in text else BROKEN, host, f"pool: {text}", f"as oneadmin: semishared pool check {host}")


def _declared(host: Host, config: Config) -> "tuple[pool.Declared, ...]":
    try:
        return declaration(host, config.pool_devices)
    except SemisharedError:
        return ()  # its attributes are a finding of their own
