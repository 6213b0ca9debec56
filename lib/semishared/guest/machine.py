# SPDX-License-Identifier: Apache-2.0
"""The machine that QEMU gives a guest, as libvirt has it, and whether this host's QEMU has it too.

A guest keeps the machine type and the CPU that it was started with. A host whose QEMU is older, or whose
processor has less, refuses the guest, but only when everything else has come: so it is asked first.
"""

from __future__ import annotations

import os
import re
import struct
from typing import Any
from xml.etree import ElementTree

from ..errors import CpuMissing, MachineMissing, SemisharedError
from ..model.vm.move_steps import GuestMachine
from ..units import MiB
from . import libvirtd
from .domain import lookup
from .virsh import active_domains

KEPT = ("model", "vendor", "feature")
"""What of <cpu> is of the processor; the rest is how many there are and where their memory is."""


def seen(vm_dir: str, domain: str) -> GuestMachine:
    """Return the machine of a guest that runs, or that is to go on from the checkpoint in its directory.

    It is empty for one that does neither, and if libvirt does not answer: that is not this step's to say.
    `domain` is '' on a front-end that is no host.
    """
    try:
        return _machine(_xml(f"{vm_dir}/checkpoint", domain))
    except (SemisharedError, OSError, ElementTree.ParseError):
        return GuestMachine()


def _xml(checkpoint: str, domain: str) -> str:
    if domain and domain in active_domains():
        return libvirtd.call(
            f"dumpxml {domain}", lambda connection: str(lookup(connection, domain).XMLDesc(0))
        )
    return _saved_xml(checkpoint) if os.path.isfile(checkpoint) else ""


HEADER = struct.Struct("=16s2I68x")
"""Of libvirt's checkpoints (src/qemu/qemu_saveimage.h): magic, version, bytes of the XML that follows."""
MOST_XML = 16 * MiB


def _saved_xml(checkpoint: str) -> str:
    """Return the domain XML of a checkpoint, which a front-end without libvirt may have, '' if it is none."""
    with open(checkpoint, "rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return ""
        magic, _, length = HEADER.unpack(head)
        if magic != b"LibvirtQemudSave" or length > MOST_XML:
            return ""
        text = file.read(length).partition(b"\0")[0].decode("utf-8", "replace")
        # A host may have written anything into it: entities, which grow without end, need a DOCTYPE.
        return "" if "<!DOCTYPE" in text else text


def _machine(xml: str) -> GuestMachine:
    if not xml:
        return GuestMachine()
    domain = ElementTree.fromstring(xml)
    kind, cpu = domain.find("os/type"), domain.find("cpu")
    if kind is None:
        return GuestMachine()
    found = GuestMachine(
        domain.get("type", ""),
        kind.get("arch", ""),
        kind.get("machine", ""),
        domain.findtext("devices/emulator", ""),
    )
    if cpu is None or cpu.get("mode", "custom") != "custom" or cpu.get("check", "none") == "none":
        return found
    for part in [part for part in cpu if part.tag not in KEPT]:
        cpu.remove(part)
    found = found._replace(cpu=ElementTree.tostring(cpu, "unicode"))
    # libvirt's answer may leave out what QEMU emulates. Where it says that even the host on which the guest
    # runs lacks its CPU, the answer of another host proves nothing either.
    try:
        return found._replace(cpu="") if lacking(found) else found
    except SemisharedError:  # there is no libvirt on most front-ends
        return found._replace(cpu="")


def lacking(machine: GuestMachine) -> str:
    """Return what this host's QEMU lacks of a machine, in libvirt's words, '' for nothing."""
    what = f"domcapabilities --machine {machine.machine}"
    return libvirtd.call(what, lambda connection: _lacking(connection, machine), timeout_s=ASKED_S)


EMULATOR = r"/usr/(?:local/)?(?:bin|lib|libexec)/[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z"
ASKED_S = 60
"""libvirtd may have to ask a QEMU that it has not seen before."""


def _lacking(connection: Any, machine: GuestMachine) -> str:
    libvirt = libvirtd.binding()
    # libvirtd starts what it is to ask; another host's word may lead to the system's own programs alone.
    emulator = machine.emulator if re.match(EMULATOR, machine.emulator) else None
    where = emulator, machine.arch or None, machine.machine or None, machine.type or None
    flags = libvirt.VIR_CONNECT_COMPARE_CPU_FAIL_INCOMPATIBLE
    try:
        connection.getDomainCapabilities(*where, 0)
        if machine.cpu:
            connection.compareHypervisorCPU(*where, machine.cpu, flags)
    except libvirt.libvirtError as e:
        is_refused = e.get_error_code() == libvirt.VIR_ERR_CPU_INCOMPATIBLE or (
            e.get_error_domain() == libvirt.VIR_FROM_QEMU
            and e.get_error_code() in (libvirt.VIR_ERR_INVALID_ARG, libvirt.VIR_ERR_SYSTEM_ERROR)
        )
        if is_refused:
            return " ".join((e.get_error_message() or str(e)).split())
    return ""


def check(vm: int, type: str, arch: str, machine: str, emulator: str, cpu: str, named: str) -> None:
    """Raise MachineMissing if this host's QEMU lacks the machine of a guest that is to come; CpuMissing if it
    would not start one with the CPU that is `named`.
    """
    guest, here = GuestMachine(type, arch, machine, emulator, cpu), os.uname().nodename
    refused = ""
    try:
        # oned's name of a hypervisor driver need not be the type of its domains.
        lacks = lacking(guest._replace(type="", cpu="") if named else guest)
        if named and not lacks:
            refused = unstartable(guest)
    except SemisharedError:
        return  # what is wrong with libvirt is said by the action that starts the guest
    if lacks:
        raise MachineMissing(f"VM {vm} cannot run on {here} as the machine that it is: {lacks}")
    if refused:
        raise CpuMissing(f"VM {vm} cannot start on {here} with its {named}: {refused}")


def unstartable(machine: GuestMachine) -> str:
    """Return why this host's libvirt would not start a guest with a CPU, in its words, '' for nothing that is
    the CPU's.
    """
    what = f"domxml-to-native --machine {machine.machine}"
    return libvirtd.call(what, lambda connection: _unstartable(connection, machine), timeout_s=ASKED_S)


def _unstartable(connection: Any, machine: GuestMachine) -> str:
    """Have libvirt prepare the start of a guest that has nothing else, up to QEMU's arguments.

    compareHypervisorCPU() answers another question, and refuses CPUs that libvirt starts: a start does not
    look at an emulated one, counts what the processor has besides what QEMU says, and with a newer libvirt
    takes QEMU's word for a model before that of libvirt's table.
    """
    libvirt = libvirtd.binding()
    try:
        connection.domainXMLToNative("qemu-argv", probe(machine), 0)
    except libvirt.libvirtError as e:
        # All that its table of CPUs and what is there of them say. What else is wrong with such a guest may
        # be right with the VM's.
        if e.get_error_domain() == libvirt.VIR_FROM_CPU:
            return " ".join((e.get_error_message() or str(e)).split())
    return ""


def probe(machine: GuestMachine) -> str:
    """Return the domain of a guest that has a machine and a CPU, and nothing else."""
    domain = ElementTree.Element("domain", type=machine.type)
    ElementTree.SubElement(domain, "name").text = "cpu-probe"
    ElementTree.SubElement(domain, "memory", unit="MiB").text = "16"
    kind = ElementTree.SubElement(ElementTree.SubElement(domain, "os"), "type")
    kind.text = "hvm"
    for name, value in (("arch", machine.arch), ("machine", machine.machine)):
        if value:
            kind.set(name, value)
    domain.append(ElementTree.fromstring(machine.cpu))
    return ElementTree.tostring(domain, "unicode")
