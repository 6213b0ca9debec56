# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the fencing of hosts: with its means, and with hosts that were fenced and are back."""

from __future__ import annotations

import re
from typing import Any, Mapping, Union

from .. import NAME as DRIVER
from .diagnosis import BROKEN, WARNING, Finding
from .fence import BEGUN, Mark

NETWORK = r"(nfs4?|ceph|lustre|gpfs|beegfs|glusterfs|gfs2|ocfs2|9p|virtiofs|fuse\..*)\Z"
"""Types of file systems that several machines may have."""


def of_fenced(marks: Mapping[str, Mark], boots: Mapping[str, str]) -> list[Finding]:
    """Judge the marks of hosts; `boots`: the boot ids of those that answer."""
    found = []
    for host, mark in marks.items():
        boot = boots.get(host, "")
        if mark.strange:
            found.append(Finding(BROKEN, host, mark.strange, "docs/how-to/dead-host.md"))
        if not mark.stands:
            continue
        if mark.state == BEGUN and (mark.shut_nothing_out or not boot):
            mend = f"{DRIVER} fence {host}" + (
                f"; if it lives, {DRIVER} fence --lift {host}" if mark.shut_nothing_out else ""
            )
            found.append(
                Finding(BROKEN, host, "its fencing was begun and did not end: it may still write", mend)
            )
        elif boot and boot == mark.boot:
            mend = f"restart {host}; then {DRIVER} fence --lift {host}"
            found.append(
                Finding(
                    BROKEN,
                    host,
                    "it was fenced, and runs on with the guests of then: none of them can write",
                    mend,
                )
            )
        elif boot:
            mend = f"{DRIVER} fence --lift {host}"
            found.append(
                Finding(
                    WARNING,
                    host,
                    "it was fenced, and is back: until it is let in, it has no images on Ceph",
                    mend,
                )
            )
    return found


def of_means(command: str, keys: Mapping[str, str], front_end: str) -> list[Finding]:
    """Judge the means: why the fencing command cannot be run, '' if it can or there is none; per datastore
    why the key is not good.
    """
    found = []
    if command:
        found.append(
            Finding(
                BROKEN,
                front_end,
                f"[fence] command: {command}",
                f"edit etc/{DRIVER}.conf: hosts cannot be switched off",
            )
        )
    for name, why in keys.items():
        if why:
            mend = (
                f"{DRIVER} caps --role fence {name}: for the cluster's admin, and its keyring on "
                f"each front-end"
            )
            found.append(
                Finding(BROKEN, front_end, f"datastore {name}: a dead host cannot be shut out: {why}", mend)
            )
    return found


def of_keys(answers: Mapping[str, Union[Mapping[str, Any], str]], front_end: str, path: str) -> list[Finding]:
    """Judge the keys of front-ends: what each says of its own, or why it says nothing."""
    found, here = [], answers.get(front_end, {})
    own = "" if isinstance(here, str) else here.get("code", "")
    for machine, said in answers.items():
        if isinstance(said, str):
            what = f"{path}: nobody knows whether this front-end has the same as {front_end}: {said}"
            found.append(Finding(WARNING, machine, what, f"as oneadmin on {front_end}: ssh {machine} true"))
            continue
        mend = f"as oneadmin on {front_end}: scp -p {path} {machine}:{path}"
        if machine == front_end:
            mend = f"if it is there: chown oneadmin: and chmod 600; else as oneadmin: {DRIVER} setup --key"
        if said.get("why_not"):
            found.append(
                Finding(BROKEN, machine, f"{path} {said['why_not']}: hosts cannot be fenced from here", mend)
            )
        elif own and said.get("code") != own:
            what = f"{path} is another than that of {front_end}: neither believes the other's marks of fences"
            found.append(Finding(BROKEN, machine, what, mend))
        if re.match(NETWORK, str(said.get("on"))):
            what = f"{path} lies on a file system that other machines may have too ({said.get('on')})"
            found.append(
                Finding(
                    WARNING, machine, what, "have it on a disk of the front-end's own: hosts must not read it"
                )
            )
    return found
