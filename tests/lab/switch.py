# SPDX-License-Identifier: Apache-2.0
"""Kernel hosts beside the nodes of a lab of namespaces, on its switch: so they reach what runs there, as its
Ceph.

with Lab.up(hosts=1, ceph=True) as lab, KernelHost("k1", Switch(lab)) as k1:
    k1.run(["bash", "-c", f"</dev/tcp/{lab.ceph.node.ip}/6789"])
"""

from __future__ import annotations

import subprocess

from lab.hosts import Lab
from lab.kernel_host import Wire

FIRST = 101
"""The last number of the first one's address; the lab's own nodes are below."""


class Switch(Wire):
    """The switch of a lab, as the wire of kernel hosts: QEMU runs in its network namespace, each host on a
    tap of its own.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self._subnet = lab.fe.ip.rpartition(".")[0]
        self.enter = ["nsenter", "-t", str(lab.fe.site.keeper), "-n", "--"]

    def join(self, name: str) -> tuple[str, list[str]]:
        """Return the address of a new host on it, and what QEMU needs to be told."""
        number = FIRST + len(self._names)
        self._names.append(name)
        address, tap = f"{self._subnet}.{number}", f"kh{number}"
        lines = f"tuntap add dev {tap} mode tap\nlink set {tap} master br0 up\n"
        subprocess.run([*self.enter, "ip", "-batch", "-"], input=lines.encode(), check=True)
        # As the lab's nodes have them, by address.
        mac = "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))
        device = f"virtio-net-pci,netdev=wire,mac={mac},id=nic,romfile="
        return address, ["-netdev", f"tap,id=wire,ifname={tap},script=no,downscript=no", "-device", device]
