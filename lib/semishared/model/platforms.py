# SPDX-License-Identifier: Apache-2.0
"""What differs between the platforms that OpenNebula certifies, each with its source.

The code asks a machine first (tools/os_release.py, install/preflight.py) and looks here only for what to tell
an administrator: the packages of that machine, its daemon. docs/reference/platforms.md is generated from it.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from ..named import NamedTuple

SUDO_FLOOR = (1, 9, 10)
"""Regular expressions in sudoers, which the lines of docs/how-to/shares.md need."""
PROGRAMS = {
    "qemu-img": "qemu-utils",
    "virsh": "libvirt-clients",
    "setpriv": "util-linux",
    "tar": "tar",
    "rsync": "rsync",
    "zstd": "zstd",
    "lzop": "lzop",
    "udp-sender": "udpcast",
    "udp-receiver": "udpcast",
    "ssh": "openssh-client",
    "curl": "curl",
    "rbd": "ceph-common",
    "dmsetup": "dmsetup",
    "genisoimage|mkisofs|xorriso": "genisoimage",
    "python3-rbd": "python3-rados python3-rbd",
    "python3-libvirt": "python3-libvirt",
    "qemu": "qemu-system-x86 qemu-utils",
    "virtiofsd": "virtiofsd",
}
"""Program, or what else a finding names -> its package on Debian and Ubuntu; '' where there is none."""
IN_QEMU = {**PROGRAMS, "virtiofsd": "qemu-system-common"}
"""Of releases whose QEMU brings virtiofsd."""
EL = {
    **PROGRAMS,
    "qemu-img": "qemu-img",
    "virsh": "libvirt-client",
    "udp-sender": "",
    "udp-receiver": "",
    "ssh": "openssh-clients",
    "dmsetup": "device-mapper",
    "genisoimage|mkisofs|xorriso": "xorriso",
    "qemu": "qemu-kvm qemu-img",
}
EL_8 = {**EL, "genisoimage|mkisofs|xorriso": "genisoimage", "virtiofsd": "qemu-kvm-common"}


class Platform(NamedTuple):
    """A release of a distribution as it is installed, without packages of other sources."""

    name: str
    ids: tuple[str, ...]
    """ID in os-release, of rebuilds too."""
    version: str
    """VERSION_ID; on EL what is before its dot."""
    packages: Mapping[str, str]
    installer: str
    qemu: str
    """Path of QEMU for x86_64."""
    qemu_version: str
    libvirt_version: str
    daemon: str
    """What answers virsh by default: libvirtd, or virtqemud where libvirt is modular."""
    user: str
    """User and group of QEMU if qemu.conf says nothing. OpenNebula's packages for hosts say oneadmin."""
    python: str
    """What /usr/bin/python3 is."""
    newer_python: str
    """What makes it 3.9 or newer, '' where it is."""
    virtiofsd: str
    sudo: str
    confined: str
    """AppArmor or SELinux, as which libvirt confines QEMU by default."""
    tmp: str
    """What cleans /tmp and /var/tmp; '' where no source says. OpenNebula exempts /var/tmp/one."""
    source: str
    """Where the facts are from."""


DEBIAN = ("/usr/bin/qemu-system-x86_64", "libvirt-qemu:libvirt-qemu", "AppArmor")
UBUNTU_USER = "libvirt-qemu:kvm"
EL_IDS = ("rhel", "almalinux", "rocky", "centos", "ol")
EL_QEMU, EL_USER = "/usr/libexec/qemu-kvm", "qemu:qemu"
EL_TMP = "files unused for 10 and 30 days are removed"
AT_BOOT = "/tmp is emptied at boot"
INSTALLED = "an installed system of it, not started"
LISTS = "packages as users have listed them in public, not all of them found there"
OF_EL = f"{LISTS}, RHEL's documentation of Python and of libvirt's daemons; no machine of it was seen"
OF_UBUNTU = f"{LISTS}; no machine of it was seen"
PLATFORMS = (
    Platform(
        "Debian 11",
        ("debian",),
        "11",
        IN_QEMU,
        "apt-get",
        DEBIAN[0],
        "5.2",
        "7.0",
        "libvirtd",
        DEBIAN[1],
        "3.9",
        "",
        "/usr/lib/qemu/virtiofsd",
        "1.9.5",
        DEBIAN[2],
        AT_BOOT,
        f"{INSTALLED}; QEMU's user: as of Debian 12",
    ),
    Platform(
        "Debian 12",
        ("debian",),
        "12",
        IN_QEMU,
        "apt-get",
        DEBIAN[0],
        "7.2",
        "9.0",
        "libvirtd",
        DEBIAN[1],
        "3.11",
        "",
        "/usr/lib/qemu/virtiofsd",
        "1.9.13",
        DEBIAN[2],
        AT_BOOT,
        "a machine of it: a test compares this row with the machine that it runs on",
    ),
    Platform(
        "Debian 13",
        ("debian",),
        "13",
        PROGRAMS,
        "apt-get",
        DEBIAN[0],
        "10.0",
        "11.3",
        "libvirtd",
        DEBIAN[1],
        "3.13",
        "",
        "/usr/libexec/virtiofsd",
        "1.9.16",
        DEBIAN[2],
        EL_TMP,
        INSTALLED,
    ),
    Platform(
        "Ubuntu 22.04",
        ("ubuntu",),
        "22.04",
        IN_QEMU,
        "apt-get",
        DEBIAN[0],
        "6.2",
        "8.0",
        "libvirtd",
        UBUNTU_USER,
        "3.10",
        "",
        "/usr/lib/qemu/virtiofsd",
        "1.9.9",
        DEBIAN[2],
        "",
        OF_UBUNTU,
    ),
    Platform(
        "Ubuntu 24.04",
        ("ubuntu",),
        "24.04",
        PROGRAMS,
        "apt-get",
        DEBIAN[0],
        "8.2",
        "10.0",
        "libvirtd",
        UBUNTU_USER,
        "3.12",
        "",
        "/usr/libexec/virtiofsd",
        "1.9.15",
        DEBIAN[2],
        "",
        OF_UBUNTU,
    ),
    Platform(
        "EL 8",
        EL_IDS,
        "8",
        EL_8,
        "dnf",
        EL_QEMU,
        "6.2",
        "8.0",
        "libvirtd",
        EL_USER,
        "3.6",
        "dnf install python39; alternatives --set python3 /usr/bin/python3.9",
        "/usr/libexec/virtiofsd",
        "1.9.5",
        "SELinux",
        EL_TMP,
        OF_EL,
    ),
    Platform(
        "EL 9",
        EL_IDS,
        "9",
        EL,
        "dnf",
        EL_QEMU,
        "6.2 or newer",
        "8.0 or newer",
        "virtqemud",
        EL_USER,
        "3.9",
        "",
        "/usr/libexec/virtiofsd",
        "1.9.5",
        "SELinux",
        EL_TMP,
        OF_EL,
    ),
    Platform(
        "EL 10",
        EL_IDS,
        "10",
        EL,
        "dnf",
        EL_QEMU,
        "9.1 or newer",
        "10.10 or newer",
        "virtqemud",
        EL_USER,
        "3.12",
        "",
        "/usr/libexec/virtiofsd",
        "1.9.15",
        "SELinux",
        EL_TMP,
        OF_EL,
    ),
)
"""Oldest release of a family first: one that is not here is taken for the last one."""
Said = Mapping[str, Any]
"""A machine's answer of tools/os_release.py, {} of one that has not said it. It may be any text, so it is
compared with the words here, and no line shows it.
"""


def of(said: Said) -> Optional[Platform]:
    """Return the platform of a machine, or the nearest of its family; None if it is of no family here."""
    ids = (said.get("id", ""), *said.get("like", ()))
    for name in ids:
        family = [one for one in PLATFORMS if name in one.ids]
        if family:
            return next((one for one in family if _is_version(one, said.get("version", ""))), family[-1])
    return next((one for one in reversed(PLATFORMS) if one.installer == said.get("installer")), None)


def _is_version(platform: Platform, version: str) -> bool:
    """Tell whether that is its VERSION_ID: those of EL count their minor releases."""
    return version == platform.version or version.startswith(f"{platform.version}.")


def install(said: Said, names: Sequence[str]) -> str:
    """Return the command that installs programs on a machine, in words where its platform has no package."""
    platform = of(said)
    if platform is None:
        return f"install what brings {', '.join(names)}"
    packages = {name: platform.packages.get(name, "") for name in names}
    words = list(dict.fromkeys(word for one in packages.values() for word in one.split()))
    none = [name for name, package in packages.items() if not package]
    commands = [f"{platform.installer} install {' '.join(words)}"] if words else []
    if none:
        lacking = ", ".join(none)
        commands.append(f"no package of {platform.name} is known with {lacking}: build it from its source")
    return "; ".join(commands)


def update(said: Said) -> str:
    """Return the command that brings a newer QEMU."""
    platform = of(said)
    if platform is None:
        return "update qemu"
    verb = "update" if platform.installer == "dnf" else "install"
    return f"{platform.installer} {verb} {platform.packages['qemu']}"


def python(said: Said) -> str:
    """Return what brings a Python that is new enough."""
    platform = of(said)
    return platform.newer_python if platform and platform.newer_python else "install python3 3.9 or newer"


def daemon(said: Said) -> str:
    """Return the daemon of libvirt: what the machine says runs there, else its platform's."""
    found = said.get("libvirt", "")
    if found in ("libvirtd", "virtqemud"):
        return str(found)
    platform = of(said)
    return platform.daemon if platform else "libvirtd"
