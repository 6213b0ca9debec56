# SPDX-License-Identifier: Apache-2.0
"""What differs between the platforms that OpenNebula certifies, each with its source.

The code asks a machine first (tools/os_release.py, install/preflight.py) and looks here only for what to tell
an administrator: the packages of that machine, its daemon. docs/reference/platforms.md is generated from it.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from ..named import NamedTuple

PYTHON_FLOOR = (3, 9)
"""The oldest Python that runs ours."""
SUDO_FLOOR = (1, 9, 10)
"""Regular expressions in sudoers, which the lines of docs/how-to/shares.md need."""
PROGRAMS = {
    "qemu-img": "qemu-utils",
    "qemu-io": "qemu-utils",
    "qemu-storage-daemon": "qemu-system-common qemu-utils",
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
    "qemu-io": "qemu-img",
    "qemu-storage-daemon": "qemu-img",
    "virsh": "libvirt-client",
    "udp-sender": "",
    "udp-receiver": "",
    "ssh": "openssh-clients",
    "dmsetup": "device-mapper",
    "genisoimage|mkisofs|xorriso": "xorriso",
    "qemu": "qemu-kvm qemu-img",
}
IN_EL_8 = {**EL, "genisoimage|mkisofs|xorriso": "genisoimage", "virtiofsd": "qemu-kvm-common"}


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
    """What brings 3.9 or newer beside it (newer_python.py finds it), '' where it is."""
    virtiofsd: str
    sudo: str
    confined: str
    """AppArmor or SELinux, as which libvirt confines QEMU by default."""
    tmp: str
    """What cleans /tmp and /var/tmp; '' where no source says. OpenNebula exempts /var/tmp/one."""
    source: str
    """Where the facts are from."""


AT_BOOT, BY_AGE = "/tmp is emptied at boot", "files unused for 10 and 30 days are removed"
INSTALLED = "an installed system of it, not started"
LISTS = "packages as users have listed them in public, not all of them found there"
DEBIAN_12 = Platform(
    name="Debian 12",
    ids=("debian",),
    version="12",
    packages=IN_QEMU,
    installer="apt-get",
    qemu="/usr/bin/qemu-system-x86_64",
    qemu_version="7.2",
    libvirt_version="9.0",
    daemon="libvirtd",
    user="libvirt-qemu:libvirt-qemu",
    python="3.11",
    newer_python="",
    virtiofsd="/usr/lib/qemu/virtiofsd",
    sudo="1.9.13",
    confined="AppArmor",
    tmp=AT_BOOT,
    source="a machine of it: a test compares this row with the machine that it runs on",
)
DEBIAN_11 = DEBIAN_12._replace(
    name="Debian 11",
    version="11",
    qemu_version="5.2",
    libvirt_version="7.0",
    python="3.9",
    sudo="1.9.5",
    source=f"{INSTALLED}; QEMU's user: as of Debian 12",
)
DEBIAN_13 = DEBIAN_12._replace(
    name="Debian 13",
    version="13",
    packages=PROGRAMS,
    qemu_version="10.0",
    libvirt_version="11.3",
    python="3.13",
    virtiofsd="/usr/libexec/virtiofsd",
    sudo="1.9.16",
    tmp=BY_AGE,
    source=INSTALLED,
)
UBUNTU_22 = DEBIAN_12._replace(
    name="Ubuntu 22.04",
    ids=("ubuntu",),
    version="22.04",
    qemu_version="6.2",
    libvirt_version="8.0",
    user="libvirt-qemu:kvm",
    python="3.10",
    sudo="1.9.9",
    tmp="",
    source=f"{LISTS}; no machine of it was seen",
)
UBUNTU_24 = UBUNTU_22._replace(
    name="Ubuntu 24.04",
    version="24.04",
    packages=PROGRAMS,
    qemu_version="8.2",
    libvirt_version="10.0",
    python="3.12",
    virtiofsd="/usr/libexec/virtiofsd",
    sudo="1.9.15",
)
EL_9 = Platform(
    name="EL 9",
    ids=("rhel", "almalinux", "rocky", "centos", "ol"),
    version="9",
    packages=EL,
    installer="dnf",
    qemu="/usr/libexec/qemu-kvm",
    qemu_version="6.2 or newer",
    libvirt_version="8.0 or newer",
    daemon="virtqemud",
    user="qemu:qemu",
    python="3.9",
    newer_python="",
    virtiofsd="/usr/libexec/virtiofsd",
    sudo="1.9.5",
    confined="SELinux",
    tmp=BY_AGE,
    source=f"{LISTS}, RHEL's documentation of Python and of libvirt's daemons; no machine of it was seen",
)
EL_8 = EL_9._replace(
    name="EL 8",
    version="8",
    packages=IN_EL_8,
    qemu_version="6.2",
    libvirt_version="8.0",
    daemon="libvirtd",
    python="3.6",
    newer_python="dnf install python39",
)
EL_10 = EL_9._replace(
    name="EL 10",
    version="10",
    qemu_version="9.1 or newer",
    libvirt_version="10.10 or newer",
    python="3.12",
    sudo="1.9.15",
)
PLATFORMS = (DEBIAN_11, DEBIAN_12, DEBIAN_13, UBUNTU_22, UBUNTU_24, EL_8, EL_9, EL_10)
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
