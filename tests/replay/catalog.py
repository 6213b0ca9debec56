# SPDX-License-Identifier: Apache-2.0
"""Every recording, and what is expected of it; none may be silently absent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict

PASS, NOT_YET = "pass", "not yet"


@dataclass(frozen=True)
class Status:
    """Whether a recording must be matched now, and if not, why."""

    status: str
    reason: str = ""


_MATCHED = (
    "01-datastore-image",
    "02-vm-boot-probe",
    "03-attach-detach-live",
    "04-attach-detach-poweroff",
    "05-disk-snapshot",
    "05b-image-snapshots",
    "06-disk-resize",
    "07-disk-saveas",
    "08-power",
    "09-stop-resume",
    "10-undeploy-resume",
    "11-migrate-cold",
    "12-migrate-system-ds",
    "13-migrate-live",
    "13c-migrate-live-link-farm",
    "13d-migrate-live-overlay-upstream",
    "13e-migrate-live-overlay-inc",
    "14-migrate-system-ds-live",
    "15-terminate",
    "16-terminate-poweroff",
    "17-errors-prolog",
    "18-recover-prolog",
    "20-recover-migrate",
    "21-errors-hotplug",
    "b-r1-rbd-real-image-attr",
    "b-r2-rbd-real-wrappers",
    "b-r3-rbd-real-wrappers",
    "b-v1-tmsystem-file",
    "b-v2-tmsystem-file-vmattr",
    "b-v4-same-tm-rbd",
    "b-v5-same-tm-filetype-pers-image-attr-rbd",
    "b-v6-same-tm-rbd-nonpers-image-attr-file",
    "b-v7-same-tm-rbd-vmdisk-attr",
    "b-v8-same-tm-filetype-vmdisk-attr-rbd",
)
_OPEN = {
    "13b-migrate-live-two-level-link": "its second command was sent while the first still ran; "
    "commands wait here",
    "22-backup": "backup datastores, their drivers and images are not simulated; our part of it is played "
    "(test_player)",
    "24-monitoring": "monitoring is driven by the host probes, which the simulated oned does not have",
}


def scenarios() -> Dict[str, Status]:
    """Return what the simulated oned must generate, by name of recording."""
    table = {name: Status(PASS) for name in _MATCHED}
    table.update({name: Status(NOT_YET, reason) for name, reason in _OPEN.items()})
    return dict(sorted(table.items()))


_NOT_PLAYED = {
    **{
        name: "its image datastore belongs to another driver"
        for name in _MATCHED
        if name.startswith(("b-v1", "b-v2"))
    },
    **{
        name: "an image datastore without DISK_TYPE = RBD holds files, and ours takes no POOL/IMAGE for one"
        for name in _MATCHED
        if name.startswith(("b-r1", "b-v5", "b-v8"))
    },
}


def played() -> Dict[str, Status]:
    """Return what our drivers must stand when a recording's calls are fed to them, by name of recording."""
    return {
        name: Status(NOT_YET, _NOT_PLAYED[name]) if name in _NOT_PLAYED else Status(PASS)
        for name in scenarios()
    }
