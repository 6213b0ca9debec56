# SPDX-License-Identifier: Apache-2.0
"""What every action of tm/ and datastore/ costs, called by the simulated oned in the course of ordinary
operations.
"""

from __future__ import annotations

import base64
import os
import shutil
from typing import Dict, List

from figures import Figure, rounds_within
from meter import Meter

from lab.caches import CHECKOUT
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.oned.objects import Datastore, Image

PYTHON = ["/usr/bin/python3", "-I", "-c", "pass"]
LIMIT = 3.5
"""Of what the bare interpreter costs in the same run: CPUs and their neighbours differ."""
EXPECTED_MS: Dict[str, float] = {
    "datastore/stat": 45,
    "datastore/cp": 40,
    "datastore/mkfs": 40,
    "datastore/clone": 40,
    "datastore/rm": 45,
    "datastore/monitor": 45,
    "tm/monitor": 35,
}
"""CPU until the first command, by import lists: a core of 25 ms; XML-RPC adds 13. Those that start no program
are measured to their end.
"""
REPOSITORY, BACKUP = 107, "8e4cbd"
"""A datastore of backups in a directory, and the one that is there."""
ASKS_ONED = ("tm/clone", "tm/ln", "tm/mkimage", "tm/cpds", "tm/mv (directory)")


def round_of_operations(cloud: Cloud, meter: Meter, number: object) -> None:
    """Upload, deploy, save, move, end: what calls nearly every action; names end in `number`."""
    oned = cloud.oned
    path = cloud.upload_file("data.img")
    # Small: hashing and copying data is no start-up.
    path.write_bytes(os.urandom(1 << 20))
    cloud.give(path)
    uploaded = oned.image_create(
        STORE, f"up-{number}", path="/var/tmp/data.img", type="DATABLOCK", prefix="vd"
    )
    made = oned.image_create(
        STORE, f"made-{number}", size=64, type="DATABLOCK", format="raw", prefix="vd", persistent=True
    )
    copied = oned.image_clone(uploaded, f"copy-{number}")
    disks = [
        {"IMAGE_ID": str(uploaded)},
        {"IMAGE_ID": str(made)},
        {"TYPE": "fs", "SIZE": "64", "FORMAT": "raw"},
        {"TYPE": "swap", "SIZE": "64"},
    ]
    vm = cloud.deploy(f"vm-{number}", disks, "h1")
    first = oned.disk_snapshot_create(vm, 0, "running")
    oned.vm_poweroff(vm, hard=True)
    second = oned.disk_snapshot_create(vm, 0, "off")
    oned.disk_snapshot_revert(vm, 0, first)
    oned.disk_snapshot_delete(vm, 0, second)
    for name in "abc":
        oned.disk_snapshot_create(vm, 1, name)
    oned.disk_resize(vm, 2, 65)
    # As a marketplace's driver asks.
    oned._ds_action(oned.datastore(STORE), "export", str(uploaded), oned.image(uploaded))
    saved = oned.disk_saveas(vm, 0, f"saved-{number}")
    oned.vm_migrate(vm, "h2")
    cloud.terminate(vm)
    for action, snapshot in (("snap_revert", 0), ("snap_delete", 1), ("snap_flatten", 0)):
        oned.image_snapshot(made, action, snapshot)
    for image in (uploaded, made, copied, saved):
        oned.image_delete(image)
    _extra(cloud, meter)


def _extra(cloud: Cloud, meter: Meter) -> None:
    """Call what no ordinary operation calls, and the baseline."""
    environment = cloud.oned.settings.environment
    meter.samples["python"] += [meter.measure(PYTHON, None, environment)[1] for _ in range(4)]
    # It refuses, in one line: SHARED=YES is not for us.
    meter.local([f"{cloud.oned.settings.remotes}/tm/semishared/monitor", str(SYSTEM)], "", environment)
    # Runs on a host; the front-end has the same file and no VM.
    meter.local(
        [f"{cloud.oned.settings.remotes}/tm/semishared/monitor_ds", f"{DATASTORES}/{SYSTEM}"], "", environment
    )


def _migrations(cloud: Cloud, meter: Meter, rounds: int) -> None:
    """Migrate a running VM there and back; failmigrate after a premigrate that nothing follows."""
    oned = cloud.oned
    image = oned.image_create(
        STORE, "in-place", size=64, type="DATABLOCK", format="raw", prefix="vd", persistent=True
    )
    vm = cloud.deploy("mover", [{"IMAGE_ID": str(image)}], "h1")
    for number in range(rounds):
        oned.vm_migrate(vm, "h1" if number % 2 else "h2", how="live")
    here = oned.vm(vm).last.host.name
    there = "h1" if here == "h2" else "h2"
    place = f"/var/lib/one//datastores/{SYSTEM}/{vm}"
    stdin = base64.b64encode(oned.vm(vm).to_xml(only_last=True).encode()).decode()
    for _ in range(rounds):
        for action in ("premigrate", "failmigrate"):
            oned.drivers.tm([action, "semishared", here, there, place, str(vm), str(SYSTEM)], stdin)
    _backups(cloud, vm, rounds)
    cloud.terminate(vm)
    oned.image_delete(image)


def _backups(cloud: Cloud, vm: int, rounds: int) -> None:
    """Begin and end backups of a running VM with one disk, as oned's backup drivers do, and as if it were
    off; restore the last one.
    """
    oned = cloud.oned
    host = oned.vm(vm).last.host.name
    told = (
        "<BACKUPS><BACKUP_CONFIG><FS_FREEZE>NONE</FS_FREEZE><MODE>FULL</MODE></BACKUP_CONFIG></BACKUPS></VM>"
    )
    stdin = oned.vm(vm).to_xml().replace("</VM>", told)
    words = ["semishared", f"{host}:{cloud.vm_dir(vm)}", "0", f"one-{vm}", "-", str(vm), str(SYSTEM)]
    for _ in range(rounds):
        for action in ("prebackup_live", "postbackup_live"):
            oned.drivers.tm([action, *words], stdin)
    oned.vm_poweroff(vm, hard=True)
    for _ in range(rounds):
        oned.drivers.tm(["prebackup", *words], stdin)
        _take(cloud, vm, host)
        oned.drivers.tm(["postbackup", *words], stdin)
    oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "rsync", "-", f"{DATASTORES}/{REPOSITORY}", {"TYPE": "BACKUP_DS"}
    )
    image = max(oned.images) + 1
    oned.images[image] = Image(
        image, "backup", 6, False, REPOSITORY, "repository", {}, source=BACKUP, format="raw", vms=[vm]
    )
    for _ in range(rounds):
        oned.drivers.tm(
            ["restore", "semishared", f"{host}:{cloud.vm_dir(vm)}", str(vm), str(image), "-1", "-1"]
        )
    del oned.images[image], oned.datastores[REPOSITORY]


def _take(cloud: Cloud, vm: int, host: str) -> None:
    """Do what a backup driver does between the two: take the disks."""
    there = f"{DATASTORES}/{REPOSITORY}/{vm}/{BACKUP}"
    cloud.lab.fe.run(["mkdir", "-p", there])
    shutil.copytree(
        cloud.lab.node(host).path(f"{cloud.vm_dir(vm)}/backup"), cloud.lab.fe.path(there), dirs_exist_ok=True
    )
    cloud.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")


def actions(quick: bool) -> List[Figure]:
    """Measure wall and CPU time of every action, and CPU until its first command."""
    rounds = 2 if quick else 6
    with Cloud.up(hosts=2) as cloud:
        meter = Meter(cloud.lab, cloud.oned.settings.environment)
        cloud.oned.runner = cloud.oned.drivers.runner = meter
        for number in rounds_within(150, rounds):
            round_of_operations(cloud, meter, number)
        print("  live migrations", flush=True)
        _migrations(cloud, meter, rounds)
    python = [sample.cpu * 1000 for sample in meter.samples.pop("python")]
    found = [
        Figure(
            "actions/python",
            "`python3 -I -c pass`, CPU",
            "ms",
            python,
            expected=10.0,
            because="measured before",
        )
    ]
    missing = {
        f"{kind}/{path.name}"
        for kind in ("tm", "datastore")
        for path in (CHECKOUT / kind).iterdir()
        if path.is_file()
    }
    missing -= {name.split(" ")[0] for name in meter.samples}
    if missing:
        raise RuntimeError(f"never called: {missing}")
    for name, samples in sorted(meter.samples.items()):
        plain = [sample for sample in samples if sample.first_cpu is None]
        first = [sample.first_cpu * 1000 for sample in samples if sample.first_cpu is not None]
        expected = EXPECTED_MS.get(name, 43.0 if name in ASKS_ONED else 32.0)
        found += [
            Figure(
                f"actions/{name}/first",
                f"{name}: CPU until its first command",
                "ms",
                first,
                "`python3 -I -c pass`",
                python,
                paired=False,
                expected=expected / 10,
                because="imports",
                budget=("ratio", "<=", LIMIT),
                budget_from="CPU until an action's first real command",
            ),
            Figure(
                f"actions/{name}/cpu",
                f"{name}: CPU on the front-end",
                "ms",
                [s.cpu * 1000 for s in plain],
                "`python3 -I -c pass`",
                python,
                paired=False,
            ),
            Figure(
                f"actions/{name}/own", f"{name}: CPU of its own process", "ms", [s.own * 1000 for s in plain]
            ),
            Figure(
                f"actions/{name}/host-cpu",
                f"{name}: CPU on the hosts",
                "ms",
                [s.host_cpu * 1000 for s in plain],
            ),
            Figure(f"actions/{name}/wall", f"{name}: wall time", "s", [s.wall for s in plain]),
        ]
    return found
