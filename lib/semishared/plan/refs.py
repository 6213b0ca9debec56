# SPDX-License-Identifier: Apache-2.0
"""What steps are made of, and what they name. steps.py passes all of it on."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

Step = Tuple[Any, ...]
"""A step is a named tuple; its class name is its name on the wire. (Named tuples: six times quicker to define than dataclasses.)"""


class ImageRef(NamedTuple):
    """An image in a store of kind `dir`, as a host sees it."""

    store: int
    id: int
    format: str
    source: str
    generation: str = ""
    """The generation that must be used; '' means the image's current one."""


class DiskRef(NamedTuple):
    """A disk of a VM on the machine that executes the plan."""

    vm: int
    disk: int
    vm_dir: str

    @property
    def path(self) -> str:
        return f"{self.vm_dir}/disk.{self.disk}"
