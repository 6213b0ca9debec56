# SPDX-License-Identifier: Apache-2.0
"""Whether a running VM may move, with which options, and who owns it after a failure.

Only a VM whose disks are all in place moves: nothing of it is copied but memory. The stock script would create empty
images over its disks, so every doubt here is a refusal.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from ..errors import BadArguments, MigrationRefused, NotSupported
from ..model.steps import State
from ..opennebula.args import absolute
from ..opennebula.xml_edit import Element, Markup
from .domain_xml import Records, disk_number

COPIES = ("--copy-storage", "--migrate-disks")
"""Options that would make QEMU write a disk onto itself through the shared store."""


def paths_in_place(domain: bytes, vm_dir: str, records: Records, context_disk: int) -> list[str]:
    """Return the paths of the disks in place; raise MigrationRefused if any other disk would be left behind."""
    for number, record in sorted(records.items()):
        if record.is_local:
            raise MigrationRefused(f"disk {number} ({record.how}) lies on the disk of this host alone")
    known = {absolute(record.path, "path") for record in records.values() if record.path}
    found = []
    for disk in Markup(domain, "domain").root.find("devices", "disk"):
        path = _source(disk)
        if disk.attributes.get("type") == "network" or not path:
            continue
        named = disk_number(path, vm_dir)
        if named is not None and named == context_disk and disk.first("readonly"):
            continue
        plain = path if named is None or named not in records else records[named].path
        plain = "/" + "/".join(part for part in plain.split("/") if part)
        if disk.attributes.get("type") != "file" or plain not in known:
            name = f"disk {named}" if named is not None else _target(disk)
            raise MigrationRefused(f"{name} ({path}) is not on a shared store that semishared knows")
        found.append(plain)
    return found


def _source(disk: Element) -> str:
    source = disk.first("source")
    attributes = source.attributes if source else {}
    return next((attributes[key] for key in ("file", "dev", "dir", "volume", "name") if attributes.get(key)), "")


def _target(disk: Element) -> str:
    target = disk.first("target")
    return f"disk {target.attributes.get('dev')}" if target else "a disk"


def is_proved(paths: Iterable[str], proof: object, host: str) -> bool:
    """Tell whether `proof` (of premigrate) says that `host` saw the same files as we at all `paths`."""
    if not isinstance(proof, dict) or proof.get("version") != 1 or proof.get("to") != host:
        return False
    checked = proof.get("shared_checked")
    if not isinstance(checked, list) or not all(isinstance(place, str) for place in checked):
        return False
    places = [[part for part in place.split("/") if part] for place in checked if place.startswith("/")]
    return all(any(place and _parts(path)[: len(place)] == place for place in places) for path in paths)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def options(site: list[str], auto_converge: str, compressed: str, persistent: bool, proved: bool) -> list[str]:
    """Return the options of `virsh migrate`: the site's, the VM's, and ours; raise NotSupported, BadArguments."""
    for option in site:
        if option.startswith(COPIES):
            raise NotSupported(f"MIGRATE_OPTIONS of kvmrc contains {option}, which would overwrite disks in place")
    chosen = list(site)
    if auto_converge:
        steps = [step.strip() for step in auto_converge.split(",")]
        if len(steps) > 2 or not all(step.isascii() and step.isdigit() for step in steps):
            raise BadArguments(f"MIGRATE_AUTO_CONVERGE is {auto_converge!r}")
        chosen += ["--auto-converge", "--auto-converge-initial", steps[0]]
        chosen += ["--auto-converge-increment", steps[1]] if len(steps) == 2 else []
    if compressed == "YES":
        chosen.append("--compressed")
    if persistent:
        chosen += ["--persistent", "--undefinesource"]
    if proved and "--unsafe" not in chosen:
        chosen.append("--unsafe")
    return chosen


class Outcome(enum.Enum):
    """Who owns the VM after `virsh migrate` has failed, and what may be cleaned up."""

    MOVED = "moved"
    STAYED = "stayed"
    REMOVE_TARGET = "remove target"
    """It runs here; on the target stands a half-started domain that never ran."""
    UNDEFINE_TARGET = "undefine target"
    IN_DOUBT = "in doubt"


def outcome(source: State, target: State) -> Outcome:
    """Return what the answers of both libvirtds mean. Only a VM seen running here allows touching the target."""
    if source in (State.ABSENT, State.OFF) and target is State.RUNNING:
        return Outcome.MOVED
    if source is not State.RUNNING:
        return Outcome.STAYED if source is State.PAUSED and target is State.ABSENT else Outcome.IN_DOUBT
    return {
        State.ABSENT: Outcome.STAYED,
        State.OFF: Outcome.UNDEFINE_TARGET,
        State.PAUSED: Outcome.REMOVE_TARGET,
    }.get(target, Outcome.IN_DOUBT)
