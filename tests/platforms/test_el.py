# SPDX-License-Identifier: Apache-2.0
"""A host arranged as one of EL (el.py) beside one of Debian 12, and one with the sudo of Debian 11."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab import roots
from lab.cloud import SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed
from platforms import el
from shares.cloud import SHARES, template
from shares.conftest import loop_of, mounted_btrfs
from shares.guests import MOUNTED, SUDOERS
from shares.page import ROOT, rule

EL, OLD_SUDO = "h2", "h3"
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
PROBE = "/var/tmp/one/lib/semishared/host/probe.py"
KIB = 64
DATA = content("base", 0, KIB)


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    if os.environ.get(roots.PLATFORM, "mixed") != "mixed":
        pytest.skip("these hosts have releases of their own, whichever the others have")
    with Cloud.up(hosts=3, releases={EL: 13, OLD_SUDO: 11}) as up:
        el.arrange(up.lab.node(EL))
        yield up


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    """Remove the VMs that a failing test leaves."""
    yield
    cloud.delete_all()


def said(cloud: Cloud, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run `semishared`; return what it prints."""
    done = cloud.lab.fe.run([COMMAND, *words], check=False, timeout=300)
    assert done.returncode in codes, (done.stdout, done.stderr)
    return done.stdout.decode()


def test_it_is_arranged(cloud: Cloud) -> None:
    host = cloud.lab.node(EL)
    version = host.run(["/usr/bin/python3", "-IS", "-c", "import sys; print(*sys.version_info[:2])"])
    assert version.stdout == b"3 6\n"
    assert b"/usr/libexec/qemu-kvm" in host.run(["virsh", "-c", "qemu:///system", "capabilities"]).stdout


@pytest.mark.fault(73, "a host whose /usr/bin/python3 is 3.6 works by the newer Python beside it")
def test_disks_of_all_kinds_are_deployed_moved_and_committed(cloud: Cloud) -> None:
    mine = cloud.data_image("mine", DATA, persistent=True)
    local = cloud.data_image("local", DATA, persistent=True, SEMISHARED_PLACE="local")
    cow = cloud.data_image("cow", DATA, format="qcow2")
    images = (cloud.os_image(), mine, local, cow)
    vm = cloud.deploy("of-el", [{"IMAGE_ID": str(image)} for image in images], EL)
    guest = cloud.guest(vm)
    for disk in ("vdb", "vdc", "vdd"):
        guest.check(disk, "base", 0, KIB)
        guest.write(disk, "one", 1024, KIB)
        guest.loop(disk, f"loop-{disk}", 4096, 4096, 4)
    said(cloud, "commit", str(vm))
    assert cloud.read(cloud.source(local), "raw", KIB << 10, 1 << 20) == content("one", 1024, KIB)
    for target in ("h1", EL):
        cloud.oned.vm_migrate(vm, target, SYSTEM, how="live")
        guest = cloud.guest(vm)
    for disk in ("vdb", "vdc", "vdd"):
        guest.wait_written(disk)
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    guest.write("vdc", "two", 2048, KIB)
    cloud.terminate(vm)
    assert cloud.read(cloud.source(local), "raw", KIB << 10, 2 << 20) == content("two", 2048, KIB)
    assert cloud.leftovers() == []


@pytest.mark.fault(
    73, "doctor and the monitoring of a host whose /usr/bin/python3 is 3.6 go by the newer one"
)
def test_doctor_and_the_probe_find_nothing_wrong(cloud: Cloud) -> None:
    found: Any = json.loads(said(cloud, "doctor", "--json", codes=(0, 1)))
    assert [item for item in found["findings"] if item["machine"] == EL] == []
    assert found["machines"][EL]["python3"].startswith("3.13.")
    probe = cloud.lab.node(EL).run(["/usr/bin/python3", "-IS", PROBE]).stdout.decode()
    assert probe.startswith('HEALTH_SEMISHARED = "OK"\n'), probe


@pytest.mark.fault(73, "install.sh takes the newer Python beside a /usr/bin/python3 that is too old")
def test_install_finds_the_newer_python(cloud: Cloud) -> None:
    host = cloud.lab.node(EL)
    host.run(["sh", "-euc", "mkdir -p /var/tmp/checkout; ln -s /var/tmp/one/lib /var/tmp/checkout/lib"])
    script = host.path("/var/tmp/checkout/install.sh")
    script.write_bytes(cloud.lab.fe.path("/opt/semishared/install.sh").read_bytes())
    script.chmod(0o755)
    words = ["/var/tmp/checkout/install.sh", "--help"]
    assert host.run(words).stdout.startswith(b"usage: install.sh")
    with el.alone(host):
        done = host.run(words, check=False)
    assert done.returncode == 1 and b"/usr/bin/python3 is older than 3.9: install a newer" in done.stderr


@pytest.mark.fault(73, "a host whose only Python is too old is said to be that, by actions and by doctor")
def test_a_host_with_an_old_python_alone_is_refused_in_one_line(cloud: Cloud) -> None:
    image, host = cloud.os_image("alone"), cloud.lab.node(EL)
    with el.alone(host):
        with pytest.raises(
            ActionFailed, match=f"SS092 host {EL}: /usr/bin/python3 is 3.6, and /usr/bin has no"
        ):
            cloud.deploy("alone", [{"IMAGE_ID": str(image)}], EL)
        found: Any = json.loads(said(cloud, "doctor", "--json", codes=(2,)))
        of_host = [item for item in found["findings"] if item["machine"] == EL]
        # Its VM waits for an operator, too.
        (only,) = [item for item in of_host if not item["what"].startswith("VM ")]
        assert (only["severity"], only["what"]) == ("broken", "python3 is 3.6.8")
        probe = host.run(["/usr/bin/python3", "-IS", PROBE], check=False)
        assert (probe.returncode, probe.stdout) == (1, b"")


@pytest.mark.fault(73, "doctor says that libvirt runs QEMU as another user than the one whose the disks are")
def test_qemu_of_another_user_opens_no_disk_and_doctor_says_so(cloud: Cloud) -> None:
    with el.qemu_is_qemu(cloud.lab.node(EL)):
        found: Any = json.loads(said(cloud, "doctor", "--json", codes=(2,)))
        (only,) = [item for item in found["findings"] if item["machine"] == EL]
        assert (only["severity"], only["what"].partition(":")[0]) == (
            "broken",
            "libvirt runs QEMU as qemu, not as oneadmin",
        )
        assert only["mend"].endswith("systemctl restart virtqemud")
        local = cloud.data_image("qemus", DATA, persistent=True, SEMISHARED_PLACE="local")
        with pytest.raises(ActionFailed, match=r"Cannot access storage file .* \(as uid:107, gid:107\)"):
            cloud.deploy("qemus", [{"IMAGE_ID": str(local)}], EL)


@pytest.mark.fault(73, "a sudo without regular expressions is named by what makes shares, not only by doctor")
def test_a_sudo_without_regular_expressions_makes_no_share_and_says_why(cloud: Cloud, tmp_path: Path) -> None:
    host = cloud.lab.node(OLD_SUDO)
    with mounted_btrfs(tmp_path) as where:
        device = loop_of(where)
        number = os.stat(device).st_rdev
        words = [ROOT, device, str(os.major(number)), str(os.minor(number)), MOUNTED]
        script = 'mkdir -p "$1"; [ -e "$2" ] || mknod "$2" b $3 $4; mount -t btrfs -o "$5" "$2" "$1"'
        host.run(["sh", "-euc", f'{script}; chown oneadmin: "$1"', "sh", *words], user="root")
        try:
            host.path(SUDOERS).write_text(rule("oneadmin"))
            cloud.oned.datastore_create(template("btrfs", Path(ROOT), BRIDGE_LIST=OLD_SUDO), SHARES)
            done = cloud.lab.fe.run([COMMAND, "share", "init", str(SHARES)], check=False)
            line = f"SS171 sudo on {OLD_SUDO} does not understand a line of sudoers; ours have regular expr"
            assert done.returncode == 2 and line in done.stderr.decode(), done
            found: Any = json.loads(said(cloud, "doctor", "--json", codes=(2,)))
            whats = [item["what"] for item in found["findings"] if item["machine"] == OLD_SUDO]
            assert any("sudo 1.9.5 knows no regular expressions" in what for what in whats), whats
        finally:
            host.run(["umount", ROOT], user="root")
