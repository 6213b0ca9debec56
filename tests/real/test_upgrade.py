# SPDX-License-Identifier: Apache-2.0
"""OpenNebula is upgraded, version by version, while VMs of ours run: docs/how-to/upgrade-opennebula.md.

THROUGH has the directories in which root.sh has built the versions to come.
"""

from __future__ import annotations

import os
from pathlib import Path

from lab.cloud import SYSTEM
from lab.guest import Guest, content
from lab.oned import Lcm
from lab.oned import Vm as State
from real.conftest import INSTALL, SEMISHARED, RealCloud, brought_up, wait_on, wait_until

KIB = 1024
DATA = content("base", 0, KIB)
WRITTEN = ("vdb", "vdc", "vdd")
ONEDB = ["onedb", "upgrade", "-v", "--sqlite", "/var/lib/one/one.db", "--no-backup"]
RUNS = ("ACTIVE", int(Lcm.RUNNING))


def doctor(cloud: RealCloud) -> str:
    """Return what is to be mended, '' for nothing."""
    done = cloud.lab.fe.run([SEMISHARED, "doctor"], check=False, timeout=300)
    return done.stdout.decode() + done.stderr.decode() if done.returncode else ""


def upgrade(cloud: RealCloud, kept: Path) -> None:
    """Follow the page, up to what doctor has to say."""
    fe, one = cloud.lab.fe, cloud.one
    one.stop()
    one.upgrade(kept)
    shown = fe.run([INSTALL, "--diff"], user="root", timeout=300).stdout.decode()
    assert "TM_MAD" in shown, shown
    fe.run([INSTALL, "--yes"], user="root", timeout=300)
    fe.run(ONEDB, timeout=300)
    one.start()
    one.cli("onehost", "sync", "--force")
    wait_on(cloud.oned, 2)


def mended(cloud: RealCloud) -> list[str]:
    """Do what doctor says, which is to save datastores unchanged; return the attributes that it named."""
    said = doctor(cloud)
    named = [word for word in ("DS_LIVE_MIGRATE", "DS_MIGRATE_SNAP") if f"{word} is" in said]
    for store in cloud.oned.datastores.values():
        cloud.oned.datastore_update(store.id, "")
    wait_until(lambda: not doctor(cloud), "doctor is not content", 60)
    return named


def started(cloud: RealCloud, name: str, *images: int) -> int:
    disks = [{"IMAGE_ID": str(image)} for image in images]
    return cloud.deploy(name, [*disks, {"TYPE": "fs", "SIZE": "16", "FORMAT": "qcow2"}])


def checked(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.check(disk, "base", 0, KIB)
        guest.check(disk, "before", 2 * KIB, 64)


def test_vms_of_ours_run_and_move_through_upgrades_of_opennebula() -> None:
    versions = [Path(kept) for kept in os.environ["THROUGH"].split()]
    with brought_up(ceph=False) as cloud:
        os_image = cloud.os_image()
        mine, other = (cloud.data_image(name, DATA, persistent=True) for name in ("mine", "other"))
        cow = cloud.data_image("cow", DATA, format="qcow2")
        local = cloud.data_image("local", DATA, persistent=True, SEMISHARED_PLACE="local")
        runs = started(cloud, "runs", os_image, mine, cow)
        rests = started(cloud, "rests", os_image, other, local)
        left = started(cloud, "left", os_image, cow)
        for vm, disks in ((runs, ("vdb", "vdc")), (rests, ("vdb", "vdc")), (left, ("vdb",))):
            for disk in disks:
                cloud.guest(vm).write(disk, "before", 2 * KIB, 64)
        guest = cloud.guest(runs)
        for disk in WRITTEN:
            guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, 4)
        snapshot = cloud.oned.disk_snapshot_create(runs, 2, "of the older")
        cloud.oned.vm_poweroff(rests)
        cloud.oned.vm_undeploy(left)
        named = []
        for number, kept in enumerate(versions):
            upgrade(cloud, kept)
            assert cloud.one.cli("oned", "--version").split()[1].startswith(kept.name.rpartition(".")[0])
            named += mended(cloud)
            assert cloud.oned.state(runs) == RUNS and cloud.oned.vm(rests).state == State.POWEROFF
            for host in ("h2", "h1"):
                cloud.oned.vm_migrate(runs, host, SYSTEM, how="live")
                checked(cloud.guest(runs), "vdb", "vdc")
            cloud.oned.disk_snapshot_create(runs, 2, f"of {kept.name}")
            cloud.oned.vm_resume(rests)
            checked(cloud.guest(rests), "vdb", "vdc")
            cloud.guest(rests).write("vdc", f"in-{number}", (8 + number) * KIB, 64)
            cloud.oned.vm_poweroff(rests)
            cloud.oned.vm_migrate(rests, ("h2", "h1")[number % 2], SYSTEM)
            made = started(cloud, f"made-{number}", os_image, cow)
            cloud.guest(made).check("vdb", "base", 0, KIB)
            cloud.terminate(made)
        guest = cloud.guest(runs)
        for disk in WRITTEN:
            guest.wait_written(disk)
            counts = guest.loop_stop(disk)
            assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
        cloud.oned.disk_snapshot_delete(runs, 2, snapshot)
        cloud.oned.vm_deploy(left, "h2", SYSTEM)
        checked(cloud.guest(left), "vdb")
        cloud.oned.vm_resume(rests)
        checked(cloud.guest(rests), "vdb", "vdc")
        for vm in (runs, rests, left):
            cloud.terminate(vm)
        assert cloud.read(cloud.source(mine), "raw", 64 << 10, 2 * KIB << 10) == content(
            "before", 2 * KIB, 64
        )
        for number in range(len(versions)):
            at = (8 + number) * KIB
            assert cloud.read(cloud.source(local), "raw", 64 << 10, at << 10) == content(
                f"in-{number}", at, 64
            )
        assert cloud.leftovers() == []
        print("doctor named", named)
