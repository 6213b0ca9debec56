# SPDX-License-Identifier: Apache-2.0
"""Encrypted copies on a device of a pool: nothing moves them under their guest, where QEMU would write them
decrypted; off they move.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from lab import Node
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.luks import DATA, PASSPHRASE, SECRET, VIRSH, forget, know, luks_image
from pool.conftest import DEVICES
from pool.test_pool import DECLARED, device_of, layers, said
from pool.test_running import moved
from semishared.model.disk import names as disk_names
from system.test_luks import seen_by_qemu

SPILL = """
import json, os, sys
sys.path.insert(0, "/var/tmp/one/lib")
from semishared.disk import device_move
from semishared.model.refs import DiskRef
from semishared.model.device.steps import MoveLayers
vm, vm_dir, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
name = os.path.basename(os.readlink(vm_dir + "/disk.0.snap"))
print(json.dumps(device_move.spill(MoveLayers(DiskRef(vm, 0, vm_dir), f"one-{vm}", name, target, 0), lambda **_: None)._asdict()))
"""  # noqa: E501
"""What who looks after memory does with a disk (host/watch.py), which asks no plan."""


@pytest.fixture(autouse=True)
def _declared(cloud: Cloud) -> Iterator[None]:
    for host in ("h1", "h2"):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": DECLARED})
    said(cloud, "pool", "add", "h1,h2")
    know(cloud.lab.node("h1"), PASSPHRASE)
    yield
    cloud.delete_all()
    forget(cloud.lab.node("h1"))


def check_ciphertext(node: Node) -> None:
    """See that no file of a host's datastores and devices holds what its guest reads."""
    held = [
        path
        for top in (DATASTORES, *DEVICES)
        for path in node.path(top).rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    found = [path.read_bytes() for path in held]
    assert any(data[:6] == b"LUKS\xba\xbe" for data in found), "no encrypted file was found to look at"
    assert not [path for path, data in zip(held, found) if DATA[:64] in data]


def test_an_encrypted_disk_stays_on_its_device_while_its_guest_runs(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    own: dict[str, Any] = {"LUKS_SECRET": SECRET, "SEMISHARED_LOCAL": "copy"}
    path = luks_image(cloud)
    image = cloud.oned.image_create(
        STORE, "luks-pool", path=path, type="DATABLOCK", persistent=False, prefix="vd", attributes=own
    )
    vm = cloud.oned.vm_create(cloud.template("luks-pool", [{"IMAGE_ID": str(image)}]))
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    domain, was, before = cloud.oned.vm(vm).deploy_id, device_of(cloud, vm, 0), layers(h1)
    assert was in DEVICES and len(before) == 1
    summary, _ = moved(cloud, "drain", "h1", was, code=1)
    (row,) = [row for row in summary["rows"] if row["vm"] == vm]
    assert row["how"] == "stays" and "is encrypted (LUKS_SECRET)" in row["why"], row
    # Whoever asks nobody who knows the VM's attributes is refused by its host.
    (found,) = said(cloud, "pool", "list", "h1")["hosts"]
    other = next(row["uuid"] for row in found["devices"] if row["path"] != was)
    argv = ["/usr/bin/python3", "-IS", "-c", SPILL, str(vm), cloud.vm_dir(vm), other]
    answer = json.loads(h1.run(argv, user="oneadmin", timeout=120).stdout)
    assert answer["id"] == "SS164" and "is encrypted (LUKS_SECRET)" in answer["error"], answer
    assert layers(h1) == before and h1.run(["ls", f"{cloud.vm_dir(vm)}/disk.0.snap/"]).stdout.split() == [
        b"0"
    ]
    xml = h1.run([*VIRSH, "dumpxml", domain], user="root").stdout.decode()
    assert (
        "<encryption format='luks'" in xml
        and "<mirror" not in xml
        and f"/{disk_names.DELTA_NUMBER}'" not in xml
    )
    assert seen_by_qemu(h1, domain) == [DATA]
    check_ciphertext(h1)
    cloud.oned.vm_poweroff(vm)
    summary, _ = moved(cloud, "drain", "h1", was)
    assert {row["how"] for row in summary["rows"]} == {"moved"} and summary["empty"] is True
    check_ciphertext(h1)
    cloud.oned.vm_resume(vm)
    assert seen_by_qemu(h1, domain) == [DATA] and device_of(cloud, vm, 0) != was
    cloud.terminate(vm)
    cloud.oned.image_delete(image)
    assert layers(h1) == [] and cloud.leftovers() == []
    said(cloud, "pool", "add", "h1")
