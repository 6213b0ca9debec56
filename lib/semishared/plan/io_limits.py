# SPDX-License-Identifier: Apache-2.0
"""What a disk may read and write, by its I/O class: as libvirt is told it, and as OpenNebula's attach script
is.

QEMU itself holds to it, so it needs nothing of the host's kernel and holds for every kind of disk; libvirt
takes it along in a checkpoint and in a live migration. Limits that OpenNebula has for the disk
(TOTAL_BYTES_SEC and the like) are not touched, nor completed: somebody has thought about that disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..named import NamedTuple
from ..opennebula.xml_edit import Element

LIMIT = re.compile(r"(TOTAL|READ|WRITE)_(BYTES|IOPS)_SEC(_MAX)?\Z")
"""What OpenNebula reads as a limit, and lets administrators alone write (VM_RESTRICTED_ATTR). Another name
limits nothing.
"""


class Limits(NamedTuple):
    """What one disk may do in a second, reads and writes together; 0: as much as it can."""

    bytes: int = 0
    operations: int = 0

    @property
    def iotune(self) -> str:
        """Return the element that tells libvirt, '' without limits."""
        parts = (("total_bytes_sec", self.bytes), ("total_iops_sec", self.operations))
        text = "".join(f"<{name}>{value}</{name}>" for name, value in parts if value)
        return f"<iotune>{text}</iotune>" if text else ""

    def attributes(self, disk: Element) -> dict[str, str]:
        """Return the attributes from which OpenNebula's script makes the same, none for a DISK that has any
        such.
        """
        if any(child.text.strip() and LIMIT.match(child.name) for child in disk.children):
            return {}
        parts = (("TOTAL_BYTES_SEC", self.bytes), ("TOTAL_IOPS_SEC", self.operations))
        return {name: str(value) for name, value in parts if value}


def by_class(answer: Mapping[str, tuple[int, int]]) -> dict[str, Limits]:
    """Return the limits of each class in a host's answer to ReadIoLimits."""
    return {name: Limits(*numbers) for name, numbers in answer.items()}
