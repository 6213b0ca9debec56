# SPDX-License-Identifier: Apache-2.0
"""What libvirt knows on this host, asked where no guest is touched: names of domains, their files, secrets.

By virsh, and not by the binding (libvirtd.py): removals and moves ask this on hosts that run no guest of the
VM, and one question is cheaper by a program (11 ms of CPU) than by an import (15 ms). What it says is a list
of words, nothing to parse.
"""

from __future__ import annotations

import re

from ..errors import SemisharedError
from ..tools.run import run
from .kvmrc import site

ANSWER_S = 20
"""libvirtd answers at once, or its host is not there."""


def _virsh(*argv: str) -> str:
    return run(["virsh", "--connect", site().uri, "--quiet", *argv], timeout_s=ANSWER_S)


def active() -> set[str]:
    """Return names and UUIDs of the domains that run on this host, paused ones too."""
    return set(_virsh("list", "--name", "--uuid").split())


def why_in_use(name: str) -> str:
    """Return why the domain may run on this host, '' if it is known not to; '' as a name is a machine that
    runs none.
    """
    if not name:
        return ""
    try:
        return f"domain {name} runs there" if name in active() else ""
    except SemisharedError as e:
        return f"libvirt cannot be asked: {e.detail}"


def names_and_files() -> dict[str, list[str]]:
    """Return names of all domains of this host and the files that they use."""
    names = _virsh("list", "--all", "--name").split()
    stats = _virsh("domstats", "--block") if names else ""
    return {"names": names, "files": re.findall(r"(?m)^\s*block\.[0-9]+\.path=(.*)$", stats)}


def secrets() -> list[str]:
    """Return the UUIDs of the secrets that libvirt knows on this host, among what else it says of them."""
    return _virsh("secret-list").split()
