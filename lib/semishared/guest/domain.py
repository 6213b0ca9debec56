# SPDX-License-Identifier: Apache-2.0
"""Domains, through virsh, as the stock scripts reach them."""

from __future__ import annotations

import os
import re
import shlex
from typing import Callable, NamedTuple

from ..errors import SemisharedError
from ..tools.run import run, work

NO_TIME_LIMIT_S = 7 * 24 * 3600
"""A live migration takes as long as the guest keeps writing; whoever wants a limit has virsh's --timeout."""
ANSWER_S = 20
"""libvirtd answers at once, or its host is not there."""
STATES = {
    "running": "running",
    "idle": "running",
    "in shutdown": "running",
    "pmsuspended": "running",
    "paused": "paused",
    "shut off": "off",
    "crashed": "off",
}


class Site(NamedTuple):
    """The settings of kvmrc that concern us, with its defaults."""

    uri: str = "qemu:///system"
    protocol: str = "qemu+ssh"
    migrate_options: tuple[str, ...] = ()
    tries: int = 3
    sync_time: bool = False
    compact_memory: bool = False

    @classmethod
    def read(cls, path: str) -> Site:
        """Return the settings in the shell file `path`, the defaults if there is none."""
        default = cls()
        if not os.path.isfile(path):
            return default
        # Like the stock scripts, let bash read it; unlike them, look at the result and not at the text.
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
        """Return the address of the libvirtd of another host."""
        return f"{self.protocol}://{host}/system"


HERE = ""
"""In place of a URI: this host's own libvirt."""
_here = ""


def here() -> str:
    """Return the URI of this host's libvirt: LIBVIRT_URI of the kvmrc that lies beside our package on every host."""
    global _here
    if not _here:
        top = os.path.abspath(__file__).rsplit("/", 4)[0]
        _here = Site.read(f"{top}/etc/vmm/kvm/kvmrc").uri
    return _here


def virsh(uri: str, *argv: str, timeout_s: float = ANSWER_S) -> str:
    """Run one virsh command; `uri` is an address or HERE."""
    return run(["virsh", "--connect", uri or here(), *argv], timeout_s=timeout_s)


def active() -> set[str]:
    """Return names and UUIDs of the domains that run on this host, paused ones too."""
    return {word for kind in ("--name", "--uuid") for word in virsh(HERE, "--quiet", "list", kind).split()}


def why_in_use(name: str) -> str:
    """Return why the domain may run on this host, '' if it is known not to; '' as a name is a machine that runs none."""
    if not name:
        return ""
    try:
        return f"domain {name} runs there" if name in active() else ""
    except SemisharedError as e:
        return f"libvirt cannot be asked: {e.detail}"


def virsh_while(signs: Callable[[], object], uri: str, *argv: str) -> str:
    """Run one virsh command that waits for a job, as long as `signs` change; `uri` as for virsh."""
    return work(["virsh", "--connect", uri or here(), *argv], signs=signs)


def dumpxml(uri: str, domain: str) -> bytes:
    """Return the XML of a domain as it runs."""
    return virsh(uri, "dumpxml", domain).encode()


def state(uri: str, domain: str) -> str:
    """Return running, paused, off, absent or unknown; absent only if libvirtd lists its domains and it is not among them."""
    try:
        if domain not in virsh(uri, "list", "--all", "--uuid", "--name").split():
            return "absent"
        return STATES.get(virsh(uri, "domstate", domain).strip(), "unknown")
    except SemisharedError:
        return "unknown"


def is_persistent(uri: str, domain: str) -> bool:
    """Tell whether a domain is defined, not only running."""
    return bool(re.search(r"^Persistent:\s+yes$", virsh(uri, "dominfo", domain), re.MULTILINE))


def snapshots(uri: str, domain: str) -> list[str]:
    """Return the names of a domain's system snapshots."""
    return virsh(uri, "snapshot-list", domain, "--name").split()


def migrate(uri: str, domain: str, target: str, options: list[str]) -> None:
    """Move a running domain to the libvirtd `target`."""
    virsh(uri, "migrate", "--live", *options, domain, target, timeout_s=NO_TIME_LIMIT_S)
