# SPDX-License-Identifier: Apache-2.0
"""This machine's names and addresses, the equality of two host names, and its Python packages.

Labels are not compared: x9.siteb.example is another machine than the x9 of this site, and `HOSTNAME` of
oned.conf may be any name. A name may have addresses that many machines share (libvirt's bridge, a service)
beside the one that reaches it.
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache

from ..errors import SemisharedError
from .run import run

_DISCARD = 9
"""A port for connect(2) on UDP, which sends nothing."""


def login() -> str:
    """Return the user of this process, under sudo the one that called it; its number, if it has no name."""
    import pwd  # for the operator's commands alone

    try:
        return os.environ.get("SUDO_USER") or pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


@cache
def is_here(host: str) -> bool:
    """Return True if `host` is this machine; False for a name that only ssh may be able to resolve."""
    return host.lower() in (os.uname().nodename.lower(), "localhost") or _leads_here(host)


@cache
def are_one(name: str, other: str) -> bool:
    """Return True if both names mean one machine: equal, both local, or one's addresses in the other's."""
    if name.lower() == other.lower():
        return True
    if is_here(name) or is_here(other):
        return is_here(name) and is_here(other)
    ways, others = ({address[0] for _, address in _ways(machine)} for machine in (name, other))
    return bool(ways and others) and (ways <= others or others <= ways)


def _leads_here(host: str) -> bool:
    """Return True if ssh to `host` would reach this machine: the first of its addresses is local."""
    return any(_is_ours(family, address) for family, address in _ways(host)[:1])


def _ways(host: str) -> list[tuple[int, tuple[object, ...]]]:
    """Return family and address of each address of a name, the best first; [] if it does not resolve."""
    import _socket as socket  # socket makes enums of its constants: a tenth of the start of mv

    try:
        found = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM) if host else []
    except (OSError, UnicodeError):
        return []
    return [(family, address) for family, _, _, _, address in found]


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    """Return True if an address is local: packets to it have it as source. All of 127/8 has one source."""
    import _socket as socket

    if str(address[0]).startswith("127."):
        return True

    try:
        probe = socket.socket(family, socket.SOCK_DGRAM)
    except OSError:
        return False
    try:
        probe.connect(address)
        return bool(probe.getsockname()[0] == address[0])
    except OSError:
        return False
    finally:
        probe.close()


ANSWER_S = 3
MOST_ADDRESSES = 64
"""More than any host of a cloud has; it bounds a line of monitoring."""


def addresses() -> list[str]:
    """Return this machine's global addresses, as Ceph writes them; [] if `ip` fails."""
    try:
        links = json.loads(run(["ip", "-j", "address", "show", "up", "scope", "global"], timeout_s=ANSWER_S))
        found = [str(row["local"]) for link in links for row in link.get("addr_info", ()) if "local" in row]
    except (SemisharedError, ValueError, TypeError):
        return []
    return sorted(found)[:MOST_ADDRESSES]


def runs(program: str) -> bool:
    """Return True if a process of this machine has a program, or a script, of that file name.

    Processes of other users count as far as /proc shows them. It is as true without systemd as with it, and
    of a process whose pid file is gone, or is another process's by now.
    """
    for process in os.listdir("/proc"):
        if not process.isdigit():
            continue
        try:
            with open(f"/proc/{process}/cmdline", "rb") as file:
                words = file.read(1 << 16).split(b"\0")
        except OSError:
            continue  # it has ended
        # Not a word behind these: an editor that has the file open is none.
        if any(os.path.basename(word) == program.encode() for word in words[:2]):
            return True
    return False


def reach_bindings() -> None:
    """Make the machine's packages importable (bindings of libvirt and Ceph); call it right before the import.

    All programs of semishared start with -S: without it Python scans those packages and loads the modules
    that their .pth files name, which takes 2 to 10 ms.
    """
    if sys.flags.no_site:
        import site

        sys.path += [path for path in site.getsitepackages() if path not in sys.path and os.path.isdir(path)]
