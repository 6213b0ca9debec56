# SPDX-License-Identifier: Apache-2.0
"""Plans of a backup: full copies of the wanted disks, as of one moment.

                    running                                     off
    prebackup       freeze (if wanted)                          copy each disk
                    one backup job of QEMU for all disks,
                    which begins for all of them at once
                    thaw; wait for the job
    (backup)        OpenNebula's backup driver fetches VMDIR/backup
    postbackup      end the job, thaw, remove the copies        remove the copies
"""

from __future__ import annotations

from ..errors import BadArguments, NotSupported
from ..model import steps as s
from ..opennebula.args import Backup
from ..opennebula.xml import Vm
from . import encryption
from .disks import DRIVER

FREEZE = ("NONE", "AGENT", "SUSPEND")
NAME = "backup"


def directory(request: Backup, base_path: str) -> str:
    """Return where the backup driver looks: beside the disks, or below BACKUP_BASE_PATH of datastore.conf."""
    return f"{base_path}/{request.place.vm}/{NAME}" if base_path else f"{request.place.path}/{NAME}"


def prebackup(request: Backup, vm: Vm, xml: str, base_path: str, *, live: bool) -> list[s.Step]:
    """Plan prebackup; `xml` is what vm.xml shall hold. Raise NotSupported for what is not the backup that was asked for."""
    if vm.backup_setting("MODE") == "INCREMENT":
        raise NotSupported(f"incremental backup (VM {vm.id}) is not supported yet: set MODE = FULL in its BACKUP_CONFIG")
    if vm.backup_setting("INTERACTIVE") == "YES":
        raise NotSupported(f"interactive backup (VM {vm.id}) is not supported yet")
    if vm.text("TEMPLATE/TPM/MODEL"):
        raise NotSupported(f"VM {vm.id} has a TPM: backup of its state is not supported yet")
    bridge = vm.text("BACKUPS/BACKUP_CONFIG/LAST_BRIDGE")
    if bridge and bridge != request.place.host:
        store = vm.text("BACKUPS/BACKUP_CONFIG/LAST_DATASTORE_ID")
        raise NotSupported(
            f"backup datastore {store} has a BRIDGE_LIST: its driver would fetch the disks of VM {vm.id} from {bridge}, and they are on "
            f"{request.place.host}. Use a backup datastore without BRIDGE_LIST, or with that host alone in it"
        )
    freeze = vm.backup_setting("FS_FREEZE") or "NONE"
    if freeze not in FREEZE:
        raise NotSupported(f"FS_FREEZE = {freeze} of VM {vm.id} is not one of {', '.join(FREEZE)}")
    for number in request.disks:
        driver = vm.disk(number).driver
        if driver not in ("", DRIVER):
            raise NotSupported(f"disk {number} of VM {vm.id} is of driver {driver}: backup together with ours is not supported yet")
    domain = domain_of(request, live)
    if domain:
        encryption.check_running(vm, request.disks, "backup")
    ids = tuple(str(number) for number in request.disks)
    place = request.place
    return [
        s.BackUp(place.vm, place.path, directory(request, base_path), ids, domain, freeze if domain else "NONE", xml),
    ]


def postbackup(request: Backup, base_path: str, *, live: bool) -> list[s.Step]:
    """Plan postbackup, also after a prebackup that failed or was killed."""
    place = request.place
    return [s.EndBackup(place.vm, place.path, directory(request, base_path), domain_of(request, live))]


def domain_of(request: Backup, live: bool) -> str:
    """Return the running domain, '' if it is off; raise BadArguments for what is no domain's name."""
    if not live:
        return ""
    name = request.domain
    if not name or name.startswith("-") or any(not (c.isalnum() or c in "-_.") for c in name):
        raise BadArguments(f"not a deploy id: {name!r}")
    return name
