# SPDX-License-Identifier: Apache-2.0
"""Encrypted images under real libvirts with real secrets: guests read and write plaintext, and nobody else
finds any.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from typing import Any, Callable, Iterator, List

import pytest

from lab import Node
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.guest import content
from lab.luks import DATA, DIRECT, KIB, PASSPHRASE, SECRET, VIRSH, forget, know, luks_image
from lab.oned import ActionFailed
from lab.oned.states import Lcm


@pytest.fixture()
def hosts(cloud: Cloud) -> Iterator[List[Node]]:
    """Return the hosts; none knows the secret yet, and none does afterwards."""
    yield cloud.lab.hosts
    for host in cloud.lab.hosts:
        forget(host)


@pytest.fixture(scope="module")
def encrypted(cloud: Cloud) -> str:
    return luks_image(cloud)


def upload(cloud: Cloud, path: str, name: str, *, persistent: bool = False, **attributes: str) -> int:
    own: dict[str, Any] = {"LUKS_SECRET": SECRET, **attributes}
    return cloud.oned.image_create(
        STORE, name, path=path, type="DATABLOCK", persistent=persistent, prefix="vd", attributes=own
    )


def check_ciphertext(cloud: Cloud, *seeds: str) -> None:
    """See that no file of a store, a host or the front-end holds what a guest reads or wrote."""
    looked = 0
    for node in (cloud.lab.fe, *cloud.lab.hosts):
        for folder, _, names in os.walk(node.path(DATASTORES)):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    with open(path, "rb") as file:
                        held = file.read()
                    looked += held[:6] == b"LUKS\xba\xbe"
                    assert not [seed for seed in seeds if content(seed, 0, 1)[:64] in held], (
                        f"plaintext in {node.name}:{path}"
                    )
    assert looked, "no encrypted file was found to look at"


def files(cloud: Cloud, node: Node) -> List[str]:
    """Return what lies on store and host, but for what is noted about who uses it."""
    return [*cloud.files(cloud.lab.fe, f"{DATASTORES}/{STORE}"), *cloud.files(node, DATASTORES)]


def backup(cloud: Cloud, vm: int) -> subprocess.CompletedProcess[bytes]:
    record = cloud.oned.vm(vm)
    config = (
        "<BACKUPS><BACKUP_CONFIG><FS_FREEZE>NONE</FS_FREEZE><MODE>FULL</MODE></BACKUP_CONFIG></BACKUPS></VM>"
    )
    argv = [
        "/var/lib/one/remotes/tm/semishared/prebackup_live",
        f"{record.last.host.name}:{cloud.vm_dir(vm)}",
        "0:1",
    ]
    xml = record.to_xml().replace("</VM>", config).encode()
    return cloud.lab.fe.run(
        [*argv, record.deploy_id, "-", str(vm), str(SYSTEM)],
        user="oneadmin",
        input=xml,
        check=False,
        timeout=120,
    )


def qmp(node: Node, domain: str, command: str, **arguments: object) -> Any:
    """Say something to the QEMU of a domain; return its answer."""
    said = json.dumps({"execute": command, "arguments": arguments})
    return json.loads(node.run([*VIRSH, "qemu-monitor-command", domain, said], user="root").stdout)["return"]


def seen_by_qemu(node: Node, domain: str) -> List[bytes]:
    """Return what a guest would read first of each encrypted disk: the QEMU that runs it serves it by NBD."""
    socket, out = f"/var/tmp/{domain}.nbd", f"/var/tmp/{domain}.read"
    qmp(node, domain, "nbd-server-start", addr={"type": "unix", "data": {"path": socket}})
    found = []
    for entry in qmp(node, domain, "query-named-block-nodes", flat=True):
        if entry["drv"] == "luks":
            name = entry["node-name"]
            qmp(
                node,
                domain,
                "block-export-add",
                **{"type": "nbd", "id": name, "name": name, "node-name": name},
            )
            url = f"if=nbd+unix:///{name}?socket={socket}"
            node.run(["qemu-img", "dd", "-f", "raw", "-O", "raw", f"bs={KIB}k", "count=1", url, f"of={out}"])
            found.append(node.path(out).read_bytes())
            node.path(out).unlink()
    qmp(node, domain, "nbd-server-stop")
    return found


def check_refused(cloud: Cloud, vm: int, *disks: int) -> None:
    """See that whatever would copy the disks of a running guest is refused, and leaves nothing."""
    oned = cloud.oned
    host = cloud.lab.node(oned.vm(vm).last.host.name)
    before = files(cloud, host)

    def refused(what: str, action: Callable[[], object]) -> None:
        with pytest.raises(ActionFailed, match="SS074"):
            action()
            pytest.fail(f"a {what} of an encrypted disk was made while its guest runs")

    for disk in disks:
        refused("snapshot", partial(oned.disk_snapshot_create, vm, disk, "never"))
        refused("saved image", partial(oned.disk_saveas, vm, disk, "never"))
        oned.image_delete(max(oned.images))
    done = backup(cloud, vm)
    assert done.returncode == 1
    assert b"SS074" in done.stderr
    assert files(cloud, host) == before


@pytest.mark.fault(
    11, "QEMU runs on encrypted disks with libvirt's secret, and no action writes what it decrypts"
)
def test_qemu_opens_encrypted_disks_and_nobody_else_has_plaintext(
    cloud: Cloud, hosts: List[Node], encrypted: str
) -> None:
    mine = upload(cloud, encrypted, "luks-mine", persistent=True)
    full = upload(cloud, encrypted, "luks-full", SEMISHARED_LOCAL="copy")
    later = upload(cloud, encrypted, "luks-later", persistent=True)
    know(hosts[0], PASSPHRASE)
    vm = cloud.oned.vm_create(cloud.template("luks", [{"IMAGE_ID": str(mine)}, {"IMAGE_ID": str(full)}]))
    cloud.oned.vm_deploy(vm, hosts[0].name, SYSTEM)
    attached = [cloud.oned.disk_attach(vm, image) for image in (later, full)]
    seen = seen_by_qemu(hosts[0], cloud.oned.vm(vm).deploy_id)
    assert len(seen) == 4
    assert set(seen) == {DATA}
    check_refused(cloud, vm, 1, attached[0])
    check_ciphertext(cloud, "luks")
    cloud.terminate(vm)
    check_ciphertext(cloud, "luks")
    for image in (mine, full, later):
        cloud.oned.image_delete(image)


@pytest.mark.long
def test_guest_reads_and_writes_encrypted_disks(cloud: Cloud, hosts: List[Node], encrypted: str) -> None:
    mine = upload(cloud, encrypted, "luks-mine", persistent=True)
    full = upload(cloud, encrypted, "luks-full", SEMISHARED_LOCAL="copy")
    later = upload(cloud, encrypted, "luks-later", persistent=True)
    disks = [{"IMAGE_ID": str(mine)}, {"IMAGE_ID": str(full)}]
    vm = cloud.oned.vm_create(cloud.template("luks", disks, OS=DIRECT))
    host = hosts[0]

    # Without the secret, and with a wrong one, libvirt does not start it; with the right one nothing else has
    # to be done.
    with pytest.raises(ActionFailed, match="no secret with matching uuid"):
        cloud.oned.vm_deploy(vm, host.name, SYSTEM)
    know(host, b"another")
    with pytest.raises(ActionFailed, match="Invalid password"):
        cloud.oned.vm_recover(vm, "retry")
    assert cloud.oned.vm(vm).lcm == Lcm.BOOT_FAILURE
    know(host, PASSPHRASE)
    cloud.oned.vm_recover(vm, "retry")

    guest = cloud.guest(vm)
    for disk in (cloud.oned.disk_attach(vm, later), cloud.oned.disk_attach(vm, full)):
        guest.wait_disk({3: "vdc", 4: "vdd"}[disk])
    for name in ("vda", "vdb", "vdc", "vdd"):
        assert guest.disks()[name] == 16 << 20
        guest.check(name, "luks", 0, KIB)
        guest.write(name, "luks-new", 0, KIB)
    check_refused(cloud, vm, 0, 1, 3, 4)
    check_ciphertext(cloud, "luks", "luks-new")
    for name in ("vda", "vdb", "vdc", "vdd"):
        guest.check(name, "luks-new", 0, KIB)

    cloud.oned.disk_detach(vm, 3)
    guest.wait_disk("vdc", present=False)
    cloud.oned.vm_poweroff(vm, hard=True)
    saved = cloud.oned.disk_saveas(vm, 1, "luks-saved")
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for name in ("vda", "vdb"):
        guest.check(name, "luks-new", 0, KIB)
    cloud.oned.image(saved).template["LUKS_SECRET"] = SECRET
    cloud.oned.image_persistent(saved, True)
    cloud.oned.disk_attach(vm, saved)
    guest.wait_disk("vdc")
    guest.check("vdc", "luks-new", 0, KIB)
    cloud.terminate(vm)
    check_ciphertext(cloud, "luks", "luks-new")
    for image in (mine, full, later, saved):
        cloud.oned.image_delete(image)


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False], ids=["secret-known", "secret-unknown"])
def test_live_migration_of_an_encrypted_disk(
    cloud: Cloud, hosts: List[Node], encrypted: str, known: bool
) -> None:
    """To a host that has the secret; one that has not is refused by libvirt, and the guest goes on where it
    is.
    """
    mine = upload(cloud, encrypted, "luks-moving", persistent=True)
    for host in hosts[: 2 if known else 1]:
        know(host, PASSPHRASE)
    vm = cloud.oned.vm_create(cloud.template("luks-moving", [{"IMAGE_ID": str(mine)}], OS=DIRECT))
    cloud.oned.vm_deploy(vm, hosts[0].name, SYSTEM)
    guest = cloud.guest(vm)
    guest.loop("vda", "luks-loop", 4096, 2048)
    if known:
        cloud.oned.vm_migrate(vm, hosts[1].name, how="live")
    else:
        with pytest.raises(ActionFailed, match="(?i)secret"):
            cloud.oned.vm_migrate(vm, hosts[1].name, how="live")
    assert cloud.oned.vm(vm).last.host.name == hosts[int(known)].name
    guest = cloud.guest(vm)
    guest.check("vda", "luks", 0, KIB)
    stat = guest.loop_stop("vda")
    assert stat["writes"] and not stat["errors"] + stat["mismatches"], stat
    check_ciphertext(cloud, "luks", "luks-loop")
    cloud.terminate(vm)
    cloud.oned.image_delete(mine)
