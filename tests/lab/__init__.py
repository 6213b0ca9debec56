# SPDX-License-Identifier: Apache-2.0
"""The lab: an OpenNebula front-end and hosts as namespaces of one machine, with real sshd, libvirtd, QEMU and
guests.
"""

from __future__ import annotations

from lab.hosts import Lab
from lab.node import Node, NodeError, NodeProcess

__all__ = ["Lab", "Node", "NodeError", "NodeProcess"]
