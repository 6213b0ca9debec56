# SPDX-License-Identifier: Apache-2.0
"""Lay out the files a node has of its own: /etc, /var, /root and /opt, with keys, users and service
settings.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from lab import state

USER = "oneadmin"
UID = 9869  # what the OpenNebula packages use
FRONT_END_KEY = b"5e" * 32
MINE = ("etc", "var", "root", "opt")
SMALL = ("etc", "root", "opt")
"""Of these, where thousands of small files are and no image is."""
OWN = {"one", "libvirt", "ceph", "hosts", "hostname", "resolv.conf", "mtab"}
"""Of /etc: what a node has none of, or its own."""
UNREAD = {"X11", "apparmor.d", "apt", "fonts", "init.d", "java-17-openjdk", "logrotate.d", "ssl"}
"""Of /etc: what nothing in a node reads, a third of all its files."""
HALT = "/var/lib/libvirt/boot/halt.rom"
HALT_XML = f"<loader type='rom'>{HALT}</loader>"
"""For <os> of a guest without a system: an emulated BIOS takes 0.1 s of processor each time to find out that
nothing boots.
"""
# At the last 16 bytes, where a processor begins: cli, hlt, and back to hlt.
HALT_ROM = bytes(0xFFF0) + bytes.fromhex("faf4ebfd").ljust(16, b"\0")

# The key exchange is what costs a tenth of a second and more of processor with the algorithm that is the
# default. P-256 (here and of the keys) is OpenSSL's, and quick; for the others ssh and sshd have C of their
# own.
SSHD = """\
Port 22
HostKey /etc/ssh/ssh_host_lab
UsePAM no
PasswordAuthentication no
UseDNS no
PidFile /run/sshd.pid
AcceptEnv LANG LC_*
KexAlgorithms ecdh-sha2-nistp256
Subsystem sftp /usr/lib/openssh/sftp-server
"""
LIBVIRTD = """\
host_uuid = "{uuid}"
unix_sock_group = "libvirt"
unix_sock_rw_perms = "0770"
auth_unix_ro = "none"
auth_unix_rw = "none"
"""
QEMU = """\
user = "oneadmin"
group = "oneadmin"
dynamic_ownership = 0
security_driver = "none"
stdio_handler = "file"
namespaces = []
migration_address = "{address}"
migration_host = "{address}"
"""


def owner_ids() -> tuple[int, int]:
    """Return uid and gid of oneadmin: the machine's own user when it has one, else those of the packages."""
    try:
        entry = pwd.getpwnam(USER)
    except KeyError:
        return UID, UID
    return entry.pw_uid, entry.pw_gid


def _set_line(path: Path, name: str, line: str) -> None:
    lines = [old for old in path.read_text().splitlines() if not old.startswith(name + ":")]
    path.write_text("\n".join([*lines, line]) + "\n")


def _users(etc: Path) -> None:
    uid, gid = owner_ids()
    _set_line(etc / "passwd", USER, f"{USER}:x:{uid}:{gid}::/var/lib/one:/bin/bash")
    _set_line(etc / "shadow", USER, f"{USER}:*:19000:0:99999:7:::")  # '!' would make sshd refuse keys
    # By the node's own file: groups of another release have other numbers than this machine's.
    groups = {line.partition(":")[0]: line for line in (etc / "group").read_text().splitlines()}
    if USER not in groups:
        _set_line(etc / "group", USER, f"{USER}:x:{gid}:")
    for name in ("libvirt", "kvm"):
        known, _, members = groups.get(name, "").rpartition(":")
        if known and USER not in members.split(","):
            _set_line(etc / "group", name, f"{known}:{','.join(filter(None, (members, USER)))}")


def make_keys(folder: Path) -> None:
    """Make the one host key and the one user key of a lab."""
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(
            [
                "ssh-keygen",
                "-q",
                "-t",
                "ecdsa",
                "-b",
                "256",
                "-N",
                "",
                "-C",
                f"{name}@lab",
                "-f",
                str(folder / name),
            ],
            check=True,
            stdin=subprocess.DEVNULL,
        )


def lay_out(
    folder: Path, keys: Path, name: str, names: dict[str, str], stores: Sequence[int], root: Path = Path("/")
) -> None:
    """Write what a node called `name` finds on its own disks; `names` maps every node name to its address.

    What it is configured with is that of `root`, whose programs it has.
    """
    uid, gid = owner_ids()
    etc, home = folder / "etc", folder / "var/lib/one"
    memory = state.MEMORY / folder.parents[1].name
    for part in (*MINE, "rootfs"):  # rootfs is where the node's first process puts its root together
        if memory.is_dir() and part in SMALL:
            folder.mkdir(parents=True, exist_ok=True)
            (memory / name / part).mkdir(parents=True)
            (folder / part).symlink_to(memory / name / part)
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.chmod(folder / "root", 0o700)
    state.copy_tree(root / "etc", etc, OWN | UNREAD)
    _users(etc)
    (etc / "hostname").write_text(name + "\n")
    lines = ["127.0.0.1 localhost", *(f"{address} {node}" for node, address in names.items())]
    (etc / "hosts").write_text("\n".join(lines) + "\n")
    (etc / "resolv.conf").write_text("")
    (etc / "lab-shared").write_text("".join(f"/var/lib/one/datastores/{store}\n" for store in stores))
    (etc / "ssh").mkdir(exist_ok=True)
    shutil.copy(keys / "host", etc / "ssh/ssh_host_lab")
    os.chmod(etc / "ssh/ssh_host_lab", 0o600)
    (etc / "ssh/sshd_lab").write_text(SSHD)
    (etc / "libvirt/qemu").mkdir(parents=True)
    (etc / "libvirt/libvirtd.conf").write_text(LIBVIRTD.format(uuid=uuid.uuid4()))
    (etc / "libvirt/qemu.conf").write_text(QEMU.format(address=names[name]))

    for part in ("tmp", "log/one", "log/libvirt/qemu", "lib/misc", "spool"):
        (folder / "var" / part).mkdir(parents=True, exist_ok=True)
    os.chmod(folder / "var/tmp", 0o1777)
    os.symlink("/run", folder / "var/run")
    os.symlink("/run/lock", folder / "var/lock")
    owned = [
        folder / "var/log/one",
        folder / "var/log/libvirt/qemu",
        home,
        home / "datastores",
        home / ".ssh",
    ]
    for part in ("lib/libvirt/qemu", "cache/libvirt/qemu"):
        owned.append(folder / "var" / part)
    owned += [home / "datastores" / str(store) for store in (*stores, 101)]
    if name.startswith("fe"):
        owned += [home / "remotes", home / ".one"]
    for path in owned:
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, uid, gid)
    for part in ("images", "boot"):
        (folder / "var/lib/libvirt" / part).mkdir(exist_ok=True)
    (folder / HALT.lstrip("/")).write_bytes(HALT_ROM)

    files = {
        home / ".ssh/id_ecdsa": (keys / "user").read_text(),
        home / ".ssh/id_ecdsa.pub": (keys / "user.pub").read_text(),
        home / ".ssh/authorized_keys": (keys / "user.pub").read_text(),
        home / ".ssh/known_hosts": "* " + (keys / "host.pub").read_text(),
    }
    if name.startswith("fe"):
        files[home / ".one/one_auth"] = "oneadmin:password\n"
        files[home / ".one/semishared_key"] = FRONT_END_KEY.decode()
    os.chmod(home / ".ssh", 0o700)
    for path, text in files.items():
        path.write_text(text)
        os.chmod(path, 0o600)
        os.chown(path, uid, gid)
