# SPDX-License-Identifier: Apache-2.0
"""A VM whose template, or cluster, names a CPU: refused by a host that lacks it before anything of it comes,
and started by one that has it.

The guests of labs are mostly emulated, and libvirt looks at no emulated CPU whether the processor has it:
what is not there is a model that neither libvirt nor QEMU knows.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab import Node
from lab.cloud import SYSTEM, Cloud
from lab.guest import content
from lab.hosts import SCRIPTS
from lab.oned import ActionFailed

PACKAGE = f"{SCRIPTS}/lib"
KNOWN, UNKNOWN = "Westmere", "Nosuch-Lake"
KIB = 1024
DATA = content("base", 0, KIB)
CPU = "<cpu mode='custom'{}><model fallback='forbid'>{}</model>{}</cpu>"
CHECKED = " check='partial'"
"""What libvirt fills in for a CPU that is not emulated."""


def said(node: Node, kind: str, cpu: str, call: str = "unstartable", machine: str = "pc") -> str:
    """Return what a node's libvirt says of a CPU, by our package."""
    program = (
        f"import json, sys; sys.path.insert(0, {PACKAGE!r})\n"
        "from semishared.guest import machine\n"
        "from semishared.model.vm.move_steps import GuestMachine\n"
        f"print(json.dumps(machine.{call}(GuestMachine({kind!r}, 'x86_64', {machine!r}, '', {cpu!r}))))"
    )
    return str(json.loads(node.run(["/usr/bin/python3", "-I", "-c", program]).stdout))


@pytest.fixture(scope="module")
def data_image(cloud: Cloud) -> int:
    return cloud.data_image("cpu-data", DATA, format="qcow2")


def template(cloud: Cloud, name: str, images: tuple[int, ...], **cpu: str) -> dict[str, Any]:
    return cloud.template(name, [{"IMAGE_ID": str(image)} for image in images], CPU_MODEL=cpu)


@pytest.fixture
def cluster(cloud: Cloud) -> Any:
    """Yield the template of the hosts' cluster, and have it empty again."""
    found = cloud.oned.clusters[0]
    yield found
    found.clear()


@pytest.mark.fault(
    87, "what would be started is what libvirt is asked: it starts what its comparison refuses"
)
@pytest.mark.parametrize(
    ("cpu", "words"),
    [
        (CPU.format("", KNOWN, ""), ""),
        (CPU.format("", UNKNOWN, ""), f"Unknown CPU model {UNKNOWN}"),
        (CPU.format("", KNOWN, "<feature policy='require' name='nosuch'/>"), "CPU feature"),
        (CPU.format("", "Skylake-Server", ""), ""),
        (CPU.format(CHECKED, "Skylake-Server", ""), "does not provide required features: "),
        (CPU.format(CHECKED, KNOWN, "<feature policy='require' name='avx512f'/>"), "avx512f"),
    ],
)
def test_what_libvirt_would_not_start(cloud: Cloud, cpu: str, words: str) -> None:
    for host in cloud.lab.hosts:
        found = said(host, cloud.lab.virt, cpu)
        assert (words in found) if words else found == "", found
        look = "virsh -c qemu:///system list --all --name; find /var/lib/libvirt /run/libvirt"
        left = host.run(["sh", "-c", look], user="root")
        assert b"cpu-probe" not in left.stdout


def test_what_is_wrong_beside_the_cpu_refuses_none(cloud: Cloud) -> None:
    for host in cloud.lab.hosts:
        assert said(host, cloud.lab.virt, CPU.format("", KNOWN, ""), machine="pc-q35-99.0") == ""
        assert said(host, "nosuch", CPU.format("", UNKNOWN, "")) == ""


@pytest.mark.fault(87, "a CPU_MODEL that the host lacks is refused before anything of the VM comes")
def test_a_model_that_the_host_lacks_is_refused_before_anything_comes(
    cloud: Cloud, os_image: int, data_image: int
) -> None:
    vm = cloud.oned.vm_create(template(cloud, "lacks", (os_image, data_image), MODEL=UNKNOWN))
    begun = len(cloud.oned.calls)
    refused = rf"SS094 VM {vm} cannot start on h1 with its CPU_MODEL {UNKNOWN}: .*Unknown CPU model"
    with pytest.raises(ActionFailed, match=refused):
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    assert [call.action for call in cloud.oned.calls[begun:]].count("clone") == 1
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    cloud.oned.vm_recover(vm, "delete")
    assert cloud.leftovers() == []


def test_a_model_that_the_host_has_is_started(cloud: Cloud, os_image: int, data_image: int) -> None:
    """A disk is attached to it, too: nothing is asked for that."""
    made = template(cloud, "has", (os_image,), MODEL=KNOWN, FEATURES="aes,popcnt")
    vm = cloud.oned.vm_create(made)
    rpc = cloud.oned.rpc
    assert rpc
    begun = len(rpc.requests)
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    assert "one.cluster.info" not in [method for method, _ in rpc.requests[begun:]]
    cloud.guest(vm)
    xml = cloud.lab.node("h1").run(["virsh", "-c", "qemu:///system", "dumpxml", f"one-{vm}"]).stdout.decode()
    assert f">{KNOWN}</model>" in xml
    cloud.oned.vm(vm).template["CPU_MODEL"] = {"MODEL": UNKNOWN}
    cloud.oned.disk_attach(vm, data_image)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.mark.fault(87, "EVC_MODE of the cluster is what the host must have, if it lacks the VM's own model")
@pytest.mark.parametrize("evc", [KNOWN, "host-passthrough", UNKNOWN])
def test_the_model_of_the_cluster_comes_first(cloud: Cloud, os_image: int, cluster: Any, evc: str) -> None:
    cluster["EVC_MODE"] = evc
    vm = cloud.oned.vm_create(template(cloud, f"evc-{evc.lower()}", (os_image,), MODEL="None-Bridge"))
    if evc == KNOWN:
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
        cloud.guest(vm)
        cloud.terminate(vm)
        assert cloud.leftovers() == []
        return
    # Emulated, host-passthrough is refused by libvirt; by us it is not.
    words = f"SS094 VM {vm} cannot start on h1 with its EVC_MODE {UNKNOWN} of cluster default"
    with pytest.raises(ActionFailed, match=words if evc == UNKNOWN else "host-passthrough"):
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    has_come = cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) != []
    assert has_come == (evc != UNKNOWN)
    cloud.oned.vm_recover(vm, "delete")
    assert cloud.leftovers() == []


@pytest.mark.fault(87, "an undeployed VM goes to no host that lacks what its template names")
def test_an_undeployed_vm_stays_where_it_is(cloud: Cloud, os_image: int) -> None:
    vm = cloud.oned.vm_create(template(cloud, "undeployed", (os_image,), MODEL=KNOWN))
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    cloud.oned.vm_undeploy(vm)
    cloud.oned.vm(vm).template["CPU_MODEL"] = {"MODEL": UNKNOWN}
    cloud.oned.vm_resume(vm)
    with pytest.raises(ActionFailed, match=rf"SS094 VM {vm} cannot start on h2 with its CPU_MODEL {UNKNOWN}"):
        cloud.oned.vm_deploy(vm, "h2", SYSTEM)
    assert cloud.files(cloud.lab.node("h2"), cloud.vm_dir(vm)) == []
    assert cloud.files(cloud.lab.front_ends[0], cloud.vm_dir(vm)) != []
    cloud.oned.vm_recover(vm, "delete")
    assert cloud.leftovers() == []
