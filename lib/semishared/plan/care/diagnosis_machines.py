# SPDX-License-Identifier: Apache-2.0
"""What is wrong with machines and their mounts, and the command that mends it: by what they said.

install/preflight.py asks each machine; the kernel tells the mount options in force.
"""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional

from ... import NAME as DRIVER
from ...errors import SemisharedError
from ...model.attributes import BASES_FLOOR, BASES_LIMIT, STORE
from ...model.store import access as store_access
from ...model.store import template
from ...opennebula.xml import Host
from ..base import eviction
from .diagnosis import BROKEN, WARNING, Cloud, Finding, Site, path_of

NFS = ("nfs", "nfs4")


def mount_problems(mount: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is it broken, what) of a mount as install/preflight.mount_of returns it; docs/how-to/nfs.md says
    why.
    """
    if mount.get("type") not in NFS:
        return
    options: dict[str, str] = {}
    for option in mount["options"]:
        name, _, value = option.partition("=")
        options[name] = value
    version = options.get("vers") or options.get("nfsvers") or ("4" if mount["type"] == "nfs4" else "3")
    if not version.startswith("4"):
        yield (
            True,
            f"NFS version {version}: between its clients QEMU's image locks do not hold; vers=4.2 is wanted",
        )
    local = options.get("local_lock", "none")
    if "nolock" in options or local != "none":
        name = "nolock" if "nolock" in options else f"local_lock={local}"
        yield True, f"mounted with {name}: no other host sees this one's locks"
    for name in ("soft", "softerr"):
        if name in options:
            yield False, f"mounted {name}: guests get I/O errors while the server is away; hard is wanted"
    if "softreval" in options:
        yield False, "mounted with softreval: while the server is away, old answers are taken for true"
    if options.get("lookupcache") not in ("pos", "positive", "none"):
        yield (
            False,
            "mounted without lookupcache=positive: a file that others have just made may seem "
            "absent for 30 s",
        )


QEMU_FLOOR = (5, 2)
"""extended_l2 of qcow2 (docs/explanation/overlay-options.md)."""
PACKAGES = {
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
    "genisoimage|mkisofs|xorriso": "genisoimage",
    "python3-rbd": "python3-rados python3-rbd",
    "python3-libvirt": "python3-libvirt",
}
"""Program -> Debian's package."""


Answers = Mapping[str, "dict[str, Any] | str"]
"""Machine -> what it answered, or why it did not."""


def of_machines(answers: Answers, site: Site, cloud: Cloud, sizes: tuple[str, str]) -> list[Finding]:
    """Judge what machines said of themselves; `sizes` are size_limit and free_floor of semishared.conf."""
    found = []
    own = answers.get(site.front_end)
    ours = own["tree"] if isinstance(own, dict) else {}
    hosts = {host.name: host for host in cloud.hosts}
    for machine, answer in answers.items():
        if isinstance(answer, str):
            found.append(
                Finding(
                    BROKEN, machine, answer, f"as oneadmin: ssh {machine} true; or onehost offline {machine}"
                )
            )
            continue
        found += _programs(machine, answer)
        if isinstance(own, dict) and answer["user"] != own["user"]:
            mend = f"as {own['user']} on {site.front_end}: mend User for {machine} in ~/.ssh/config"
            found.append(
                Finding(WARNING, machine, f"ssh enters as {answer['user']}, not as {own['user']}", mend)
            )
        if machine != site.front_end:
            found += _synced(machine, answer["tree"], ours)
        if "libvirt" in answer:
            found += _libvirt(machine, answer["libvirt"], cloud)
        found += _stores(machine, answer, machine == site.front_end, cloud)
        host = hosts.get(machine)
        if "local" in answer:  # without a system datastore of ours nobody was asked
            found += _local(machine, answer["local"], host, sizes)
    return found + _one_machine(answers) + of_shared(answers, site.front_end)


def _one_machine(answers: Answers) -> list[Finding]:
    """Judge whether OpenNebula has one machine under several names: as each has signed what is to be its own,
    not by the names.
    """
    names: dict[str, list[str]] = {}
    for name, answer in answers.items():
        signed = answer.get("signed", {}).values() if isinstance(answer, dict) else ()
        for machine in {str(its["machine"]) for its in signed if "machine" in its}:
            names.setdefault(machine, []).append(name)
    mend = "onehost delete all of its names but one, when they have no VMs"
    return [
        Finding(
            BROKEN,
            found[0],
            f"{' and '.join(found)} are one machine, whose memory and devices OpenNebula counts for each",
            mend,
        )
        for found in names.values()
        if len(found) > 1
    ]


def _programs(machine: str, answer: Mapping[str, Any]) -> list[Finding]:
    found = []
    if answer["python"] < [3, 9]:
        mend = f"as root on {machine}: install python3 3.9 or newer"
        found.append(Finding(BROKEN, machine, f"python3 is {'.'.join(map(str, answer['python']))}", mend))
    for severity, kind in ((BROKEN, "needed"), (WARNING, "wanted")):
        for name in answer["lacks"][kind]:
            mend = f"as root on {machine}: apt-get install {PACKAGES.get(name, '...')}"
            found.append(Finding(severity, machine, f"{name} is not installed", mend))
    qemu = answer["programs"].get("qemu-img")
    if qemu and version(qemu) < QEMU_FLOOR:
        found.append(
            Finding(
                BROKEN,
                machine,
                f"QEMU {qemu} is older than 5.2: no extended_l2",
                f"as root on {machine}: update qemu",
            )
        )
    return found


def version(text: str) -> tuple[int, ...]:
    """Return a version as numbers."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _synced(machine: str, there: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Finding]:
    mend = "as oneadmin: onehost sync --force"
    if not there["parts"].get(f"lib/{DRIVER}"):
        return [Finding(BROKEN, machine, f"{DRIVER} is not there", mend)]
    if ours and there["version"] != ours["version"]:
        return [
            Finding(
                BROKEN,
                machine,
                f"{DRIVER} {there['version']} is there, the front-end has {ours['version']}",
                mend,
            )
        ]
    differing = [
        part for part, digest in there["parts"].items() if ours and digest != ours["parts"].get(part)
    ]
    return (
        [Finding(BROKEN, machine, f"not synced: {', '.join(differing)} is not the front-end's", mend)]
        if differing
        else []
    )


def _libvirt(machine: str, answer: Mapping[str, Any], cloud: Cloud) -> list[Finding]:
    if "error" in answer:
        mend = f"as root on {machine}: systemctl restart libvirtd"
        return [Finding(BROKEN, machine, f"libvirt does not answer: {answer['error']}", mend)]
    found = []
    for access in _ceph(cloud):
        for secret in filter(None, (access.secret, access.remote_secret)):
            if secret not in answer["secrets"]:
                found.append(
                    Finding(
                        BROKEN,
                        machine,
                        f"libvirt does not know the secret {secret}",
                        "docs/how-to/ceph.md, 4. libvirt",
                    )
                )
    if "selinux" in answer.get("confines", ()):
        what = "libvirt confines QEMU by SELinux: nobody has tried that with semishared"
        found.append(Finding(WARNING, machine, what, "docs/how-to/apparmor.md, SELinux"))
    return found


def _ceph(cloud: Cloud) -> list[store_access.Access]:
    found = []
    for store in cloud.datastores:
        try:
            access = template.access(store)
        except SemisharedError:
            continue
        if access.can.has_bridge:
            found.append(access)
    return found


def _stores(machine: str, answer: Mapping[str, Any], is_front_end: bool, cloud: Cloud) -> list[Finding]:
    found = []
    wanted = {path_of(store): STORE.text(store) for store in cloud.datastores}
    for path, state in answer.get("stores", {}).items():
        mount = f"as root on {machine}: mount {path}"
        if "error" in state:
            found.append(
                Finding(BROKEN, machine, f"store {path}: {state['error']}", f"{mount} (docs/how-to/nfs.md)")
            )
        elif not state["same"] and not is_front_end:
            what = "is not mounted" if state["empty"] else "is another file system than on the front-end"
            found.append(Finding(BROKEN, machine, f"store {path} {what}", mount))
        elif wanted.get(path) and not state.get("marker"):
            what = f"store {path} is not there, or has lost its marker"
            found.append(Finding(BROKEN, machine, what, f"{mount}; or {_setup(cloud, path)}"))
        elif wanted.get(path) and state["marker"] != wanted[path]:
            what = f"store {path} is another datastore's: its marker says {state['marker']}"
            found.append(Finding(BROKEN, machine, what, _remount(machine, path)))
        elif not state["writable"]:
            found.append(
                Finding(
                    BROKEN,
                    machine,
                    f"store {path} cannot be written by {answer['user']}: {state.get('reason')}",
                    f"as root where it is exported: chown oneadmin: {path}, and export it read-write",
                )
            )
        if "error" not in state and path in wanted and not wanted[path] and is_front_end:
            found.append(
                Finding(
                    WARNING,
                    machine,
                    f"store {path} is not marked: that it is not mounted would not be noticed",
                    _setup(cloud, path),
                )
            )
        found += _mount(machine, path, state, answer.get("libvirt", {}))
    for pool, state in answer.get("ceph", {}).items():
        if state["error"]:
            found.append(
                Finding(
                    BROKEN,
                    machine,
                    f"pool {pool} cannot be listed: {state['error']}",
                    "docs/how-to/ceph.md, 3. Keys",
                )
            )
    return found


def _mount(machine: str, path: str, state: Mapping[str, Any], libvirt: Mapping[str, Any]) -> list[Finding]:
    """Judge how a store that answers is mounted."""
    found = []
    mount = state.get("mount", {})
    if "apparmor" in libvirt.get("confines", ()) and mount.get("type") in NFS and not state.get("passable"):
        what = (
            f"store {path} is closed to others: where the export squashes root, libvirt cannot tell "
            f"AppArmor what QEMU may open"
        )
        found.append(
            Finding(WARNING, machine, what, f"as oneadmin: chmod o+x {path} (docs/how-to/apparmor.md)")
        )
    for is_broken, what in mount_problems(mount):
        found.append(
            Finding(
                BROKEN if is_broken else WARNING, machine, f"store {path}: {what}", _remount(machine, path)
            )
        )
    return found


def _remount(machine: str, path: str) -> str:
    """Return what mends a store where something is mounted, but not what should be."""
    return (
        f"as root on {machine}: mend its line in /etc/fstab (docs/how-to/nfs.md), then umount and "
        f"mount {path}"
    )


def _quoted(name: str) -> str:
    return (
        name
        if name and all(c.isalnum() or c in "-_." for c in name)
        else "'" + name.replace("'", "'\\''") + "'"
    )


def _setup(cloud: Cloud, path: str) -> str:
    """Return the command that marks a store."""
    image = next((store.name for store in cloud.datastores if path_of(store) == path), "")
    system = next((store.name for store in cloud.datastores if store.is_system), "")
    names = [f"--image {_quoted(image)}", *([f"--system {_quoted(system)}"] if system else [])]
    return f"{DRIVER} setup --apply {' '.join(names)}"


def _local(
    machine: str, local: Mapping[str, Any], host: Optional[Host], sizes: tuple[str, str]
) -> list[Finding]:
    where = local.get("where", "")
    if "error" in local:
        mend = f"as root on {machine}: dmesg; mend or mount its disk (docs/how-to/dead-host.md if it is lost)"
        return [Finding(BROKEN, machine, f"local store: {local['error']}", mend)]
    if local["read_only"]:
        return [
            Finding(
                BROKEN,
                machine,
                f"{where} is mounted read-only",
                f"as root on {machine}: dmesg; mount -o remount,rw {where}",
            )
        ]
    found = []
    if not local["writable"]:
        found.append(
            Finding(
                BROKEN,
                machine,
                f"{where} cannot be written",
                f"as root on {machine}: chown oneadmin: {where}",
            )
        )
    limit = BASES_LIMIT.text(host) or sizes[0]
    floor = BASES_FLOOR.text(host) or sizes[1]
    try:
        wanted = eviction.limits(limit, floor, local["total"]).floor
    except SemisharedError:
        wanted = 0
    if host and local["free"] < max(wanted, 1):
        found.append(
            Finding(
                BROKEN if not local["free"] else WARNING,
                machine,
                f"{where} has {local['free'] >> 20} MiB free, {wanted >> 20} MiB are to stay free",
                f"{DRIVER} base prune --hosts {machine}; or migrate VMs away",
            )
        )
    if not local["inodes"] and not local["no_inodes"]:
        found.append(
            Finding(
                BROKEN,
                machine,
                f"{where} has no inodes left",
                f"{DRIVER} gc; {DRIVER} base prune --hosts {machine}",
            )
        )
    return found


def of_shared(answers: Answers, front_end: str) -> list[Finding]:
    """Judge whether what is to be each machine's own is: by the signatures that machines found there
    (tools/signatures.py).
    """
    found = []
    for place, (machines, directories) in shared(answers).items():
        names = sorted(machines, key=lambda name: (name != front_end, name))
        what = (
            f"{place} is one directory on {', '.join(names)}: what is in {', '.join(directories)} has "
            f"to be each machine's own"
        )
        mend = "as root on each: mount a disk of its own there (docs/how-to/nfs.md)"
        found.append(Finding(BROKEN, names[0], what, mend))
    return found


def shared(answers: Answers) -> dict[str, tuple[set[str], list[str]]]:
    """Return the places that several machines have: which machines, and what of ours is or will be there."""
    signed = {
        machine: answer.get("signed", {}) for machine, answer in answers.items() if isinstance(answer, dict)
    }
    found: dict[str, tuple[set[str], list[str]]] = {}
    for machine, places in signed.items():
        for directory, own in places.items():
            others = {
                other
                for other in signed
                if other != machine and any(_has_signed(own, its) for its in signed[other].values())
            }
            if others:
                machines, directories = found.setdefault(own["place"], (set(), []))
                machines |= {machine, *others}
                if directory not in directories:
                    directories.append(directory)
    return found


def _has_signed(own: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
    """Tell whether another machine signs there now; an older count of it is a copy, or the other was there
    before.
    """
    return (
        "seen" in own
        and "machine" in its
        and int(own["seen"].get(its["machine"], -3)) >= int(its["count"]) - 2
    )
