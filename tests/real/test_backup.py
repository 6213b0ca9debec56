# SPDX-License-Identifier: Apache-2.0
"""A full backup into OpenNebula's own rsync datastore, and what is restored from it."""

from __future__ import annotations

import time

from lab.guest import content
from real.conftest import RealCloud, wait_until

KIB = 64
DATA = content("base", 0, KIB)
BACKUPS = "/var/tmp/backups"


def datastore(cloud: RealCloud) -> int:
    """Create the datastore, on the front-end itself."""
    cloud.lab.fe.run(["mkdir", "-p", BACKUPS])
    words = (
        'NAME="backups" TYPE="BACKUP_DS" DS_MAD="rsync" TM_MAD="-" RSYNC_USER="oneadmin" RSYNC_HOST="fe" '
        'RESTIC_COMPRESSION="-"'
    )
    made = cloud.oned.datastore_create(words)
    wait_until(lambda: cloud.oned.datastore(made).free_mb, "what is free for backups is not known")
    return made


def test_full_backup_and_restore(cloud: RealCloud, os_image: int) -> None:
    mine = cloud.data_image("backed-mine", DATA, persistent=True)
    own = cloud.data_image("backed-own", DATA, format="qcow2")
    vm = cloud.deploy("backed", [{"IMAGE_ID": str(image)} for image in (os_image, mine, own)])
    guest = cloud.guest(vm)
    for disk in ("vdb", "vdc"):
        guest.write(disk, "saved", 8192, 64)
    guest.sync()
    where = datastore(cloud)
    cloud.oned.api.call("vm.updateconf", vm, 'BACKUP_CONFIG = [ BACKUP_VOLATILE="NO", MODE="FULL" ]')
    cloud.oned.api.call("vm.backup", vm, where, False)
    deadline = time.monotonic() + 300
    while not (ids := [one.text for one in cloud.oned.api.info("vm", vm).findall("BACKUPS/BACKUP_IDS/ID")]):
        assert not cloud.oned.error(vm), cloud.oned.error(vm)
        assert time.monotonic() < deadline, cloud.one.log(f"{vm}.log")
        time.sleep(1)
    backup = int(ids[0] or 0)
    assert cloud.oned.state(vm) == ("ACTIVE", 3)
    for disk in ("vdb", "vdc"):
        guest.check(disk, "saved", 8192, 64)
    said = str(cloud.oned.api.call("image.restore", backup, 100, 'NAME="again" NO_IP="YES" NO_NIC="YES"'))
    made = [int(word) for word in said.split()]
    images = [image for image in cloud.oned.images.values() if image.name.startswith("again")]
    assert len(images) == 3, (said, made, [image.name for image in images])
    held = {}
    for image in images:
        known = cloud.oned.image(cloud.oned._ready(image.id))
        # Not compared as bytes: what differs would be shown line by line.
        parts = [cloud.read(known.source, known.format, KIB << 10, offset << 10) for offset in (0, 8192)]
        held[known.name] = parts == [DATA, content("saved", 8192, 64)]
    assert sorted(held.values()) == [False, True, True], held
    cloud.terminate(vm)
    assert cloud.leftovers() == []
