# SPDX-License-Identifier: Apache-2.0
"""OpenNebula's kvmrc, and questions to libvirt about other things than a running guest, by virsh.

Removals and moves ask for domains, their files and secrets on hosts that run no guest of the VM. A question
costs 11 ms of CPU by virsh, 15 ms by an import of the binding (libvirtd.py). The answers are lists of words.
"""

from __future__ import annotations

import os
import re
import shlex

from ..errors import MigrationRefused, SemisharedError
from ..named import NamedTuple
from ..tools.run import run


class Site(NamedTuple):
    """The settings of kvmrc that this suite uses, with kvmrc's defaults."""

    uri: str = "qemu:///system"
    protocol: str = "qemu+ssh"
    migrate_options: tuple[str, ...] = ()
    tries: int = 3
    sync_time: bool = False
    compact_memory: bool = False

    @classmethod
    def read(cls, path: str) -> Site:
        """Return the settings in the shell file `path`, the defaults without it."""
        default = cls()
        if not os.path.isfile(path):
            return default
        # bash reads the file, as in the stock scripts; unlike those, this looks at the result.
        program = 'set -a; . "$1" >/dev/null 2>&1 </dev/null; exec env -0'
        pairs = (item.partition("=") for item in run(["bash", "-c", program, "kvmrc", path]).split("\0"))
        env = {name: value for name, _, value in pairs}
        tries = env.get("VIRSH_TRIES", "")
        return cls(
            uri=env.get("LIBVIRT_URI") or default.uri,
            protocol=env.get("QEMU_PROTOCOL") or default.protocol,
            migrate_options=tuple(shlex.split(env.get("MIGRATE_OPTIONS", ""))),
            tries=int(tries) if tries.isdigit() and int(tries) else default.tries,
            sync_time=env.get("SYNC_TIME", "").upper() == "YES",
            compact_memory=env.get("CLEANUP_MEMORY_ON_STOP", "").upper() == "YES",
        )

    def uri_of(self, host: str) -> str:
        """Return the URI of another host's libvirtd."""
        return f"{self.protocol}://{host}/system"


_site: list[Site] = []


def site() -> Site:
    """Return the settings of this host: its kvmrc lies beside this package."""
    if not _site:
        top = os.path.abspath(__file__).rsplit("/", 4)[0]
        _site.append(Site.read(f"{top}/etc/vmm/kvm/kvmrc"))
    return _site[0]


ANSWER_S = 20
"""Limit for a question: libvirtd answers at once, or its host is gone."""


def _virsh(*argv: str) -> str:
    return run(["virsh", "--connect", site().uri, "--quiet", *argv], timeout_s=ANSWER_S)


def versions() -> dict[str, str]:
    """Return the versions of QEMU and of the libvirtd that starts it, {} if that does not say."""
    try:
        said = _virsh("version", "--daemon")
    except SemisharedError:
        return {}
    words = r"(?m)^Running (?:hypervisor: (QEMU)|against daemon:) ([0-9.]+)$"
    return {name or "libvirt": version for name, version in re.findall(words, said)}


def active_domains() -> set[str]:
    """Return names and UUIDs of the domains that run on this host, paused ones too."""
    return set(_virsh("list", "--name", "--uuid").split())


def check_not_running(domain: str) -> None:
    """Raise MigrationRefused if a domain runs on this host; '' is the name on a machine without guests."""
    if domain and domain in active_domains():
        raise MigrationRefused(f"domain {domain} still runs on {os.uname().nodename}, nothing was removed")


def why_in_use(name: str) -> str:
    """Return why the domain may run here, '' if it is known not to; `name` is '' where no guests run."""
    if not name:
        return ""
    try:
        return f"domain {name} runs there" if name in active_domains() else ""
    except SemisharedError as e:
        return f"libvirt cannot be asked: {e.detail}"


def names_and_files() -> tuple[list[str], list[str]]:
    """Return names of all domains of this host and the files that they use."""
    names = _virsh("list", "--all", "--name").split()
    stats = _virsh("domstats", "--block") if names else ""
    return names, re.findall(r"(?m)^\s*block\.[0-9]+\.path=(.*)$", stats)


def secrets() -> list[str]:
    """Return the words of `virsh secret-list`, among them the UUIDs of libvirt's secrets."""
    return _virsh("secret-list").split()
