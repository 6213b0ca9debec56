# SPDX-License-Identifier: Apache-2.0
"""Ask a host's libvirt through its binding, from outside: who asks hundreds of times does not start a virsh
for each.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Set, Tuple

from lab.node import Node

SOCKET = "/run/libvirt/libvirt-sock"


@contextmanager
def libvirt_of(node: Node) -> Iterator[Any]:
    """Yield a connection to the libvirtd of a host."""
    import libvirt  # here: most of the lab does without

    libvirt.registerErrorHandler(
        lambda *_: None, None
    )  # what goes wrong is raised; nobody wants it on stderr, too
    connection = libvirt.open(f"qemu+unix:///system?socket={node.path(SOCKET)}")
    try:
        yield connection
    finally:
        connection.close()


def names(node: Node) -> Set[str]:
    """Return the domains that a host's libvirt knows, running or not."""
    with libvirt_of(node) as connection:
        return {domain.name() for domain in connection.listAllDomains()}


def described(node: Node) -> List[Tuple[object, ...]]:
    """Return what it says of each: name, state, XML with every disk's chain and the jobs of the disks,
    snapshots.
    """
    with libvirt_of(node) as connection:
        return sorted(
            (
                domain.name(),
                tuple(domain.state()),
                domain.XMLDesc(),
                *sorted(one.getXMLDesc() for one in domain.listAllSnapshots()),
            )
            for domain in connection.listAllDomains()
        )
