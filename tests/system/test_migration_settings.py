# SPDX-License-Identifier: Apache-2.0
"""[migration] of semishared.conf, with guests that are too busy to arrive by themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Callable, Iterator

import pytest

from lab.cloud import Cloud
from lab.oned import ActionFailed

MIB = 1 << 20
OWN_MIB = 8
"""What the guest has on a disk of its own before it moves."""
BUSY = 32, 200
"""MiB of memory, and how many of them a guest writes per second: more than crosses."""
MORE = 1.3
"""What is counted more than is limited: heads of packets, bursts."""
USERFAULTFD = Path("/proc/sys/vm/unprivileged_userfaultfd")
Settings = Callable[..., None]


@pytest.fixture
def settings(cloud: Cloud) -> Iterator[Settings]:
    """Return a function that gives all machines a [migration] section, as `onehost sync` would."""
    nodes = [cloud.lab.fe, *cloud.lab.hosts]
    paths = [
        node.path(f"/var/{'lib/one/remotes' if node is cloud.lab.fe else 'tmp/one'}/etc/semishared.conf")
        for node in nodes
    ]
    before = [path.read_text() for path in paths]

    def write(**keys: object) -> None:
        for path, text in zip(paths, before):
            path.write_text(
                text.split("[migration]")[0]
                + "[migration]\n"
                + "".join(f"{key} = {keys[key]}\n" for key in keys)
            )

    yield write
    for path, text in zip(paths, before):
        path.write_text(text)


@pytest.fixture
def post_copy() -> Iterator[None]:
    """Let QEMU do it, as the file that libvirt has for sysctl.d does where there is systemd."""
    before = USERFAULTFD.read_text()
    USERFAULTFD.write_text("1")
    yield
    USERFAULTFD.write_text(before)


def deploy(cloud: Cloud, name: str) -> int:
    """Deploy a VM with disks of its own and a guest that is never done."""
    image = cloud.os_image(name)
    volatile = {"TYPE": "fs", "SIZE": str(2 * OWN_MIB), "FORMAT": "qcow2"}
    vm = cloud.deploy(name, [{"IMAGE_ID": str(image)}, volatile, volatile])
    guest = cloud.guest(vm)
    guest.write("vdb", "own", 0, OWN_MIB << 10)
    guest.loop("vdc", "loop", 0, 8 << 10, 20)
    guest.loop_memory(*BUSY)
    return vm


def lost_nothing(cloud: Cloud, vm: int) -> None:
    """See that all that the guest has written, also to its memory, is there."""
    guest = cloud.guest(vm)
    guest.check("vdb", "own", 0, OWN_MIB << 10)
    for what in ("vdc", "memory"):
        counts = guest.loop_stop(what)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (what, counts)
        assert counts["writes"] > 10


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"no {pattern} in {text}"
    return float(found.group(1))


def refuses(cloud: Cloud, vm: int, settings: Settings) -> None:
    """See that settings which cannot be, or contradict each other, move nothing."""
    settings(rate="fast")
    with pytest.raises(ActionFailed, match=r"SS097 .*rate = 'fast' is neither bytes per second"):
        cloud.oned.vm_migrate(vm, "h2", how="live")
    settings(rate="40M")
    kvmrc = cloud.lab.node("h1").path("/var/tmp/one/etc/vmm/kvm/kvmrc")
    before = kvmrc.read_text()
    kvmrc.write_text(f'{before}\nMIGRATE_OPTIONS="--bandwidth 10"\n')
    try:
        with pytest.raises(ActionFailed, match=r"--bandwidth 10, \[migration\] of semishared.conf rate = 40"):
            cloud.oned.vm_migrate(vm, "h2", how="live")
    finally:
        kvmrc.write_text(before)
    assert cloud.oned.state(vm) == ("ACTIVE", 3)
    assert cloud.files(cloud.lab.node("h2"), cloud.vm_dir(vm)) == []


def test_busy_guest_is_given_up_in_time_and_with_post_copy_arrives(
    cloud: Cloud, settings: Settings, post_copy: None
) -> None:
    rate, limit_s = 16, 5
    vm = deploy(cloud, "busy")
    refuses(cloud, vm, settings)
    settings(rate=f"{rate}M", downtime_ms=1, timeout_s=limit_s)
    with pytest.raises(ActionFailed, match=rf"SS045 .*was given up after {limit_s} s: "):
        cloud.oned.vm_migrate(vm, "h2", how="live")
    assert cloud.oned.vm(vm).last.host.name == "h1"
    said = cloud.said("migrate")[-1]
    assert rate < number(r"given up after .* (\d+) MiB sent", said) < MORE * rate * limit_s
    brought, took = number(r"brought (\d+) MiB", said), number(r"of files in ([0-9.]+) s", said)
    assert brought >= OWN_MIB
    assert brought / took < MORE * rate
    # Nothing of it is at the target, and the same guest goes on to it otherwise.
    assert cloud.files(cloud.lab.node("h2"), cloud.vm_dir(vm)) == []
    settings(rate=f"{rate}M", downtime_ms=1, timeout_s=3, at_timeout="post-copy")
    cloud.oned.vm_migrate(vm, "h2", how="live")
    said = cloud.said("migrate")[-1]
    assert "not there after 3 s: postcopy" in said
    assert number(r"(\d+) MiB of memory", said) / number(r"MiB of disks in ([0-9.]+) s", said) < MORE * rate
    lost_nothing(cloud, vm)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.mark.long
def test_busy_guest_is_slowed_down_until_it_arrives(cloud: Cloud, settings: Settings) -> None:
    vm = deploy(cloud, "slowed")
    # A guest that stands still for 99 % of each second has something to catch up with in the rest: that has
    # to fit into the downtime, and all of the memory that it writes to must not.
    settings(rate="32M", downtime_ms=600, auto_converge="yes", timeout_s=300)
    cloud.oned.vm_migrate(vm, "h2", how="live")
    said = cloud.said("migrate")[-1]
    assert number(r"after (\d+) s: \d+ MiB sent, \d+ of \d+ MiB left", said) >= 10
    assert number(r"guest slowed down by (\d+) %", said) >= 20
    lost_nothing(cloud, vm)
    cloud.terminate(vm)


@pytest.mark.long
def test_busy_guest_is_suspended_until_it_arrives(cloud: Cloud, settings: Settings) -> None:
    vm = deploy(cloud, "suspended")
    settings(rate="16M", downtime_ms=1, timeout_s=5, at_timeout="suspend")
    cloud.oned.vm_migrate(vm, "h2", how="live")
    said = cloud.said("migrate")[-1]
    assert "not there after 5 s: suspend" in said
    assert number(r"stood still for (\d+) ms", said) > 1000
    lost_nothing(cloud, vm)
    cloud.terminate(vm)
