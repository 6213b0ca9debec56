# SPDX-License-Identifier: Apache-2.0
"""The part of oned.conf and vmm_execrc that drivers can notice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, FrozenSet, Tuple

from semishared.install.configuration import INHERITED, LEAST

# What a driver script finds in its environment (recorded); no ONE_LOCATION, no ONE_XMLRPC.
DRIVER_ENVIRONMENT: Dict[str, str] = {
    "HOME": "/var/lib/one",
    "LANG": "C.UTF-8",
    "ONE_MAD_DEBUG": "1",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PRIORITY": "19",
}

# Of a Ceph datastore what a stock oned.conf lets every disk have. RBD_FORMAT and EC_POOL_NAME are not among
# it.
CEPH = ("CEPH_HOST", "CEPH_SECRET", "CEPH_KEY", "CEPH_USER", "CEPH_CONF", "CEPH_TRASH", "POOL_NAME")


@dataclass(frozen=True)
class Settings:
    """Configuration of one simulated oned."""

    front_end: str = "fe"
    location: str = "/var/lib/one//datastores"
    vms: str = "/var/lib/one/vms"
    remotes: str = "/var/lib/one/remotes"
    host_remotes: str = "/var/tmp/one"
    version: str = "7.4.0"
    session: str = "oneadmin:password"
    vm_mad: str = "kvm"
    vmm_dir: str = "semishared"
    domain_type: str = "kvm"
    emulator: str = "/usr/bin/qemu-kvm-one"
    device_prefix: str = "vd"
    guest_agent: bool = False
    """Default of FEATURES/GUEST_AGENT: yes in the stock vmm_exec_kvm.conf, but the lab's guests have no
    agent.
    """
    threads: int = 15
    """What datastore and hypervisor actions run at once; `tm_threads`: transfers, as install.sh has oned.conf
    say.
    """
    tm_threads: int = LEAST
    timeout: float = 900.0
    tm_drivers: Tuple[str, ...] = ("semishared",)
    live_disk_snapshots: FrozenSet[str] = frozenset({"kvm-semishared", "qemu-semishared"})
    inherit_image: Tuple[str, ...] = (
        "DISK_TYPE",
        "SPARSE",
        "SERIAL",
        "LUKS_SECRET",
        *INHERITED["INHERIT_IMAGE_ATTR"],
    )
    inherit_datastore: Tuple[str, ...] = (
        "SPARSE",
        "PERSISTENT_SNAPSHOTS",
        *CEPH,
        *INHERITED["INHERIT_DATASTORE_ATTR"],
    )
    environment: Dict[str, str] = field(default_factory=lambda: dict(DRIVER_ENVIRONMENT))
