# SPDX-License-Identifier: Apache-2.0
"""Where the front-end itself sees a VM, when oned says that it is elsewhere (why: plan/removals.py)."""

from __future__ import annotations

import os

from ..model import layout
from ..opennebula.args import VmPlace


def is_on_front_end(path: str) -> bool:
    """Tell whether this machine has the VM directory `path`, or what a killed move left of it
    (disk/beside.py).
    """
    from ..tools import files

    parent, vm = os.path.split(path)
    beside = map(layout.beside_named, os.listdir(parent)) if os.path.isdir(parent) else ()
    return not files.is_absent(path) or any(
        own is not None and str(own.vm) == vm and own.kind != "kept" for own in beside
    )


def is_here_too(place: VmPlace) -> bool:
    """Tell whether the front-end has a VM that is to be removed on another machine."""
    from ..tools.this_machine import is_here

    return not is_here(place.host) and is_on_front_end(place.path)


def source_of_copy(place: VmPlace, last_host: str) -> str:
    """Return the host that has the disk of an undeployed VM: the front-end, unless it is not there (any
    more).
    """
    from ..tools import files
    from ..tools.this_machine import is_here

    if is_here(place.host):
        return last_host if last_host and files.is_absent(place.path) else place.host
    return place.host if files.is_absent(place.path) else "localhost"
