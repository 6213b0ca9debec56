# SPDX-License-Identifier: Apache-2.0
"""Which libvirt: the settings of OpenNebula's kvmrc that concern us."""

from __future__ import annotations

import os
import shlex

from ..named import NamedTuple
from ..tools.run import run


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


_site: list[Site] = []


def site() -> Site:
    """Return the settings of this host: the kvmrc lies beside our package on every host."""
    if not _site:
        top = os.path.abspath(__file__).rsplit("/", 4)[0]
        _site.append(Site.read(f"{top}/etc/vmm/kvm/kvmrc"))
    return _site[0]
