# SPDX-License-Identifier: Apache-2.0
"""Whether OpenNebula still needs the drivers, or their newer version, that are to be removed."""

from __future__ import annotations

import os
import re

from semishared import NAME, VERSION
from semishared.errors import SemisharedError
from semishared.install import next_steps, preflight
from semishared.install.front_end import FrontEnd
from semishared.opennebula.oned import Oned

_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.dev(\d+))?\Z")


def why_not(place: FrontEnd, uninstall: bool, has_oned: bool = True) -> str:
    """Return why a part must not be removed now, and what would break; '' if it may, or none is.

    Not `has_oned`: no OpenNebula of these remotes can be told; one that answers counts all the same.
    """
    installed = preflight.installed(place.remotes)
    if not installed or not uninstall and not _is_older(VERSION, installed):
        return ""
    what = f"with the drivers of {VERSION}, which need not understand what those of {installed} wrote,"
    what = "without the drivers" if uninstall else what
    breaks = (
        f"{what} they can be neither started, moved, migrated nor terminated, and their disks not committed"
    )
    try:
        oned = _oned(place)
        oned.require_admin()
        vms = sorted(vm.id for vm in oned.vms() if vm.driver == NAME)
    except SemisharedError as e:
        if not has_oned:
            return ""
        return f"which VMs have disks of {NAME} is not known ({e.detail}): {breaks}"
    named = ", ".join(map(str, vms[:10])) + (" ..." if len(vms) > 10 else "")
    return f"{len(vms)} VMs have disks of {NAME} ({named}): {breaks}" if vms else ""


def left(place: FrontEnd) -> list[str]:
    """Return the warning if OpenNebula still has datastores of ours; nothing if it cannot be asked."""
    try:
        stores = _oned(place).datastores()
    except SemisharedError:
        return []
    ours = ", ".join(store.name for store in stores if NAME in (store.driver, store.text("DS_MAD")))
    what = "are left in OpenNebula: nothing in them works any more (docs/how-to/uninstall.md)"
    return [f"datastores {ours} {what}"] if ours else []


def _oned(place: FrontEnd) -> Oned:
    session = f"{next_steps.home(place)}/.one/one_auth"
    if "ONE_AUTH" not in os.environ and os.path.isfile(session):
        os.environ["ONE_AUTH"] = session
    return Oned()


def _is_older(one: str, other: str) -> bool:
    """Tell whether a version precedes another: 0.2.0.dev0 before 0.2.0; False for unknown forms."""
    found = [_NUMBERS.match(version) for version in (one, other)]
    keys = [
        (*map(int, match.group(1, 2, 3)), int(match.group(4)) if match.group(4) else 1 << 30)
        for match in found
        if match
    ]
    return len(keys) == 2 and keys[0] < keys[1]
