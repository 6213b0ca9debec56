# SPDX-License-Identifier: Apache-2.0
"""deployment.<seq>: the libvirt domain of a VM, as LibVirtDriverKVM writes it for files and Ceph."""

from __future__ import annotations

import math
from typing import List
from xml.sax.saxutils import escape, quoteattr

from .objects import Vm, now
from .settings import Settings
from .template import Template, Vector, cdata, scalar, vectors
from .transfer import is_directory

_BUSES = {"vd": "virtio", "sd": "scsi", "hd": "ide", "xvd": "xen"}

_AGENT = [
    "\t<devices>",
    "\t\t<channel type='unix'>",
    "\t\t\t<source mode='bind'/><target type='virtio' name='org.qemu.guest_agent.0'/>",
    "\t\t</channel>",
    "\t</devices>",
]


def _bus(target: str, q35: bool) -> str:
    prefix = target.rstrip("0123456789")[:-1]
    return "sata" if q35 and prefix in ("sd", "hd") else _BUSES.get(prefix, "virtio")


def _file(vm: Vm, directory: str, disk: Vector) -> List[str]:
    cdrom = disk.get("TYPE", "").upper() == "CDROM"
    return [
        f"\t\t<disk type='file' device='{'cdrom' if cdrom else 'disk'}'>",
        f"\t\t\t<source file='{directory}/disk.{disk['DISK_ID']}'/>",
    ]


def _rbd(vm: Vm, directory: str, disk: Vector) -> List[str]:
    cdrom = disk["TYPE"].upper() == "RBD_CDROM"
    source = disk.get("SOURCE", "")
    name = source or f"{disk.get('POOL_NAME', 'one')}/one-sys"
    if disk.get("CLONE") == "YES" or not source:
        name += f"-{vm.id}-{disk['DISK_ID']}"
    lines = [f"\t\t<disk type='network' device='{'cdrom' if cdrom else 'disk'}'>"]
    hosts = disk.get("CEPH_HOST", "").split()
    if hosts:
        lines.append(f"\t\t\t<source protocol='rbd' name='{name}'>")
        for host in hosts:
            address, _, port = host.partition(":")
            lines.append(f"\t\t\t\t<host name='{address}' port='{port or 6789}'/>")
        lines.append("\t\t\t</source>")
    else:
        lines.append(f"\t\t\t<source protocol='rbd' name='{name}'/>")
    if disk.get("CEPH_SECRET") and disk.get("CEPH_USER"):
        lines += [
            f"\t\t\t<auth username='{disk['CEPH_USER']}'>",
            f"\t\t\t\t<secret type='ceph' uuid='{disk['CEPH_SECRET']}'/>",
            "\t\t\t</auth>",
        ]
    return lines


def disk_lines(vm: Vm, directory: str, disk: Vector, q35: bool, order: int) -> List[str]:
    """Write one disk; `order` is its place among what the VM boots from, 0 for none."""
    kind = disk.get("TYPE", "").upper()
    target = disk["TARGET"]
    driver = "raw" if kind == "CDROM" else disk.get("DRIVER") or "raw"
    cache = disk.get("CACHE", "none")
    extra = "" if kind == "CDROM" else f" discard='{disk.get('DISCARD', 'unmap')}'"
    if disk.get("IO"):
        extra = f" io='{disk['IO']}'" + extra
    is_rbd = kind in ("RBD", "RBD_CDROM") or disk.get("DISK_TYPE") == "RBD"
    lines = (_rbd if is_rbd else _file)(vm, directory, disk)
    lines.append(f"\t\t\t<target dev='{target}' bus='{_bus(target, q35)}'/>")
    if disk.get("LUKS_SECRET"):
        # Whatever the disk is made of (LibVirtDriverKVM.cc:1576).
        lines.append("\t\t\t<encryption format='luks'>")
        lines.append(f"\t\t\t\t<secret type='passphrase' uuid='{disk['LUKS_SECRET']}'/>")
        lines.append("\t\t\t</encryption>")
    if disk.get("SERIAL"):
        lines.append(f"\t\t\t<serial>{disk['SERIAL']}</serial>")
    if disk.get("READONLY", "").upper() == "YES":
        lines.append("\t\t\t<readonly/>")
    if order:
        lines.append(f"\t\t\t<boot order='{order}'/>")
    lines += _limits(disk)
    lines += [f"\t\t\t<driver name='qemu' type='{driver}' cache='{cache}'{extra}/>", "\t\t</disk>"]
    return lines


def _limits(disk: Vector) -> List[str]:
    """Write what the disk may do in a second (LibVirtDriverKVM.cc:1705); where there is a total, the others
    do not count.
    """
    lines = []
    for what in ("BYTES", "IOPS"):
        names = (
            [f"TOTAL_{what}_SEC"]
            if disk.get(f"TOTAL_{what}_SEC")
            else [f"READ_{what}_SEC", f"WRITE_{what}_SEC"]
        )
        lines += [
            f"\t\t\t\t<{name.lower()}>{disk[name]}</{name.lower()}>" for name in names if disk.get(name)
        ]
    return ["\t\t\t<iotune>", *lines, "\t\t\t</iotune>"] if lines else []


def _filesystem(disk: Vector) -> List[str]:
    """Write a directory for the guest (LibVirtDriverKVM.cc:1509)."""
    ids = [f"\t\t\t\t<{who} start='0' target='100000' count='65536'/>" for who in ("uid", "gid")]
    readonly = ["\t\t\t<readonly/>"] if disk.get("READONLY", "").upper() == "YES" else []
    return [
        "\t\t<filesystem type='mount' accessmode='passthrough'>",
        "\t\t\t<driver type='virtiofs' queue='1024'/>",
        "\t\t\t<binary path='/var/tmp/one/vmm/kvm/virtiofsd.sh' xattr='on'>",
        "\t\t\t\t<cache mode='always'/>",
        "\t\t\t\t<sandbox mode='namespace'/>",
        "\t\t\t</binary>",
        f"\t\t\t<source dir={quoteattr(disk['SOURCE'])}/>",
        f"\t\t\t<target dir={quoteattr(disk['MOUNT_TAG'])}/>",
        *readonly,
        "\t\t\t<idmap>",
        *ids,
        "\t\t\t</idmap>",
        "\t\t</filesystem>",
    ]


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


def _cpu(vm: Vm, cluster: Template) -> List[str]:
    """Write the CPU as LibVirtDriverKVM.cc does from 7.0.2 on, for a VM without a topology."""
    of_vm = (vectors(vm.template, "CPU_MODEL") or [{}])[0]
    model = scalar(cluster, "EVC_MODE") or of_vm.get("MODEL", "")
    if not model:
        return []
    if model == "host-passthrough":
        return ["\t<cpu mode='host-passthrough'>", "\t</cpu>"]
    features = [name for name in of_vm.get("FEATURES", "").split(",") if name]
    return [
        "\t<cpu mode='custom'>",
        f"\t\t<model fallback='forbid'>{escape(model)}</model>",
        *(f"\t\t<feature policy='require' name={quoteattr(name)}/>" for name in features),
        "\t</cpu>",
    ]


def domain_xml(settings: Settings, vm: Vm, cluster: Template) -> str:
    """Write the domain of a VM on its current host, of a cluster with this template, and system datastore."""
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
        f"\t\t<type arch='{system.get('ARCH', 'x86_64')}'"
        + (f" machine='{machine}'" if machine else "")
        + ">hvm</type>",
    ]
    for name, tag in (("KERNEL", "kernel"), ("INITRD", "initrd"), ("KERNEL_CMD", "cmdline")):
        if system.get(name):
            lines.append(f"\t\t<{tag}>{cdata(system[name])}</{tag}>")
    if system.get("FIRMWARE"):
        lines.append(f'\t\t<loader readonly="yes" type="pflash" secure="no">{system["FIRMWARE"]}</loader>')
        lines.append(f"\t\t<nvram>{directory}/{escape(vm.name)}_VARS.fd</nvram>")
    lines += ["\t</os>", *_cpu(vm, cluster)]
    lines += ["\t<devices>", f"\t\t<emulator>{cdata(settings.emulator)}</emulator>"]
    directories = [disk for disk in vm.disks if is_directory(disk)]
    for disk in vm.disks:
        if is_directory(disk):
            lines += _filesystem(disk)
            continue
        name = f"disk{disk['DISK_ID']}"
        lines += disk_lines(vm, directory, disk, q35, boot.index(name) + 1 if name in boot else 0)
    context = vm.template.get("CONTEXT")
    if isinstance(context, dict):
        lines += disk_lines(vm, directory, dict(context, TYPE="CDROM", READONLY="YES"), q35, 0)
    tpm = (vectors(vm.template, "TPM") or [{}])[0]
    if tpm.get("MODEL"):
        lines += [
            f"\t\t<tpm model='{tpm['MODEL']}'>",
            "\t\t\t<backend type='emulator' version='2.0'/>",
            "\t\t</tpm>",
        ]
    lines += [*_controllers(q35), "\t</devices>"]
    if directories:
        lines += [
            "\t<memoryBacking>",
            "\t\t<source type='memfd'/>",
            "\t\t<access mode='shared'/>",
            "\t</memoryBacking>",
        ]
    lines += ["\t<features>", "\t\t<acpi/>", "\t</features>"]
    features = (vectors(vm.template, "FEATURES") or [{}])[0]
    if features.get("GUEST_AGENT", "YES" if settings.guest_agent else "NO").upper() == "YES":
        lines += _AGENT
    raw = (vectors(vm.template, "RAW") or [{}])[0]
    if raw.get("TYPE", "").lower() == "kvm":
        lines.append("\t" + raw.get("DATA", ""))
    return "\n".join([*lines, *_metadata(settings, vm, directory), "</domain>", ""])
