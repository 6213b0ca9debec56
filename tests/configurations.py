# SPDX-License-Identifier: Apache-2.0
"""Configurations of OpenNebula to install into: of each version, edited, broken, with other add-ons; and how
oned reads them.

Written from the contract's facts (docs/explanation/contract.md), not copied: layout, comments and values that
an editor must not lose.
"""

from __future__ import annotations

import re
from typing import Dict, List, Tuple, Union

TM = {
    "6.10": "dummy,lvm,shared,fs_lvm,fs_lvm_ssh,qcow2,ssh,ceph,dev,vcenter,iscsi_libvirt",
    "7.0": "dummy,lvm,shared,fs_lvm,fs_lvm_ssh,qcow2,ssh,local,ceph,dev,iscsi_libvirt,netapp",
    "7.2": "dummy,lvm,shared,fs_lvm,fs_lvm_ssh,qcow2,ssh,local,ceph,dev,iscsi_libvirt,netapp,purefa",
    "7.4": "dummy,lvm,shared,fs_lvm,fs_lvm_ssh,qcow2,ssh,local,ceph,dev,iscsi_libvirt,netapp,purefa",
}
DS = {
    "6.10": "dummy,fs,lvm,ceph,dev,iscsi_libvirt,vcenter,restic,rsync -s "
    "shared,ssh,ceph,fs_lvm,fs_lvm_ssh,qcow2,vcenter",
    "7.0": "dummy,fs,lvm,ceph,dev,restic,rsync,netapp -s "
    "dummy,shared,ssh,local,ceph,fs_lvm,fs_lvm_ssh,qcow2,netapp",
    "7.2": "dummy,fs,lvm,ceph,dev,restic,rsync,virtiofs -s "
    "dummy,lvm,shared,ssh,local,ceph,fs_lvm,fs_lvm_ssh,qcow2,netapp,purefa",
    "7.4": "dummy,fs,lvm,ceph,restic,rsync,virtiofs,interactive -s "
    "dummy,lvm,shared,ssh,local,ceph,fs_lvm,qcow2,netapp,purefa",
}
LIVE = {
    "6.10": "kvm-qcow2 kvm-shared kvm-ceph kvm-ssh qemu-qcow2 qemu-shared qemu-ceph qemu-ssh",
    "7.0": "kvm-qcow2 kvm-shared kvm-ceph kvm-ssh kvm-local kvm-lvm_thin qemu-qcow2 qemu-shared "
    "qemu-ceph qemu-ssh qemu-local",
    "7.2": "kvm-qcow2 kvm-shared kvm-ceph kvm-ssh kvm-local kvm-lvm_thin kvm-lvm qemu-qcow2 qemu-shared "
    "lxc-qcow2 lxc-shared",
    "7.4": "kvm-qcow2 kvm-shared kvm-ceph kvm-ssh kvm-local kvm-lvm_thin kvm-lvm qemu-qcow2 qemu-shared "
    "lxc-qcow2 lxc-shared",
}
VERSIONS = tuple(TM)


def oned_conf(version: str = "7.4") -> str:
    """Return an oned.conf like that version's."""
    live = (
        '    DS_MIGRATE = "YES", DS_LIVE_MIGRATE = "YES", DS_MIGRATE_SNAP = "YES"'
        if version >= "7.2"
        else '    DS_MIGRATE = "YES"'
    )
    return f"""\
#*******************************************************************************
#                       OpenNebula Configuration file
#  VM_MAD, TM_MAD: see below. An example: TM_MAD = [ ARGUMENTS = "-d a" ]
#*******************************************************************************

LOG = [
  SYSTEM      = "file",
  DEBUG_LEVEL = 3
]

#MANAGER_TIMER = 15
PORT = 2633   # the API
LISTEN_ADDRESS = "0.0.0.0"
DB = [ BACKEND = "mysql",
       SERVER  = "localhost",
       PASSWD  = "a \\"b\\" # no comment, [ no bracket ]",
       CONNECTIONS = 25 ]
SCRIPTS_REMOTE_DIR=/var/tmp/one
VM_SUBMIT_ON_HOLD =

VM_MAD = [
    NAME           = "kvm",
    SUNSTONE_NAME  = "KVM",
    EXECUTABLE     = "one_vmm_exec",
    ARGUMENTS      = "-t 15 -r 0 kvm -p",
    DEFAULT        = "vmm_exec/vmm_exec_kvm.conf",
    TYPE           = "kvm",
    KEEP_SNAPSHOTS = "yes"
]

# This variant should be used for nested virtualization
VM_MAD = [
    NAME           = "qemu",
    SUNSTONE_NAME  = "QEMU",
    EXECUTABLE     = "one_vmm_exec",
    ARGUMENTS      = "-t 15 -r 0 kvm",
    DEFAULT        = "vmm_exec/vmm_exec_kvm.conf",
    TYPE           = "qemu",
    KEEP_SNAPSHOTS = "yes"
]
VM_MAD = [
    NAME           = "lxc",
    EXECUTABLE     = "one_vmm_exec",
    ARGUMENTS      = "-t 15 -r 0 lxc",
    # DEFAULT        = "vmm_exec/vmm_exec_lxc.conf",
    TYPE           = "xml" # with a comment
]
#VM_MAD = [ NAME="dummy", SUNSTONE_NAME="Testing", EXECUTABLE="one_vmm_dummy",
#  TYPE="xml" ]

TM_MAD = [
    EXECUTABLE = "one_tm",
    ARGUMENTS = "-t 15 -d {TM[version]}"
]

DATASTORE_MAD = [
    EXECUTABLE = "one_datastore",
    ARGUMENTS  = "-t 15 -d {DS[version]}"
]

AUTH_MAD = [ EXECUTABLE = "one_auth_mad", AUTHN = "ssh,x509,ldap,server_cipher,server_x509" ]
VM_RESTRICTED_ATTR = "CONTEXT/FILES"
#VM_RESTRICTED_ATTR = "DISK/SIZE"
IMAGE_RESTRICTED_ATTR = "SOURCE"
\tINHERIT_DATASTORE_ATTR  = "CEPH_HOST"
INHERIT_DATASTORE_ATTR  = "CEPH_SECRET"
INHERIT_DATASTORE_ATTR  = "CEPH_USER"
INHERIT_DATASTORE_ATTR  = "CEPH_CONF"
INHERIT_DATASTORE_ATTR  = "POOL_NAME"
INHERIT_DATASTORE_ATTR  = "DISK_TYPE"
INHERIT_DATASTORE_ATTR  = "ALLOW_ORPHANS"
INHERIT_IMAGE_ATTR      = "DISK_TYPE"

TM_MAD_CONF = [
    NAME = "shared", LN_TARGET = "NONE", CLONE_TARGET = "SYSTEM", SHARED = "YES",
{live}
]
DS_MAD_CONF = [
    NAME = "fs", REQUIRED_ATTRS = "", PERSISTENT_ONLY = "NO",
    MARKETPLACE_ACTIONS = "export"
]
"""


def vmm_execrc(version: str = "7.4") -> str:
    """Return a vmm_execrc like that version's."""
    return f"""\
# Space separated list of VMM-TM pairs that support live disk snapshots. VMM
# and TM must be separated by '-'
LIVE_DISK_SNAPSHOTS="{LIVE[version]}"

# Space separated list VNM_MAD-ACTION pairs that run locally
VNMAD_LOCAL_ACTIONS="elastic-post elastic-clean"
"""


def _replaced(*pairs: Tuple[str, str]) -> str:
    text = oned_conf()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


ADD_ON = (
    (f"-d {TM['7.4']}", f"-d {TM['7.4']},storpool"),
    ("virtiofs,interactive -s dummy", "virtiofs,interactive,storpool -s storpool,dummy"),
)
BLOCK = """
TM_MAD_CONF = [ NAME = "storpool", LN_TARGET = "NONE", CLONE_TARGET = "SELF", SHARED = "yes", DRIVER = "raw" ]
DS_MAD_CONF=[NAME="storpool",REQUIRED_ATTRS="DISK_TYPE",PERSISTENT_ONLY="NO",MARKETPLACE_ACTIONS=""]
VM_RESTRICTED_ATTR = "VOLATILE"
"""
BY_HAND = """
TM_MAD_CONF = [
    NAME = "semishared", LN_TARGET = "NONE", CLONE_TARGET = "SYSTEM", SHARED = "YES", DS_MIGRATE = "NO",
    ALLOW_ORPHANS = "YES"
]
DS_MAD_CONF = [ NAME = "semishared", REQUIRED_ATTRS = "", PERSISTENT_ONLY = "NO" ]
IMAGE_RESTRICTED_ATTR = "SEMISHARED_PLACE"
"""
SOUND: Dict[str, str] = {
    **{f"stock {version}": oned_conf(version) for version in VERSIONS},
    "no newline at the end": oned_conf().rstrip("\n"),
    "comment at the end, without newline": oned_conf() + "# the end",
    "another add-on": _replaced(*ADD_ON) + BLOCK,
    "no lists of drivers: all there are": _replaced(
        (f"-t 15 -d {TM['7.4']}", "-t 15"), (f"-t 15 -d {DS['7.4']}", "-t 15")
    ),
    "no number of threads": _replaced((f"-t 15 -d {TM['7.4']}", f"-d {TM['7.4']}")),
    "as many threads as will do": _replaced((f"-t 15 -d {TM['7.4']}", f"-t 99 -d {TM['7.4']}")),
    "long options": _replaced(
        ("-t 15 -d dummy,lvm", "--threads=15 --tm-types dummy,lvm"),
        ("-t 15 -d dummy,fs", "-t15 --ds-types=dummy,fs"),
        (" -s dummy", " --system-ds-types dummy"),
    ),
    "glued options": _replaced(("-t 15 -d dummy", "-t15 -ddummy")),
    "option twice": _replaced(("-t 15 -d dummy,lvm", "-d none -t 15 -d dummy,lvm")),
    "options behind the directory": _replaced(("-t 15 -r 0 kvm -p", "-p kvm -t 15 -r 0 -w 600 -s bash")),
    "limits": _replaced(("-t 15 -r 0 kvm -p", "-t 50 -r 0 kvm -p -w 3600 -d migrate,deploy")),
    "migrate on the front-end": _replaced(
        ("-t 15 -r 0 kvm -p", "-t 15 -r 0 kvm -p -l migrate=migrate_local")
    ),
    "migrate and more on the front-end": _replaced(
        ("-r 0 kvm -p", "-l cancel,migrate=migrate_storpool,save=x -r 0 kvm -p")
    ),
    "quotes in arguments": _replaced(("-t 15 -r 0 kvm -p", '-t 15 -s \\"sh\\" -r 0 kvm -p')),
    "lower case names": _replaced(
        ("    EXECUTABLE = ", "    executable = "), ("    ARGUMENTS = ", "    arguments = ")
    ),
    "one line each": """VM_MAD=[NAME=kvm,EXECUTABLE=one_vmm_exec,ARGUMENTS=kvm,TYPE=kvm]PORT=2633
VM_MAD = [ NAME = "qemu", EXECUTABLE = "/usr/lib/one/mads/one_vmm_exec", ARGUMENTS = "-t 15 kvm" ] TM_MAD = [ # here
ARGUMENTS = "-d dummy,ssh" # there
] DATASTORE_MAD=[EXECUTABLE="one_datastore" , ARGUMENTS="-d dummy,fs -s ssh"] DB=[ BACKEND="sqlite" ]""",  # noqa: E501
    "no qemu": _replaced(
        ('    NAME           = "qemu",', '    NAME           = "xen",'),
        ('-t 15 -r 0 kvm"', '-t 15 -r 0 xen"'),
    ),
    "third hypervisor of the same directory": _replaced(
        ('NAME           = "lxc"', 'NAME           = "kvm-gpu"'), ("0 lxc", "0 kvm")
    ),
    "by hand": _replaced((TM["7.4"], TM["7.4"] + ",semishared")) + BY_HAND,
    "not UTF-8": oned_conf() + "# K\udce4se\n",
    "inherits nothing": "\n".join(line for line in oned_conf().splitlines() if "INHERIT" not in line) + "\n",
}
"""Name -> an oned.conf that oned reads and that can be edited."""

REFUSED: Dict[str, Tuple[str, str]] = {
    "empty": ("", "no TM_MAD"),
    "only comments": ('# TM_MAD = [ ARGUMENTS = "-d x" ]\n', "no TM_MAD"),
    "no TM_MAD": (oned_conf().replace("\nTM_MAD =", "\nTM_MADX ="), "no TM_MAD"),
    "no DATASTORE_MAD": (oned_conf().replace("DATASTORE_MAD", "DATASTORES"), "no DATASTORE_MAD"),
    "no hypervisor": (
        oned_conf()
        .replace("0 kvm", "0 lxc")
        .replace('NAME           = "kvm"', 'NAME = "a"')
        .replace('NAME           = "qemu"', 'NAME = "b"'),
        "no VM_MAD",
    ),
    "directory of another add-on": (
        _replaced(("-t 15 -r 0 kvm -p", "-t 15 -r 0 kvm-storpool -p")),
        "kvm-storpool",
    ),
    "deploy on the front-end": (
        _replaced(("-t 15 -r 0 kvm -p", "-t 15 -r 0 kvm -p -l deploy=deploy-tweaks")),
        "deploy",
    ),
    "no directory": (_replaced(("-t 15 -r 0 kvm -p", "-t 15 -r 0 -p")), "name no directory"),
    "bracket not closed": (oned_conf().replace('"-t 15 -r 0 kvm -p",', '"-t 15 -r 0 kvm -p"'), "line 2"),
    "quotes not closed": (oned_conf() + 'A = "b\n', "quotes"),
    "a stray character": (oned_conf() + "; LOG\n", "a name belongs"),
    "carriage returns": (oned_conf().replace("\n", "\r\n"), "carriage returns"),
    "a list with nothing in it": (_replaced((f"-d {TM['7.4']}", "-d")), "nothing behind it"),
    "half an attribute": (oned_conf() + "PORT", "'=' belongs"),
}
"""Name -> an oned.conf that is not edited, and what the refusal says."""


# -- how oned reads it: the rules of its lexer and grammar, longest match first, and nothing it would skip
# over -----------

Value = Union[str, Dict[str, str]]
INITIAL = (
    ("comment", r"[ \t]*#.*\n"),
    ("blank", r"[ \t\n]+"),
    ("name", r"[A-Za-z0-9_]+"),
    ("equal", r"[ \t]*=[ \t]*"),
    ("empty", r"[ \t]*=[ \t]*\n"),
    ("comma", r"[ \t\n]*,[ \t\n]*"),
    ("close", r"[ \t\n]*\][ \t\n]*"),
)
VALUE = (("open", r"[ \t]*\[[ \t\n]*"), ("quoted", r'"(?:\\"|[^"])*"'), ("bare", r"[^=# \t\n,\[\]]+"))


def _tokens(text: str) -> List[Tuple[str, str]]:
    found: List[Tuple[str, str]] = []
    at = 0
    rules: Tuple[Tuple[str, str], ...] = INITIAL
    text = text if text.endswith("\n") else text + "\n"
    while at < len(text):
        matches = [
            (name, match.group()) for name, rule in rules if (match := re.compile(rule).match(text, at))
        ]
        if not matches:
            raise ValueError(f"oned cannot read {text[at : at + 40]!r}")
        name, word = max(matches, key=lambda pair: len(pair[1]))
        at += len(word)
        if name not in ("comment", "blank"):
            found.append((name, word))
        rules = VALUE if name == "equal" else INITIAL
    return found


def oned_reads(text: str) -> List[Tuple[str, Value]]:
    """Return all attributes as oned has them after reading `text`; raise ValueError where it would give up or
    skip.
    """
    tokens = _tokens(text)

    def take(*kinds: str) -> Tuple[str, str]:
        if not tokens or tokens[0][0] not in kinds:
            raise ValueError(f"oned expects {kinds} before {tokens[:1]}")
        return tokens.pop(0)

    def scalar(kind: str, word: str) -> str:
        return word[1:-1].replace('\\"', '"') if kind == "quoted" else word

    found: List[Tuple[str, Value]] = []
    while tokens:
        name = take("name")[1].upper()
        if take("equal", "empty")[0] == "empty":
            found.append((name, ""))
            continue
        kind, word = take("open", "quoted", "bare")
        if kind != "open":
            found.append((name, scalar(kind, word)))
            continue
        fields: Dict[str, str] = {}
        while tokens and tokens[0][0] != "close":
            key = take("name")[1].upper()
            take("equal")
            fields.setdefault(key, scalar(*take("quoted", "bare")))
            if tokens and tokens[0][0] != "close":
                take("comma")
        take("close")
        found.append((name, fields))
    return found
