# SPDX-License-Identifier: Apache-2.0
"""Whether a host has the CPU with which a VM is to be started, asked before anything of the VM comes there.

oned writes the domain only when all disks are there, so what it will say of the CPU is read where it reads
it (LibVirtDriverKVM.cc): CPU_MODEL of the VM's template, else of the host's, the cluster's or
vmm_exec_kvm.conf; from 7.0.2 on, EVC_MODE of the cluster stands in the place of its MODEL. Only the VM's own
is at hand, so only a VM that names a model is asked about. And oned is asked for the cluster only when the
host has refused that model: a host that has it is not refused for an EVC_MODE that it lacks.
"""

from __future__ import annotations

from xml.etree import ElementTree

from ...errors import CpuMissing, OnedUnavailable
from ...model import steps as s
from ...model.exchange import AskOned, On, Plan
from ...opennebula.xml import View, Vm

OF_THE_HOST = ("host-passthrough", "host-model")
"""No models, but what each host has."""
TYPES = ("kvm", "qemu")
"""Types of oned's hypervisor drivers, called so in its oned.conf. With another name the type is not known,
and an emulated CPU may be one that the host's processor is not.
"""


def can_start(vm: Vm, host: str, machine: s.CheckMachine) -> Plan:
    """Plan to look whether the host has the VM's machine type, and the CPU that its template names; raise
    MachineMissing, CpuMissing.
    """
    view = View(vm.element)
    model, features = (view.text(f"TEMPLATE/CPU_MODEL/{name}") for name in ("MODEL", "FEATURES"))
    kind = view.text("HISTORY_RECORDS/HISTORY[last()]/VM_MAD")
    if model in OF_THE_HOST or kind not in TYPES or view.text("TEMPLATE/EMULATOR"):
        if machine.machine:
            yield On(host, (machine,))
        return
    wanted = machine._replace(type=kind, cpu=written(model, features), named=f"CPU_MODEL {model}")
    try:
        yield On(host, (wanted,))
    except CpuMissing as e:
        yield from _by_cluster(view, host, wanted, features, e)


def _by_cluster(view: View, host: str, wanted: s.CheckMachine, features: str, refused: CpuMissing) -> Plan:
    """Go by EVC_MODE of the cluster, if it has one: the VM's own model is then not the one that starts."""
    number = view.number("HISTORY_RECORDS/HISTORY[last()]/CID")
    try:
        cluster: View = yield AskOned("cluster", number)
    except OnedUnavailable:
        return  # what is not known refuses nothing: libvirt refuses the guest, if it comes to that
    model = cluster.text("TEMPLATE/EVC_MODE")
    if cluster.text("TEMPLATE/EMULATOR") or model in OF_THE_HOST:
        return
    if not model:
        raise refused
    name = cluster.text("NAME")
    named = f"EVC_MODE {model} of cluster {name}"
    yield On(host, (wanted._replace(cpu=written(model, features), named=named),))


def written(model: str, features: str) -> str:
    """Return a CPU in libvirt's XML, as oned writes it."""
    cpu = ElementTree.Element("cpu", mode="custom")
    ElementTree.SubElement(cpu, "model", fallback="forbid").text = model
    for feature in filter(None, features.split(",")):
        ElementTree.SubElement(cpu, "feature", policy="require", name=feature)
    return ElementTree.tostring(cpu, "unicode")
