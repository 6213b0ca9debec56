# SPDX-License-Identifier: Apache-2.0
"""What a host says of its libvirt and QEMU, and of the machine that a guest has, by its own libvirtd."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab import Node
from lab.cloud import Cloud
from lab.hosts import SCRIPTS
from platforms.test_roots import qemu

PACKAGE = f"{SCRIPTS}/lib"
CPU = "<cpu mode='custom' match='exact' check='full'><model fallback='forbid'>{}</model>{}</cpu>"


def told(node: Node, code: str) -> Any:
    """Return what an expression on our package says on a node."""
    program = (
        f"import json, sys; sys.path.insert(0, {PACKAGE!r})\n"
        "from semishared.guest import machine, virsh\n"
        "from semishared.model.vm.move_steps import GuestMachine\n"
        f"print(json.dumps({code}))"
    )
    return json.loads(node.run(["/usr/bin/python3", "-I", "-c", program]).stdout)


def test_versions_are_those_that_virsh_prints(cloud: Cloud) -> None:
    for host in cloud.lab.hosts:
        found = told(host, "virsh.versions()")
        assert (found["libvirt"], found["QEMU"]) == qemu(host)


@pytest.fixture(scope="module")
def guest(cloud: Cloud, os_image: int) -> dict[str, str]:
    """Return the machine of a guest on the second host, as seen there."""
    vm = cloud.deploy("machine", [{"IMAGE_ID": str(os_image)}], "h2")
    found = told(cloud.lab.node("h2"), f"machine.seen({cloud.vm_dir(vm)!r}, 'one-{vm}')._asdict()")
    cloud.terminate(vm)
    return dict(found)


def test_the_machine_of_a_guest_is_one_that_both_hosts_have(cloud: Cloud, guest: dict[str, str]) -> None:
    assert guest["machine"].startswith("pc-i440fx-") and guest["arch"] == "x86_64"
    for host in cloud.lab.hosts:
        assert told(host, f"machine.lacking(GuestMachine(**{guest}))") == ""


@pytest.mark.parametrize(
    ("changed", "lacks"),
    [
        ({"machine": "pc-q35-99.0"}, "'pc-q35-99.0' is not supported by emulator"),
        ({"emulator": "/usr/libexec/qemu-of-elsewhere"}, "Cannot check QEMU binary"),
        ({"emulator": "/tmp/none", "machine": "pc-q35-99.0"}, "is not supported by emulator '/usr/"),
        ({"emulator": "/tmp/none"}, ""),
        ({"cpu": CPU.format("Skylake-Server", "")}, "does not provide required features: "),
        ({"cpu": CPU.format("qemu64", "<feature policy='disable' name='svm'/>")}, ""),
    ],
)
def test_what_a_host_lacks_is_said(
    cloud: Cloud, guest: dict[str, str], changed: dict[str, str], lacks: str
) -> None:
    for host in cloud.lab.hosts:
        said = told(host, f"machine.lacking(GuestMachine(**{ {**guest, **changed} }))")
        assert (lacks in said) if lacks else said == "", said


def test_a_vm_without_a_guest_has_no_machine(cloud: Cloud) -> None:
    assert set(told(cloud.lab.node("h1"), "machine.seen('/nowhere', 'one-4711')")) == {""}
