# SPDX-License-Identifier: Apache-2.0
"""A host is lost and shut out: its VMs come up elsewhere, or wait; when it comes back, what it has of them is
nobody's.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator

import pytest

from lab.cloud import DATASTORES, STORE, Cloud
from lab.guest import content, serial_xml
from lab.oned import ActionFailed, Lcm

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
ERROR, MONITORED, DISABLED = 3, 2, 4
PAUSED = "<!-- lab: paused -->"
KIB = 64
DATA = content("base", 0, KIB)
LOCAL = ["local", "copy", "far"]
"""Images whose disks their host has alone."""


def hook(cloud: Cloud, host: str, code: int) -> str:
    """Start what OpenNebula's hook does, as its hook manager does; return what it prints."""
    printed = cloud.lab.fe.run([COMMAND, "failover", "--print-hook"]).stdout.decode()
    command = next(line for line in printed.splitlines() if line.startswith("COMMAND")).split('"')[1]
    stdin = base64.b64encode(cloud.oned.host(host).to_xml().encode())
    done = cloud.lab.fe.run(
        ["sh", "-c", f"{command} --wait 1"], user="oneadmin", input=stdin, check=False, timeout=120
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode() + done.stderr.decode()


def stale(cloud: Cloud, vm: int, source: str) -> str:
    """Try everything that would make what h1 has of the VM its own again; return what was said, one line
    each.
    """
    h1, directory = cloud.lab.node("h1"), f"{DATASTORES}/101/{vm}"
    (deployment,) = [name for name in cloud.files(h1, directory) if name.startswith("deployment.")]
    tm = "/var/lib/one/remotes/tm/semishared"
    said = []
    as_oned_has_it = f"/var/lib/one//datastores/101/{vm}/{deployment}"
    for node, argv in (
        (h1, ["/var/tmp/one/vmm/semishared/deploy", as_oned_has_it, "h1", str(vm), "h1"]),
        (cloud.lab.fe, [f"{tm}/mv", f"h1:{directory}", f"h2:{DATASTORES}/102/{vm}", str(vm), "102"]),
        (cloud.lab.fe, [f"{tm}/cpds", f"h1:{directory}/disk.1", source, "-1", str(vm), str(STORE)]),
    ):
        domain = cloud.lab.fe.path(f"/var/lib/one/vms/{vm}/{deployment}").read_bytes()
        done = node.run(argv, user="oneadmin", input=domain, check=False, timeout=120)
        assert done.returncode == 1, (argv, done.stderr)
        said.append(done.stderr.decode().splitlines()[0])
    assert h1.run(["virsh", "-q", "-c", "qemu:///system", "list", "--all", "--name"]).stdout.strip() == b""
    assert not cloud.lab.fe.path(source).exists()
    return "\n".join(said)


@pytest.fixture
def images(cloud: Cloud) -> Iterator[dict[str, int]]:
    """Yield images of every kind; at the end no host is down, or fenced."""
    yield {
        "os": cloud.os_image("over-os", SEMISHARED_PLACE="shared"),
        "mine": cloud.data_image("over-mine", DATA, persistent=True),
        "beside": cloud.data_image("over-beside", DATA, format="qcow2", SEMISHARED_PLACE="shared"),
        "local": cloud.data_image("over-local", DATA),
        "copy": cloud.data_image("over-copy", DATA, SEMISHARED_LOCAL="copy"),
        "far": cloud.data_image("over-far", DATA, SEMISHARED_LOCAL="remote-first"),
        "off": cloud.data_image("over-off", DATA, persistent=True),
        "diff": cloud.data_image(
            "over-diff",
            DATA,
            persistent=True,
            SEMISHARED_PLACE="local",
            SEMISHARED_ON_HOST_FAILURE="recreate",
        ),
    }
    cloud.oned.host("h1").state = MONITORED
    cloud.oned.forget_fences()
    cloud.lab.node("h1").start()


def test_lost_host_is_taken_over_and_comes_back_to_nothing(cloud: Cloud, images: dict[str, int]) -> None:
    """Three VMs: one on the store, whose guest goes on with its data; one on each kind of local disk, which
    waits, then begins anew; one that is off.
    """
    h1, h2 = cloud.lab.node("h1"), cloud.lab.node("h2")
    store = [{"IMAGE_ID": str(images[name])} for name in ("os", "mine", "beside", "diff")] + [
        {"TYPE": "swap", "SIZE": "8"}
    ]
    guest_of = cloud.deploy("over", store)
    waits, off = (
        cloud.oned.vm_create(
            {
                **cloud.template(
                    name,
                    [*({"IMAGE_ID": str(images[one])} for one in kinds), {"TYPE": "swap", "SIZE": "8"}],
                ),
                "RAW": {"TYPE": "kvm", "DATA": serial_xml(name) + PAUSED},
                "MEMORY": "32",
            }
        )
        for name, kinds in (("waits", LOCAL), ("off", ["off"]))
    )
    for vm in (waits, off):
        cloud.oned.vm_deploy(vm, "h1", 101)
    cloud.oned.vm_poweroff(off, hard=True)
    guest = cloud.guest(guest_of)
    guest.write("vdb", "mine", 4096, 128)
    guest.write("vdc", "beside", 4096, 128)
    cloud.oned.disk_snapshot_create(guest_of, 2, "kept")
    guest.write("vdc", "later", 8192, 128)
    guest.write("vdd", "committed", 4096, 128)
    guest.sync()
    cloud.lab.fe.run([COMMAND, "commit", str(guest_of)], user="oneadmin", timeout=120)
    guest.write("vdd", "lost", 8192, 128)
    guest.sync()
    # Of a host that is DISABLED OpenNebula does not say whether it is lost: it is asked itself.
    cloud.oned.host("h1").state = DISABLED
    asked = [COMMAND, "failover", "h1", "--dry-run"]
    done = cloud.lab.fe.run(asked, user="oneadmin", check=False, timeout=120)
    assert done.returncode == 2 and b"h1: it answers over ssh" in done.stderr, done
    h1.kill()
    done = cloud.lab.fe.run(asked, user="oneadmin", check=False, timeout=120)
    assert done.returncode in (0, 1) and b"answers" not in done.stderr, done
    cloud.oned.host("h1").state = MONITORED
    for vm in (guest_of, waits):
        cloud.oned.vm_lose(vm)

    # Nobody has said that the host is off: it might be the cable.
    with pytest.raises(ActionFailed, match="not fenced"):
        cloud.oned.vm_migrate(waits, "h2")
    assert cloud.oned.state(waits) == ("ACTIVE", Lcm.PROLOG_MIGRATE_UNKNOWN_FAILURE)
    with pytest.raises(ActionFailed, match="h1"):
        cloud.oned.vm_migrate(off, "h2")
    cloud.oned.vm_recover(off, "failure")
    assert cloud.oned.state(off) == ("POWEROFF", Lcm.INIT)
    assert "came back" in hook(cloud, "h1", 0)
    cloud.oned.host("h1").state = ERROR
    assert "may still write" in hook(cloud, "h1", 2)
    assert not cloud.oned.vm(guest_of).resched
    cloud.lab.fe.run([COMMAND, "fence", "h1", "--confirmed-off"], user="oneadmin", timeout=120)
    said = hook(cloud, "h1", 1)
    assert f"VM {guest_of} (over) is rescheduled" in said and f"VM {waits} (waits) waits: " in said
    assert f"onevm migrate {off} HOST" in said
    assert cloud.oned.vm(guest_of).resched
    cloud.oned.vm_migrate(off, "h2")
    cloud.oned.vm_resume(off)
    assert (cloud.oned.state(off), cloud.oned.vm(off).last.host.name) == (("ACTIVE", Lcm.RUNNING), "h2")
    cloud.oned.vm_migrate(guest_of, "h2")
    guest = cloud.guest(guest_of)
    assert guest.node is h2
    guest.check("vdb", "mine", 4096, 128)
    guest.check("vdc", "beside", 4096, 128)
    guest.check("vdc", "later", 8192, 128)
    # Of the local disk of a persistent image there is what was committed.
    guest.check("vdd", "committed", 4096, 128)
    guest.check("vdd", "zero", 8192, 128)
    guest.write("vdd", "after", 12288, 128)
    assert guest.context()["SEMI"] == "over"
    cloud.oned.disk_snapshot_delete(guest_of, 2, 0)
    guest.check("vdc", "beside", 4096, 128)

    with pytest.raises(ActionFailed, match="disk 0 of VM .* only on h1"):
        cloud.oned.vm_recover(waits, "retry")
    assert cloud.files(h2, f"{DATASTORES}/101/{waits}") == []
    for name in LOCAL:
        cloud.oned.images[images[name]].template["SEMISHARED_ON_HOST_FAILURE"] = "recreate"
    cloud.oned.vm_recover(waits, "retry")
    assert cloud.oned.state(waits) == ("ACTIVE", Lcm.RUNNING)
    for number, name in enumerate(LOCAL):
        mine = f"{DATASTORES}/101/{waits}/disk.{number}"
        kind = "raw" if name == "copy" else "qcow2"
        source = cloud.source(images[name])
        h2.run(["qemu-img", "compare", "-U", "-f", kind, "-F", "raw", mine, source])

    # The host comes back with all that it had.
    h1.start()
    cloud.oned.host("h1").state = MONITORED
    for vm in (guest_of, waits, off):
        said = stale(cloud, vm, f"{DATASTORES}/{STORE}/{'c' * 32}")
        assert said.count("another host took the VM over") == 3, said
    done = json.loads(cloud.lab.fe.run([COMMAND, "gc", "--json", "--now"], timeout=60).stdout)
    removed = {
        item["path"]
        for item in done["findings"]
        if item["machine"] == "h1" and item["result"].startswith("removed")
    }
    assert {f"{DATASTORES}/101/{vm}" for vm in (guest_of, waits, off)} <= removed
    guest.check("vdb", "mine", 4096, 128)
    # What it alone had of the local disk is kept, comes into the image no more, and can be had as another
    # one.
    (kept,) = json.loads(cloud.lab.fe.run([COMMAND, "status", "--json"], timeout=60).stdout)["kept"]
    assert (kept["vm"], kept["disk"]) == (guest_of, 3)
    refused = cloud.lab.fe.run([COMMAND, "commit", str(guest_of)], user="oneadmin", timeout=120, check=False)
    assert refused.returncode == 1 and b"SS142" in refused.stderr
    other = [COMMAND, "commit", str(guest_of), "3", "--as-new-image", "another"]
    command = re.search(
        r"--source (\S+)", cloud.lab.fe.run(other, user="oneadmin", timeout=120).stdout.decode()
    )
    assert command and cloud.read(command.group(1), "raw", 128 << 10, 8192 << 10) == content(
        "lost", 8192, 128
    )
    cloud.lab.fe.path(command.group(1)).unlink()
    for words in (
        ["--discard", kept["path"].rpartition("/")[2]],
        [],
    ):  # then the lease that nobody needs any more
        cloud.lab.fe.run([COMMAND, "gc", "--now", *words], timeout=60)
    # And is as good as any other from now on.
    cloud.oned.vm_migrate(waits, "h1", how="poweroff-hard")
    for vm in (guest_of, waits, off):
        cloud.terminate(vm)
    assert cloud.read(cloud.source(images["diff"]), "raw", 128 << 10, 12288 << 10) == content(
        "after", 12288, 128
    )
    assert cloud.leftovers() == []


@pytest.mark.fault(
    46,
    "a late delete on the host that a VM was on leaves its clone on the store, to which its guest "
    "writes elsewhere",
)
def test_late_delete_leaves_the_clone_that_a_guest_has_elsewhere(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int]
) -> None:
    image = image_for("store-clone", "raw")
    vm = cloud.oned.vm_create(cloud.template("late", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}]))
    h1, directory = cloud.lab.node("h1"), f"{DATASTORES}/101/{vm}"
    cloud.oned.vm_deploy(vm, "h1", 101)
    # As a host has it that was away while its VM was made anew.
    h1.run(["cp", "-a", directory, f"{directory}-left"])
    cloud.oned.vm_recover(vm, "recreate")
    cloud.oned.vm_deploy(vm, "h2", 101)
    cloud.guest(vm).write("vdb", 5, 2048, 64)
    h1.run(["mv", f"{directory}-left", directory])
    before = cloud.files(cloud.lab.fe, f"{DATASTORES}/{STORE}")
    delete = ["/var/lib/one/remotes/tm/semishared/delete", f"h1:{directory}/disk.1", str(vm), str(STORE)]
    cloud.lab.fe.run(delete, user="oneadmin", timeout=60)
    assert cloud.files(cloud.lab.fe, f"{DATASTORES}/{STORE}") == before
    cloud.oned.vm_poweroff(vm)
    cloud.oned.vm_resume(vm)
    cloud.guest(vm).check("vdb", 5, 2048, 64)
    cloud.terminate(vm)
    h1.run(["rm", "-rf", directory])
    assert cloud.leftovers() == []
