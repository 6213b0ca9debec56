# SPDX-License-Identifier: Apache-2.0
"""Judge machines and their mounts by their answers (checks.py has the rows).

install/preflight.py asks each machine; the kernel names the mount options in force.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional, Sequence

from ... import NAME as DRIVER
from ...errors import SemisharedError
from ...model import platforms
from ...model.attributes import BASES_FLOOR, BASES_LIMIT, STORE
from ...model.store import template
from ...named import NamedTuple
from ...opennebula.xml import Host
from ..base import eviction
from ..vm.hypervisor import FLOORS, version
from .checks import Finding, Judge, judged
from .diagnosis import Cloud, Site, path_of
from .diagnosis_scheduler import setup_command

NFS = ("nfs", "nfs4")
REMOUNT = "as root on {}: mend its line in /etc/fstab (docs/how-to/nfs.md), then umount and mount {}"
"""What mends a store where something is mounted, but not what should be."""
Answers = Mapping[str, "dict[str, Any] | str"]
"""Machine -> its answer, or why there is none."""


class Machine(NamedTuple):
    """A machine's answer, and the front-end's own, if it gave one."""

    answer: Mapping[str, Any]
    own: Mapping[str, Any] = {}
    secrets: Sequence[str] = ()
    """UUIDs of the Ceph secrets that libvirt must have."""

    @property
    def platform(self) -> Mapping[str, Any]:
        """What it says it is: a guide to remedies, and to nothing else."""
        return platform_of(self.answer)


class Store(NamedTuple):
    """A machine's answer about a store."""

    state: Mapping[str, Any]
    wanted: Optional[str] = None
    """The marker that it is to have, '' for none yet, None for a store that is no datastore's."""
    is_front_end: bool = False
    libvirt: Mapping[str, Any] = {}


class Room(NamedTuple):
    """A machine's answer about its own disk, and the bytes that must stay free on a host."""

    local: Mapping[str, Any]
    floor: int = 0
    is_host: bool = True

    @property
    def is_short(self) -> bool:
        return self.is_host and bool(self.local["free"] < max(self.floor, 1))


def _lacking(kind: str) -> Judge:
    return lambda it: [
        {"program": name, "install": platforms.install(it.platform, [name])}
        for name in it.answer["lacks"][kind]
    ]


def platform_of(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a machine's answer says of its platform, {} if nothing."""
    found: Mapping[str, Any] = answer.get("os", {})
    return found


def _old_python(it: Machine) -> object:
    there = tuple(it.answer["python"])
    is_old = there < platforms.PYTHON_FLOOR
    return is_old and {"it": ".".join(map(str, there)), "python": platforms.python(it.platform)}


def _old_qemu(it: Machine, qemu: object) -> object:
    is_old = bool(qemu) and version(str(qemu)) < FLOORS["QEMU"]
    return is_old and {"it": qemu, "update": platforms.update(it.platform)}


def _silent(it: Machine) -> list[dict[str, str]]:
    daemon = platforms.daemon(it.platform)
    return [{"it": error, "daemon": daemon} for error in _error(it.answer["libvirt"])]


def _old_libvirt(it: Machine) -> str:
    libvirt = str(it.answer["libvirt"].get("libvirt", ""))
    return libvirt if libvirt and version(libvirt) < FLOORS["libvirt"] else ""


def _qemu_user(it: Machine) -> object:
    users = {"user": it.answer["libvirt"].get("user", ""), "own": it.answer["user"]}
    daemon = platforms.daemon(it.platform)
    return users["user"] not in ("", "root", users["own"]) and {**users, "daemon": daemon}


def _user(it: Machine) -> object:
    users = {"user": it.answer["user"], "own": it.own.get("user")}
    return it.own and users["user"] != users["own"] and users


def _version(it: Machine) -> object:
    there, own = it.answer["tree"]["version"], it.own.get("tree", {}).get("version")
    return it.own and there != own and {"there": there, "own": own}


def _differing(it: Machine) -> str:
    parts, ours = it.answer["tree"]["parts"], it.own.get("tree", {}).get("parts", {})
    return ", ".join(part for part, digest in parts.items() if it.own and digest != ours.get(part))


MACHINE: dict[str, Judge] = {
    "answers": lambda answer: [answer] if isinstance(answer, str) else [],
    "python": _old_python,
    "needed": _lacking("needed"),
    "wanted": _lacking("wanted"),
    "qemu": lambda it: _old_qemu(it, it.answer["programs"].get("qemu-img")),
    "user": _user,
    "package": lambda it: not it.answer["tree"]["parts"].get(f"lib/{DRIVER}"),
    "version": _version,
    "synced": _differing,
    "libvirt": _silent,
    "libvirt-old": _old_libvirt,
    "emulator-old": lambda it: _old_qemu(it, it.answer["libvirt"].get("qemu")),
    "emulator-user": _qemu_user,
    "secrets": lambda it: [one for one in it.secrets if one not in it.answer["libvirt"]["secrets"]],
    "selinux": lambda it: "selinux" in it.answer["libvirt"].get("confines", ()),
    "ceph-pool": lambda state: state["error"],
}


def _error(answer: Mapping[str, Any]) -> list[str]:
    return [answer["error"]] if "error" in answer else []


def _another(it: Store) -> str:
    if it.state["same"] or it.is_front_end:
        return ""
    return "is not mounted" if it.state["empty"] else "is another file system than on the front-end"


def _apparmor(it: Store) -> bool:
    is_nfs = it.state.get("mount", {}).get("type") in NFS
    return "apparmor" in it.libvirt.get("confines", ()) and is_nfs and not it.state.get("passable")


def _options(mount: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, _, value in (option.partition("=") for option in mount["options"])}


def _old_nfs(mount: Mapping[str, Any]) -> str:
    options = _options(mount)
    found = options.get("vers") or options.get("nfsvers") or ("4" if mount["type"] == "nfs4" else "3")
    return "" if found.startswith("4") else found


def _own_locks(mount: Mapping[str, Any]) -> str:
    options = _options(mount)
    local = options.get("local_lock", "none")
    return "nolock" if "nolock" in options else "" if local == "none" else f"local_lock={local}"


MOUNTED: dict[str, Judge] = {
    "store-answers": lambda it: _error(it.state),
    "store-same": _another,
    "store-marker": lambda it: it.wanted and not it.state.get("marker"),
    "store-own": lambda it: it.wanted and it.state["marker"] != it.wanted and it.state["marker"],
    "store-writable": lambda it: not it.state["writable"] and {"reason": it.state.get("reason")},
    "marked": lambda it: "error" not in it.state and it.wanted == "" and it.is_front_end,
    "apparmor": _apparmor,
    "nfs-version": _old_nfs,
    "nfs-locks": _own_locks,
    "nfs-hard": lambda mount: [name for name in ("soft", "softerr") if name in _options(mount)],
    "nfs-answers": lambda mount: "softreval" in _options(mount),
    "nfs-lookups": lambda mount: _options(mount).get("lookupcache") not in ("pos", "positive", "none"),
}
LOCAL: dict[str, Judge] = {
    "local-answers": lambda it: _error(it.local),
    "local-read-only": lambda it: it.local["read_only"],
    "local-writable": lambda it: not it.local["writable"],
    "local-full": lambda it: it.is_short and not it.local["free"],
    "local-floor": lambda it: it.is_short and it.local["free"],
    "local-inodes": lambda it: not it.local["inodes"] and not it.local["no_inodes"],
}


def of_machines(answers: Answers, site: Site, cloud: Cloud, sizes: tuple[str, str]) -> list[Finding]:
    """Judge machines by their answers; `sizes`: size_limit and free_floor of semishared.conf."""
    found = []
    own = answers.get(site.front_end)
    own = own if isinstance(own, dict) else {}
    hosts = {host.name: host for host in cloud.hosts}
    for machine, answer in answers.items():
        found += judged("answer", MACHINE, answer, machine)
        if isinstance(answer, str):
            continue
        facts = Machine(answer, own, _secrets(cloud))
        old = judged("python!", MACHINE, facts, machine)
        found += old
        if old:
            continue  # it has said nothing else (install/examine.py)
        found += judged("machine", MACHINE, facts, machine, front_end=site.front_end)
        if machine != site.front_end:
            found += judged("synced!", MACHINE, facts, machine)
        if "libvirt" in answer:
            silent = judged("libvirt!", MACHINE, facts, machine)
            found += silent or judged("libvirt-set-up", MACHINE, facts, machine)
        found += _stores(machine, answer, machine == site.front_end, cloud)
        for pool, state in answer.get("ceph", {}).items():
            found += judged("ceph", MACHINE, state, machine, pool=pool)
        if "local" in answer:  # asked only if there is a system datastore of ours
            found += _local(machine, answer["local"], hosts.get(machine), sizes)
    found += _clusters(answers, cloud.hosts)
    return found + _one_machine(answers) + of_shared(answers, site.front_end)


def _secrets(cloud: Cloud) -> list[str]:
    found: list[str] = []
    for store in cloud.datastores:
        try:
            access = template.access(store)
        except SemisharedError:
            continue
        found += filter(None, (access.secret, access.remote_secret))
    return found


def _stores(machine: str, answer: Mapping[str, Any], is_front_end: bool, cloud: Cloud) -> list[Finding]:
    found = []
    wanted = {path_of(store): STORE.text(store) for store in cloud.datastores}
    for path, state in answer.get("stores", {}).items():
        facts = Store(state, wanted.get(path), is_front_end, answer.get("libvirt", {}))
        about = {"path": path, "remount": REMOUNT.format(machine, path), "setup": _setup(cloud, path)}
        for of in ("store!", "marking"):
            found += judged(of, MOUNTED, facts, machine, user=answer["user"], **about)
        mount = state.get("mount", {})
        if mount.get("type") in NFS:
            found += judged("mount", MOUNTED, mount, machine, **about)
    return found


def _setup(cloud: Cloud, path: str) -> str:
    """Return the command that marks a store."""
    image = next((store.name for store in cloud.datastores if path_of(store) == path), "")
    return setup_command(cloud.datastores, image)


def _local(
    machine: str, local: Mapping[str, Any], host: Optional[Host], sizes: tuple[str, str]
) -> list[Finding]:
    found = judged("local!", LOCAL, Room(local), machine, where=local.get("where", ""))
    if found:
        return found
    limit = BASES_LIMIT.text(host) or sizes[0]
    floor = BASES_FLOOR.text(host) or sizes[1]
    try:
        wanted = eviction.limits(limit, floor, local["total"]).floor
    except SemisharedError:
        wanted = 0
    about = {"where": local.get("where", ""), "free": local["free"] >> 20, "floor": wanted >> 20}
    return judged("local-room", LOCAL, Room(local, wanted, host is not None), machine, **about)


def _one_of_many(answers: Answers) -> list[dict[str, str]]:
    """Return machines that OpenNebula has under several names: by their signatures, not by the names."""
    names: dict[str, list[str]] = {}
    for name, answer in answers.items():
        signed = answer.get("signed", {}).values() if isinstance(answer, dict) else ()
        for machine in {str(its["machine"]) for its in signed if "machine" in its}:
            names.setdefault(machine, []).append(name)
    return [{"machine": one[0], "names": " and ".join(one)} for one in names.values() if len(one) > 1]


def _older(hosts: Mapping[tuple[int, ...], Sequence[str]]) -> list[dict[str, str]]:
    """Return the hosts with the oldest QEMU and the newest; a machine type has no third number."""
    if len(hosts) < 2:
        return []
    (old, older), *_, (new, newer) = sorted(hosts.items())
    texts = [".".join(map(str, number)) for number in (old, new)]
    names = [", ".join(sorted(those)) for those in (older, newer)]
    return [{"machine": min(older), "old": texts[0], "new": texts[1], "older": names[0], "newer": names[1]}]


Processors = Mapping[str, Mapping[str, Any]]
"""Host -> what it says of libvirt, of its processor and of guests that have it."""


def _passed_through(hosts: Processors) -> list[dict[str, str]]:
    """Return the guests that have their host's CPU, where the hosts have not the same.

    libvirt cannot compare what it does not know: such a guest's CPU has no name. A host that has more than
    another one could take the other's guests; that it is so in all that a guest sees, no host says.
    """
    running = {name: said["passed_through"] for name, said in hosts.items() if said.get("passed_through")}
    seen = {name: said["processor"] for name, said in hosts.items() if said.get("processor")}
    # Another kernel has other words for what a processor has.
    by_all = len({its["kernel"] for its in seen.values()}) == 1
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, its in sorted(seen.items()):
        alike.setdefault((its["kind"], tuple(its["has"]) if by_all else ()), []).append(name)
    if not running or len(alike) < 2:
        return []
    every = {word for _, words in alike for word in words} if len({kind for kind, _ in alike}) == 1 else set()
    kinds = []
    for (_, has), names in alike.items():
        lacks = sorted(every - set(has))
        words = [*lacks[:MOST_WORDS], *["..."] * (len(lacks) > MOST_WORDS)]
        without = f" without {' '.join(words)}" if words else ""
        kinds.append(f"{seen[names[0]]['name']}{without} on {', '.join(names)}")
    count = sum(running.values())
    fields = {"guests": f"{count} guest{'s' * (count > 1)}", "running": ", ".join(sorted(running))}
    return [{"machine": min(running), **fields, "kinds": "; ".join(kinds)}]


MOST_WORDS = 6
"""Of what a processor lacks: there may be a hundred."""
SIGNED: dict[str, Judge] = {
    "one-machine": _one_of_many,
    "own-disk": lambda found: found,
    "qemu-mixed": _older,
    "cpu-passthrough": _passed_through,
}


def _clusters(answers: Answers, hosts: Sequence[Host]) -> list[Finding]:
    found: dict[int, dict[tuple[int, ...], list[str]]] = {}
    said: dict[int, dict[str, Mapping[str, Any]]] = {}
    for host in hosts:
        answer = answers.get(host.name)
        libvirt = answer.get("libvirt", {}) if isinstance(answer, dict) else {}
        said.setdefault(host.cluster_id, {})[host.name] = libvirt
        qemu = libvirt.get("qemu")
        if qemu:
            found.setdefault(host.cluster_id, {}).setdefault(version(str(qemu))[:2], []).append(host.name)
    findings = [one for number in sorted(found) for one in judged("cluster", SIGNED, found[number], "")]
    for number in sorted(said):
        findings += judged("processors", SIGNED, said[number], "")
    return findings


def _one_machine(answers: Answers) -> list[Finding]:
    return judged("machines", SIGNED, answers, "")


def of_shared(answers: Answers, front_end: str) -> list[Finding]:
    """Judge directories that must be each machine's own, by the signatures in them (tools/signatures.py)."""
    places = []
    for place, (machines, directories) in shared(answers).items():
        names = sorted(machines, key=lambda name: (name != front_end, name))
        fields = {"machine": names[0], "names": ", ".join(names), "directories": ", ".join(directories)}
        places.append({"place": place, **fields})
    return judged("shared", SIGNED, places, "")


def shared(answers: Answers) -> dict[str, tuple[set[str], list[str]]]:
    """Return the directories that several machines share: which machines, and what we keep there."""
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
    """Tell whether another machine signs there now.

    An older count of its signature is a copy, or that machine was there before.
    """
    return (
        "seen" in own
        and "machine" in its
        and int(own["seen"].get(its["machine"], -3)) >= int(its["count"]) - 2
    )
