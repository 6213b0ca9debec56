# SPDX-License-Identifier: Apache-2.0
"""Where the front-end itself finds a VM that oned has elsewhere (why: plan/disk/removals.py)."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Optional

from ..errors import OnedUnavailable
from ..model.disk import names as disk_names
from ..opennebula.args import VmPlace

if TYPE_CHECKING:
    from ..opennebula.oned import Oned
    from ..opennebula.xml import Vm


def is_on_front_end(path: str) -> bool:
    """Tell whether this machine has the VM directory `path`, or what a killed move left of it.

    See disk/vm_dir_siblings.py.
    """
    from ..tools import files

    parent, vm = os.path.split(path)
    beside = map(disk_names.beside_named, os.listdir(parent)) if os.path.isdir(parent) else ()
    return not files.is_absent(path) or any(
        own is not None and str(own.vm) == vm and own.kind != "kept" for own in beside
    )


def is_here_too(place: VmPlace) -> bool:
    """Tell whether the front-end has a VM that is to be removed on another machine."""
    from ..tools.this_machine import is_here

    return not is_here(place.host) and is_on_front_end(place.path)


def front_end_runs_vms(oned: Oned) -> bool:
    """Tell whether this machine may be a host too."""
    from ..tools.this_machine import is_here

    try:
        return any(is_here(host.name) for host in oned.hosts())
    except OnedUnavailable:
        return True


def may_rest_elsewhere(place: VmPlace, vm: Optional[Vm]) -> bool:
    """Tell whether a VM that is to be removed was at rest, and is not on this front-end.

    oned names the front-end then, or the last host if it does so once more (plan/disk/removals.py). What this
    one has of an earlier stay does not count (plan/vm/at_rest.py).
    """
    from ..tools.this_machine import is_here

    has_left = vm is not None and vm.has_left
    if not (has_left or is_here(place.host)):
        return False
    if not os.path.isdir(place.path) and not is_on_front_end(place.path):
        from ..opennebula.oned import Oned

        # Where the front-end is a host, oned names it for VMs there too.
        return has_left or not front_end_runs_vms(Oned())
    if vm is None or not has_left:
        return False
    from ..plan.vm import at_rest
    from ..tools import files

    seq = files.hint(disk_names.history_note(place.path)).get("seq")
    return isinstance(seq, int) and at_rest.is_older_stay(seq, vm)


def source_of_copy(place: VmPlace, last_host: str) -> str:
    """Return the host with the disk of an undeployed VM: the front-end, or its last host if that has it."""
    from ..tools import files
    from ..tools.this_machine import is_here

    if is_here(place.host):
        return last_host if last_host and files.is_absent(place.path) else place.host
    return place.host if files.is_absent(place.path) else "localhost"


# Whether a VM has shares: as oned says, or else the domain that it has written.


DEPLOYMENT = re.compile(r"deployment\.([0-9]{1,10})\Z")
"""The domain of a SEQ, written by oned beside context.sh before context (VirtualMachineManager.cc)."""


def known_shares(vm: int) -> Optional[Vm]:
    """Return a VM, None if oned does not know it any more, or does not answer."""
    from ..opennebula.oned import Oned

    try:
        return Oned().vm(vm)
    except OnedUnavailable:
        return None


def with_shares(vm: int, context: str) -> Optional[Vm]:
    """Return the VM that `context`, its context.sh, is for; None if it has no directories among its disks.

    Raise OnedUnavailable if it has some and oned does not answer: only oned knows of which the guest is a
    client.
    """
    from ..opennebula.oned import Oned

    try:
        known = Oned().vm(vm)
    except OnedUnavailable:
        if _domain_has_directories(os.path.dirname(context)):
            raise
        return None
    return known if has_directories(known) else None


def has_directories(vm: Vm) -> bool:
    """Tell whether a VM has directories among its disks, of any driver."""
    return any(disk.is_directory for disk in vm.disks)


def _domain_has_directories(directory: str) -> bool:
    try:
        seqs = [int(match.group(1)) for match in map(DEPLOYMENT.match, os.listdir(directory)) if match]
        with open(f"{directory}/deployment.{max(seqs)}", "rb") as file:
            return b"<filesystem" in file.read()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError:
        return True  # then only oned knows
