# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the fencing of hosts: with its means, and with hosts that were fenced and are back."""

from __future__ import annotations

from typing import Mapping, Sequence

from .. import NAME as DRIVER
from ..opennebula.xml import Host
from .diagnosis import BROKEN, WARNING, Finding
from .fence import BEGUN, mark_of


def of_fenced(hosts: Sequence[Host], boots: Mapping[str, str]) -> list[Finding]:
    """Judge the marks of hosts; `boots`: the boot ids of those that answer."""
    found = []
    for host in hosts:
        mark, boot = mark_of(host), boots.get(host.name, "")
        if not mark.stands:
            continue
        if mark.state == BEGUN and (mark.shut_nothing_out or not boot):
            mend = f"{DRIVER} fence {host.name}" + (f"; if it lives, {DRIVER} fence --lift {host.name}" if mark.shut_nothing_out else "")
            found.append(Finding(BROKEN, host.name, "its fencing was begun and did not end: it may still write", mend))
        elif boot and boot == mark.boot:
            mend = f"restart {host.name}; then {DRIVER} fence --lift {host.name}"
            found.append(Finding(BROKEN, host.name, "it was fenced, and runs on with the guests of then: none of them can write", mend))
        elif boot:
            mend = f"{DRIVER} fence --lift {host.name}"
            found.append(Finding(WARNING, host.name, "it was fenced, and is back: until it is let in, it has no images on Ceph", mend))
    return found


def of_means(command: str, keys: Mapping[str, str], front_end: str) -> list[Finding]:
    """Judge the means: why the fencing command cannot be run, '' if it can or there is none; per datastore why the key is not good."""
    found = []
    if command:
        found.append(Finding(BROKEN, front_end, f"[fence] command: {command}", f"edit etc/{DRIVER}.conf: hosts cannot be switched off"))
    for name, why in keys.items():
        if why:
            mend = f"{DRIVER} caps --role fence {name}: for the cluster's admin, and its keyring on each front-end"
            found.append(Finding(BROKEN, front_end, f"datastore {name}: a dead host cannot be shut out: {why}", mend))
    return found
