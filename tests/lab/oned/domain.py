# SPDX-License-Identifier: Apache-2.0
"""deployment.<seq>: the libvirt domain of a VM, as LibVirtDriverKVM writes it for file disks."""

from __future__ import annotations

import math
from typing import List
from xml.sax.saxutils import escape

from .objects import Vm, now
from .settings import Settings
from .template import Vector, cdata, scalar, vectors

_BUSES = {"vd": "virtio", "sd": "scsi", "hd": "ide", "xvd": "xen"}


def _bus(target: str, q35: bool) -> str:
    prefix = target.rstrip("0123456789")[:-1]
    return "sata" if q35 and prefix in ("sd", "hd") else _BUSES.get(prefix, "virtio")


def _disk(directory: str, disk: Vector, q35: bool, order: int) -> List[str]:
    cdrom = disk.get("TYPE", "").upper() == "CDROM"
    target = disk["TARGET"]
    driver = "raw" if cdrom else disk.get("DRIVER") or "raw"
    cache = disk.get("CACHE", "none")
    extra = "" if cdrom else f" discard='{disk.get('DISCARD', 'unmap')}'"
    if disk.get("IO"):
        extra = f" io='{disk['IO']}'" + extra
    lines = [
        f"\t\t<disk type='file' device='{'cdrom' if cdrom else 'disk'}'>",
        f"\t\t\t<source file='{directory}/disk.{disk['DISK_ID']}'/>",
        f"\t\t\t<target dev='{target}' bus='{_bus(target, q35)}'/>",
    ]
    if disk.get("SERIAL"):
        lines.append(f"\t\t\t<serial>{disk['SERIAL']}</serial>")
    if disk.get("READONLY", "").upper() == "YES":
        lines.append("\t\t\t<readonly/>")
    if order:
        lines.append(f"\t\t\t<boot order='{order}'/>")
    lines += [f"\t\t\t<driver name='qemu' type='{driver}' cache='{cache}'{extra}/>", "\t\t</disk>"]
    return lines


def _controllers(q35: bool) -> List[str]:
    lines = [
        "\t\t<controller type='scsi' index='0' model='virtio-scsi'>",
        "\t\t\t<driver queues='1'/>",
        "\t\t</controller>",
    ]
    if q35:
        lines.append("\t\t<controller index='0' type='pci' model='pcie-root'/>")
        lines += [f"\t\t<controller type='pci' index='{i}' model='pcie-root-port'/>" for i in range(1, 17)]
        lines.append("\t\t<controller type='pci' index='17' model='pcie-to-pci-bridge'/>")
    return lines


def _metadata(settings: Settings, vm: Vm, directory: str) -> List[str]:
    one = [
        f"<one:system_datastore>{cdata(directory)}</one:system_datastore>",
        f"<one:name>{cdata(vm.name)}</one:name>",
        "<one:uname><![CDATA[oneadmin]]></one:uname>",
        "<one:uid>0</one:uid>",
        "<one:gname><![CDATA[oneadmin]]></one:gname>",
        "<one:gid>0</one:gid>",
        f"<one:opennebula_version>{settings.version}</one:opennebula_version>",
        f"<one:stime>{vm.stime}</one:stime>",
        f"<one:deployment_time>{now()}</one:deployment_time>",
        "<one:pci_devices></one:pci_devices>",
    ]
    return [
        "\t<metadata>",
        '\t\t<one:vm xmlns:one="http://opennebula.org/xmlns/libvirt/1.0">',
        *(f"\t\t\t{line}" for line in one),
        "\t\t</one:vm>",
        "\t</metadata>",
    ]


def domain_xml(settings: Settings, vm: Vm) -> str:
    """Write the domain of a VM on its current host and system datastore."""
    system = (vectors(vm.template, "OS") or [{}])[0]
    directory = f"{settings.location}/{vm.last.ds_id}/{vm.id}"
    machine = system.get("MACHINE", "")
    q35 = machine.startswith(("q35", "pc-q35"))
    boot = [name.strip() for name in system.get("BOOT", "").split(",") if name.strip()]
    lines = [
        f"<domain type='{settings.domain_type}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>",
        f"\t<name>one-{vm.id}</name>",
        f"\t<title>{escape(vm.name)}</title>",
        f"\t<uuid>{system['UUID']}</uuid>",
    ]
    if scalar(vm.template, "VCPU"):
        lines.append(f"\t<vcpu>{scalar(vm.template, 'VCPU')}</vcpu>")
    shares = math.ceil(float(scalar(vm.template, "CPU", "1")) * 1024)
    memory = int(scalar(vm.template, "MEMORY", "128")) * 1024
    lines += ["\t<cputune>", f"\t\t<shares>{shares}</shares>", "\t</cputune>", f"\t<memory>{memory}</memory>"]
    lines += [
        "\t<os>",
        f"\t\t<type arch='{system.get('ARCH', 'x86_64')}'" + (f" machine='{machine}'" if machine else "") + ">hvm</type>",
    ]
    for name, tag in (("KERNEL", "kernel"), ("INITRD", "initrd"), ("KERNEL_CMD", "cmdline")):
        if system.get(name):
            lines.append(f"\t\t<{tag}>{cdata(system[name])}</{tag}>")
    lines += ["\t</os>", "\t<devices>", f"\t\t<emulator>{cdata(settings.emulator)}</emulator>"]
    for disk in vm.disks:
        name = f"disk{disk['DISK_ID']}"
        lines += _disk(directory, disk, q35, boot.index(name) + 1 if name in boot else 0)
    context = vm.template.get("CONTEXT")
    if isinstance(context, dict):
        lines += _disk(directory, dict(context, TYPE="CDROM", READONLY="YES"), q35, 0)
    lines += [*_controllers(q35), "\t</devices>", "\t<features>", "\t\t<acpi/>", "\t</features>"]
    raw = (vectors(vm.template, "RAW") or [{}])[0]
    if raw.get("TYPE", "").lower() == "kvm":
        lines.append("\t" + raw.get("DATA", ""))
    return "\n".join([*lines, *_metadata(settings, vm, directory), "</domain>", ""])
