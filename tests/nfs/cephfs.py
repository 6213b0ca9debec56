# SPDX-License-Identifier: Apache-2.0
"""The same front-end and hosts with their store on CephFS: each mounts it by its kernel's client, from a real
cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.ceph import Cluster, fs
from lab.kernel_host import ONEADMIN
from nfs.site import PATIENCE_S, STORE, Host, Site

SECRET = "/etc/ceph/semishared.secret"


class CephSite(Site):
    """Front-end `fe` and hosts `h1` and `h2`, three clients of one CephFS."""

    kind = "ceph"

    def __init__(self, cluster: Cluster, fe: Host, hosts: Sequence[Host]) -> None:
        super().__init__(fe, hosts)
        self.cluster = cluster
        self._key = ""

    def provide(self) -> None:
        """Make the file system, and the user that mounts it."""
        fs.create(self.cluster)
        self._key = fs.make_key(self.cluster)

    def prepare(self) -> None:
        """Mount it; it belongs to oneadmin."""
        super().prepare()
        self.fe.run(["chown", "{}:{}".format(*ONEADMIN), STORE])

    def prepare_host(self, host: Host) -> None:
        """Give a host its key, and have its kernel load the client."""
        super().prepare_host(host)
        host.put(SECRET, self._key.encode(), 0o600)
        host.run(["modprobe", "ceph"], timeout=PATIENCE_S)

    def mount(self, host: Host) -> None:
        """Mount the store on a host."""
        options = f"name={fs.USER},secretfile={SECRET},fs={fs.NAME}"
        host.script(
            f"mkdir -p {STORE}; mount -t ceph {self.cluster.node.ip}:6789:/ {STORE} -o {options}",
            timeout=PATIENCE_S,
        )
