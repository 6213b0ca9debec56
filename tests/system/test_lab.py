# SPDX-License-Identifier: Apache-2.0
"""The lab itself: is it what the other suites take it for, and does it leave nothing behind?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from lab import Lab, Node, NodeError, roots, state
from lab.guest import (
    LINUX,
    METAL,
    Guest,
    GuestError,
    System,
    content,
    serial_path,
    serial_xml,
    write_guest_image,
)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

STORE = "/var/lib/one/datastores/100"
LOCAL = "/var/lib/one/datastores/101"
URI = ["virsh", "-q", "-c", "qemu:///system"]
ROOT_PORTS = (
    "<controller type='pci' model='pcie-root'/>" + "<controller type='pci' model='pcie-root-port'/>" * 10
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab.up(hosts=2) as up:
        yield up


def disk_xml(path: str, target: str) -> str:
    bus = {"v": "virtio", "h": "ide", "s": "sata"}[target[0]]
    device, mark = ("disk", "") if bus == "virtio" else ("cdrom", "<readonly/>")
    return (
        f"<disk type='file' device='{device}'><driver name='qemu' type='raw' "
        f"cache='none'/><source file='{path}'/>"
        f"<target dev='{target}' bus='{bus}'/>{mark}</disk>"
    )


def domain_xml(lab: Lab, name: str, machine: str, disks: list[str]) -> str:
    """Write a domain as oned does: its emulator path, its cputune shares, its controllers, RAW data at the
    end.
    """
    return (
        f"<domain type='{lab.virt}'><name>{name}</name><cputune><shares>103</shares></cputune><memory unit='MiB'>128</memory>"  # noqa: E501
        f"<vcpu>1</vcpu><os><type arch='x86_64' machine='{machine}'>hvm</type><boot dev='hd'/></os>"
        "<features><acpi/></features><on_poweroff>destroy</on_poweroff>"
        f"<devices><emulator>/usr/bin/qemu-kvm-one</emulator>{''.join(disks)}"
        f"{ROOT_PORTS if machine == 'q35' else ''}<memballoon "
        f"model='none'/></devices>{serial_xml(name)}</domain>"
    ).replace(f"</devices>{serial_xml(name)}", serial_xml(name).replace("<devices>", ""))


def make_disk(lab: Lab, node: Node, path: str, mib: int = 8) -> None:
    node.run(["truncate", "-s", f"{mib}M", path])


def make_os(lab: Lab, node: Node, path: str, system: System = METAL) -> None:
    write_guest_image(node.path(path), system)
    os.chown(node.path(path), lab.uid, lab.gid)


def boot(lab: Lab, node: Node, name: str, machine: str, disks: list[str]) -> Guest:
    """Boot a guest the way the front-end would: through ssh, as oneadmin."""
    xml = domain_xml(lab, name, machine, disks)
    lab.fe.run(["ssh", node.name, *URI, "create", "/dev/stdin"], input=xml.encode())
    return Guest(node, serial_path(name)).wait_up()


def wait_off(node: Node, name: str, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while name in node.run([*URI, "list", "--name"]).stdout.decode().split():
        assert time.monotonic() < deadline, f"{name} is still running"
        time.sleep(0.1)


# -- nodes
# -------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_oneadmin_reaches_every_node_by_ssh(lab: Lab) -> None:
    nodes = [lab.fe, *lab.hosts]
    for source in nodes:
        for target in nodes:
            seen = source.run(["ssh", target.name, "hostname; id -un; pwd"]).stdout.decode().split()
            assert seen == [target.name, "oneadmin", "/var/lib/one"]


def test_a_node_has_its_own_files_and_cannot_touch_the_machine(lab: Lab) -> None:
    h1, h2 = lab.hosts
    for place in (LOCAL, "/var/tmp", "/tmp", "/run/one", "/dev/shm", "/var/lib/one"):
        h1.run(["touch", f"{place}/mark-{lab.id}"])
        assert h1.path(f"{place}/mark-{lab.id}").exists()
        assert not h2.path(f"{place}/mark-{lab.id}").exists()
        assert not Path(f"{place}/mark-{lab.id}").exists()
    h1.run(["touch", f"{STORE}/mark"])
    assert h2.path(f"{STORE}/mark").stat().st_uid == lab.uid
    assert lab.fe.path(f"{STORE}/mark").exists()
    with pytest.raises(NodeError, match="Read-only"):
        h1.run(["touch", "/usr/bin/mark"], user="root")
    h1.run(["touch", "/etc/mark"], user="root")
    assert not Path("/etc/mark").exists()


def test_run_passes_input_environment_and_failure(lab: Lab) -> None:
    done = lab.fe.run(
        ["sh", "-c", "cat; echo $WORD; pwd"], input=b"in ", env={"WORD": "two words"}, cwd="/tmp"
    )
    assert done.stdout == b"in two words\n/tmp\n"
    with pytest.raises(NodeError, match="no such luck"):
        lab.fe.run(["sh", "-c", "echo no such luck >&2; exit 3"])
    with pytest.raises(subprocess.TimeoutExpired):
        lab.fe.run(["sleep", "77"], timeout=0.3)
    assert lab.fe.run(["pgrep", "-f", "sleep 77"], check=False).returncode == 1, "it outlived its time limit"


def test_each_host_has_its_own_libvirt_with_the_emulator_oned_names(lab: Lab) -> None:
    texts = [host.run([*URI, "capabilities"]).stdout.decode() for host in lab.hosts]
    ids = {text.partition("<uuid>")[2].partition("<")[0] for text in texts}
    assert len(ids) == 2
    assert all(host.run(["test", "-x", "/usr/bin/qemu-kvm-one"]).returncode == 0 for host in lab.hosts)


def test_sync_makes_the_hosts_equal_to_the_front_end(lab: Lab) -> None:
    lab.fe.run(["sh", "-c", "mkdir -p remotes/tm/x && echo one >remotes/tm/x/a && ln -s a remotes/tm/x/b"])
    lab.sync()
    for host in lab.hosts:
        assert host.run(["cat", "/var/tmp/one/tm/x/b"]).stdout == b"one\n"
        assert not host.path("/var/tmp/one/tm/x/b").is_symlink()
    lab.fe.run(["rm", "-r", "remotes/tm/x"])
    lab.sync()
    assert not lab.hosts[0].path("/var/tmp/one/tm/x").exists()


# -- guests
# ------------------------------------------------------------------------------------------------------------


def test_the_verifier_finds_a_corrupted_sector(lab: Lab) -> None:
    h1 = lab.node("h1")
    system, data = f"{LOCAL}/os.raw", f"{LOCAL}/data.raw"
    make_os(lab, h1, system)
    make_disk(lab, h1, data)
    disks = [disk_xml(system, "vda"), disk_xml(data, "vdb")]
    guest = boot(lab, h1, "verify", "q35", disks)
    assert guest.disks() == {"vda": 32 << 20, "vdb": 8 << 20}
    with pytest.raises(GuestError, match="no context"):
        guest.context()
    guest.write("vdb", "first", 0, 4096)
    guest.check("vdb", "first", 0, 4096)
    guest.check("vdb", "zero", 4096, 4096)
    with pytest.raises(GuestError, match="4096 of 4096 KiB differ"):
        guest.check("vdb", "second", 0, 4096)
    with pytest.raises(GuestError, match="No space left"):
        guest.write("vdb", "first", 8191, 2)
    digest = guest.sum("vdb", 0, 1024)
    h1.run([*URI, "shutdown", "verify"])  # the ACPI power button: the guest goes down by itself
    wait_off(h1, "verify")

    path = h1.path(data)
    assert path.read_bytes()[64 * 1024 : 128 * 1024] == content("first", 64, 64)
    assert digest == h1.run(["sh", "-c", f"head -c 1M {data} | sha256sum"]).stdout.decode().split()[0]
    with path.open("r+b") as out:
        out.seek(777 * 1024 + 512)
        out.write(b"not what was written")
    guest.close()
    guest = boot(lab, h1, "verify", "q35", disks)
    with pytest.raises(GuestError, match="1 of 4096 KiB differ, the first at KiB 777"):
        guest.check("vdb", "first", 0, 4096)
    guest.check("vdb", "first", 0, 777)
    guest.poweroff()
    wait_off(h1, "verify")


def test_the_background_load_finds_what_changes_under_it(lab: Lab) -> None:
    h1 = lab.node("h1")
    make_os(lab, h1, f"{LOCAL}/os2.raw")
    make_disk(lab, h1, f"{LOCAL}/load.raw")
    guest = boot(
        lab, h1, "load", "pc", [disk_xml(f"{LOCAL}/os2.raw", "vda"), disk_xml(f"{LOCAL}/load.raw", "vdb")]
    )
    guest.loop("vdb", "load", 0, 1024, 100)
    deadline = time.monotonic() + 60
    while (counts := guest.loop_stat("vdb"))["writes"] <= 20 or counts["reads"] <= 10:
        assert time.monotonic() < deadline, counts
        time.sleep(0.2)
    assert counts["errors"] == counts["mismatches"] == 0
    with h1.path(f"{LOCAL}/load.raw").open("r+b") as out:
        out.write(bytes(1 << 20))
    counts = guest.loop_stop("vdb")
    assert counts["verified"] >= 10
    assert counts["mismatches"] > 0
    h1.run([*URI, "destroy", "load"])


def wait_slots(guest: Guest, timeout: float = 30) -> None:
    """Wait until its kernel has looked into each empty slot, and has it off.

    QEMU 5.2 has no hot-plug by ACPI on q35, and says that the link of empty slots is up. A disk that comes
    before the kernel knows better goes when it has the slot off, or a detach takes that back, and it stays.
    """
    deadline = time.monotonic() + timeout
    # It has a slot off, and says so to QEMU, a second after it has said that nothing is there.
    off = "dmesg | sed -n 's/^\\[ *\\([0-9]*\\).*pciehp: .*No device found.*/\\1/p' | tail -n 1"
    counts = "dmesg | grep -c 'pciehp: .*Link Up'; dmesg | grep -c 'No device found'"
    script = f"{counts}; cut -d. -f1 /proc/uptime; {off}"
    while True:
        ups, empty, now, *said = map(int, guest.run(script)[1].split())
        if said and ups == empty and now > said[0] + 3:
            return
        assert time.monotonic() < deadline, guest.run("dmesg | grep pciehp")
        time.sleep(0.1)


# Where OpenNebula puts the context: on the machine's own controller, IDE or SATA.
@pytest.mark.parametrize(
    ("machine", "target", "system"), [("q35", "sda", LINUX), ("pc", "hdb", METAL)], ids=["q35", "pc"]
)
def test_a_guest_sees_disks_come_and_go_and_reads_its_context(
    lab: Lab, machine: str, target: str, system: System
) -> None:
    h2, name = lab.node("h2"), f"hot-{machine}"
    make_os(lab, h2, f"{LOCAL}/{name}.raw", system)
    make_disk(lab, h2, f"{LOCAL}/{name}-2.raw", 4)
    h2.run(["mkdir", name])
    h2.path(f"/var/lib/one/{name}/context.sh").write_text("# made\nNAME='a \\ \"b\"'\nTEXT='two\nlines'\n")
    h2.run(["genisoimage", "-quiet", "-V", "CONTEXT", "-J", "-R", "-o", f"{LOCAL}/{name}.iso", name])
    disks = [disk_xml(f"{LOCAL}/{name}.raw", "vda"), disk_xml(f"{LOCAL}/{name}.iso", target)]
    guest = boot(lab, h2, name, machine, disks)
    assert guest.context() == {"NAME": 'a \\ "b"', "TEXT": "two\nlines"}
    if machine == "q35" and roots.LIBVIRT_7_0:
        wait_slots(guest)
    for _ in range(2):
        h2.run(
            [*URI, "attach-device", name, "/dev/stdin"],
            input=disk_xml(f"{LOCAL}/{name}-2.raw", "vdb").encode(),
        )
        guest.wait_disk("vdb")
        guest.write("vdb", "hot", 0, 64)
        guest.check("vdb", "hot", 0, 64)
        h2.run([*URI, "detach-disk", name, "vdb"])
        guest.wait_disk("vdb", present=False)
        # QEMU lets it go after its guest.
        h2.wait_for(["sh", "-c", f"! {' '.join(URI)} domblklist {name} | grep -w vdb"], 30)
    h2.run([*URI, "destroy", name])


@pytest.mark.long  # test_vm.py has a VM in place
def test_a_guest_on_shared_disks_migrates_live_under_load(lab: Lab) -> None:
    h1, h2 = lab.hosts
    make_os(lab, h1, f"{STORE}/os.raw")
    make_disk(lab, h1, f"{STORE}/data.raw")
    disks = [disk_xml(f"{STORE}/os.raw", "vda"), disk_xml(f"{STORE}/data.raw", "vdb")]
    guest = boot(lab, h1, "mover", "q35", disks)
    guest.write("vdb", "before", 0, 4096)
    guest.loop("vdb", "load", 4096, 2048)
    for source, target, options in ((h1, h2, []), (h2, h1, ["--unsafe"])):
        uri = f"qemu+ssh://{target.name}/system"
        source.run([*URI, "migrate", "--live", *options, "mover", uri])
        guest.moved(target)
        guest.wait_up(15)
        assert "mover" not in source.run([*URI, "list", "--name"]).stdout.decode().split()
    guest.check("vdb", "before", 0, 4096)
    counts = guest.loop_stop("vdb")
    assert counts["errors"] == counts["mismatches"] == 0
    assert counts["maxgap_ms"] < 5000
    h1.run([*URI, "destroy", "mover"])


def test_a_guest_on_local_disks_is_not_taken_for_shared(lab: Lab) -> None:
    h1 = lab.node("h1")
    make_os(lab, h1, f"{LOCAL}/stay.raw")
    lab.fe.run(
        ["ssh", "h1", *URI, "create", "/dev/stdin"],
        input=domain_xml(lab, "stay", "q35", [disk_xml(f"{LOCAL}/stay.raw", "vda")]).encode(),
    )
    with pytest.raises(NodeError, match="Unsafe migration"):
        h1.run([*URI, "migrate", "--live", "stay", "qemu+ssh://h2/system"])
    h1.run([*URI, "destroy", "stay"])


# -- accidents
# ---------------------------------------------------------------------------------------------------------


def test_power_cut_and_return(lab: Lab) -> None:
    h2 = lab.node("h2")
    h2.run(["sh", "-c", f"echo kept >{LOCAL}/kept; echo lost >/tmp/lost; sync {LOCAL}/kept {LOCAL}"])
    make_os(lab, h2, f"{LOCAL}/cut.raw")
    boot(lab, h2, "cut", "q35", [disk_xml(f"{LOCAL}/cut.raw", "vda")])
    running = h2.popen(["sleep", "600"])
    h2.kill()
    assert running.wait(10) != 0
    assert not h2.up
    assert h2.path(f"{LOCAL}/kept").read_text() == "kept\n", "its disks can be looked at while it is off"
    with pytest.raises(RuntimeError, match="h2 is down"):
        h2.run(["true"])
    h2.start()
    assert lab.fe.run(["ssh", "h2", "cat", f"{LOCAL}/kept"]).stdout == b"kept\n"
    assert not h2.path("/tmp/lost").exists()
    assert h2.run([*URI, "list", "--all", "--name"]).stdout.strip() == b""


def test_cable_cut_and_joined(lab: Lab) -> None:
    h1 = lab.node("h1")
    words = ["ssh", "-o", "ConnectTimeout=2", "h1", "true"]
    h1.cut()
    started = time.monotonic()
    assert lab.fe.run(words, check=False, timeout=20).returncode == 255
    assert time.monotonic() - started < 10
    assert h1.run(["true"]).returncode == 0, "the host itself goes on"
    h1.join()
    lab.fe.wait_for(words, timeout=20)


# -- nothing left
# ------------------------------------------------------------------------------------------------------


@pytest.mark.long  # suites run several at a time
def test_two_labs_at_a_time_and_nothing_left_of_the_second(lab: Lab) -> None:
    with Lab.up(hosts=1, stores=(100, 107)) as other:
        assert other.fe.ip.rpartition(".")[0] != lab.fe.ip.rpartition(".")[0]
        make_os(other, other.hosts[0], f"{LOCAL}/os.raw")
        boot(other, other.hosts[0], "left", "q35", [disk_xml(f"{LOCAL}/os.raw", "vda")])
        other.fe.popen(["sleep", "600"])
        assert any("qemu" in found for found in other.leftovers()), "the search finds what is there"
    assert other.leftovers() == []
    assert lab.fe.run(["ssh", "h1", "true"]).returncode == 0


OWNER = """
import json, os, sys, time
from lab import Lab
with Lab.up(hosts=1) as lab:
    print(json.dumps([lab.id, sorted(lab._namespaces)]), flush=True)
    lab.fe.popen(["sleep", "600"])
    time.sleep(600)
"""


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.long) for how in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_nothing_is_left_when_the_owner_is_ended(how: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    assert owner.stdout
    lab_id, namespaces = json.loads(owner.stdout.readline())
    assert state.leftovers(lab_id, set(namespaces))
    owner.send_signal(how)
    owner.wait(60)
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while state.leftovers(lab_id, set(namespaces)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert state.leftovers(lab_id, set(namespaces)) == []


def test_a_lab_whose_owner_and_guard_died_is_swept() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
    )
    assert owner.stdout
    lab_id, namespaces = json.loads(owner.stdout.readline())
    record = state.read(state.BASE / lab_id)
    os.kill(record["guard"], signal.SIGKILL)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while state.alive(record["keeper"], record["keeper_start"]):
        assert time.monotonic() < deadline, "the keeper outlived its guard"
        time.sleep(0.05)
    assert (state.BASE / lab_id).exists(), "only the next lab takes the files"
    state.sweep()
    assert state.leftovers(lab_id, set(namespaces)) == []


def test_a_lab_from_the_command_line_stays_until_down() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "lab", *words], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    lab_id = command("up", "1").split()[1]
    namespaces = state.namespaces_of(state.read(state.BASE / lab_id)["keeper"]) - state.namespaces_of(
        os.getpid()
    )
    try:
        assert "down" not in command("--lab", lab_id, "status")
        assert command("--lab", lab_id, "exec", "fe", "ssh", "h1", "hostname") == "h1\n"
        state.sweep()
        assert command("--lab", lab_id, "exec", "root@h1", "id", "-u") == "0\n"
    finally:
        command("--lab", lab_id, "down")
    assert state.leftovers(lab_id, namespaces) == []


@pytest.mark.long  # every suite has a lab that goes up and down; the tests above see what is left of it
@pytest.mark.parametrize("hosts", [1, 4, 16])
def test_lab_of_any_size_goes_up_and_down(hosts: int, figure: Callable[[str, object], None]) -> None:
    started = time.monotonic()
    lab = Lab.up(hosts=hosts)
    up = time.monotonic()
    lab.down()
    figure(f"lab with {hosts} hosts: up s", round(up - started, 1))
    figure(f"lab with {hosts} hosts: down s", round(time.monotonic() - up, 1))
    assert lab.leftovers() == []
